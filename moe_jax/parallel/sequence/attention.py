"""Context parallelism: attention over a sequence that is split over the devices of a mesh axis.

Everything here is called inside `jax.shard_map` (with or without `check_vma`) on a device's own tokens, laid out by
`sequence.shard_sequence`. Three methods compute the same:

    ring         keys go round the devices while each computes with those that are there (`ring`)
    all_gather   keys are gathered whole, their gradients reduced in f32 to the devices that hold them: two collectives and
                 memory for all keys; for few key heads, short sequences, or windows
    ulysses      queries and keys change from a part of the tokens to a part of the heads and back (Jacobs et al., 2023,
                 https://arxiv.org/abs/2309.14509): at most as many devices as key heads

Where keys and values are made of something smaller, as in latent attention, that travels instead. With `ulysses` every device
gathers it whole, and expands the keys and values of its own heads.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention import partial as partial_attention
from moe_jax.kernels.attention.api import attention, resolve_attention_backend
from moe_jax.kernels.attention.mosaic.flash import refusal
from moe_jax.kernels.varying import vary_alike
from moe_jax.parallel.choices import Hops
from moe_jax.parallel.collectives.sums import sum_scatter
from moe_jax.parallel.mesh import axis_size
from moe_jax.parallel.sequence.layouts import Layout, shard_sequence, token_indices, unshard_sequence
from moe_jax.parallel.sequence.ring import Expand, Kept, Ring, as_dtypes_of, gradients_of_kept, keys_and_values, ring_attention

Method = Literal["ring", "all_gather", "ulysses"]


@dataclass(frozen=True)
class ContextParallel:
    """How a model's sequences are split: `model(tokens, ..., context_parallel=ContextParallel())` inside `jax.shard_map`.

    Attributes:
      axis_name: the mesh axis over which they are.
      layout: which tokens a device has; see `sequence`.
      method: how attention is computed; see `context_attention`.
      hops: how the program makes hops (`parallel.hops`). In a `Parallelism` it says nothing: its own takes the place.

    Raises:
      ValueError: an unknown layout, method or hops.
    """

    axis_name: str = "context"
    layout: Layout = "zigzag"
    method: Method = "ring"
    hops: Hops = "nccl"

    def __post_init__(self):
        for name, value, known in (("layout", self.layout, Layout), ("method", self.method, Method), ("hops", self.hops, Hops)):
            _check_known(name, value, known)

    def starts_of_segments(self, segment_ids: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
        """See the function of this name."""
        return starts_of_segments(segment_ids, axis_name=self.axis_name, layout=self.layout)

    def positions(self, starts: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
        """Each token's index in its segment."""
        return own_tokens(starts.shape[1], axis_name=self.axis_name, layout=self.layout) - starts

    def later(self, x: Int[Array, "batch seq"], offset: int) -> Int[Array, "batch seq"]:
        """See the function of this name."""
        return later(x, offset, axis_name=self.axis_name, layout=self.layout)

    def attention(
        self,
        q,
        kept: Kept,
        starts: Int[Array, "batch seq"],
        *,
        scale: float,
        expand: Expand | None = None,
        weights=(),
        window=None,
    ) -> Array:
        """`context_attention` with the segments that begin at `starts`."""
        return context_attention(
            q,
            *kept,
            expand=expand,
            weights=weights,
            scale=scale,
            axis_name=self.axis_name,
            layout=self.layout,
            method=self.method,
            hops=self.hops,
            segment_starts=starts,
            window=window,
        )


def context_attention(
    q: Float[Array, "batch seq heads head_dim"],
    *kept: Float[Array, "batch seq ..."],
    scale: float,
    expand: Expand | None = None,
    weights=(),
    axis_name: str = "context",
    layout: Layout = "zigzag",
    method: Method = "ring",
    hops: Hops = "nccl",
    segment_ids: Int[Array, "batch seq"] | None = None,
    segment_starts: Int[Array, "batch seq"] | None = None,
    window: Int[Array, ""] | int | None = None,
    backend: str | None = None,
) -> Float[Array, "batch seq heads value_dim"]:
    """What `kernels.attention` gives for the whole sequence, of which each device has and returns its own tokens.

    A token sees itself and the earlier tokens of its segment, a run of equal ids; with a window (which may be traced) only
    those among the last `window`. q and k come with their rotary positions, for which `ContextParallel.positions` is there.

    Args:
      kept: k [batch, seq, kv_heads, head_dim] and v [batch, seq, kv_heads, value_dim], or what `expand` makes them of.
      expand: (k, v) = expand(weights, *kept), closing over no array. `kept` travels in place of k and v, each device expands
        what arrives, and the gradients of `kept`, each device's in the dtype of `kept`, are summed in f32.
      weights: arrays, the same on all devices of the axis; their gradients are summed in f32 over all that arrives. With
        `ulysses` they have the heads, or rows of one head after the other, as leading axis, and of a part of them `expand`
        makes the keys and values of these heads.
      axis_name, layout: the mesh axis over which the sequence is split, and how.
      hops: how the program is compiled to make hops (`Parallelism.compiler_options`); with "copies" a ring has many under way.
      segment_ids: this device's (default: all one segment). Those of all devices are gathered, 4 bytes a token.
      segment_starts: instead of ids what `starts_of_segments` gives for them, computed once for many layers.
      backend: "mosaic" (default on Hopper in bf16 and f16) or "xla".

    Raises:
      ValueError: shapes that do not fit together; a window below 1; unknown hops; an unknown layout, method or backend, or one
        that does not take the input; a length that the layout cannot split; with `ulysses` a number of heads or key heads, or
        of rows of `weights`, that the devices do not divide.
      NameError: outside `shard_map`, or in one whose mesh lacks the axis.
    """
    if expand is None and len(kept) != 2:
        raise ValueError(f"without expand, kept must be k and v; got {len(kept)} arrays")
    k, v = jax.eval_shape(partial(keys_and_values, expand), weights, kept)
    _check_shapes(q, k, v)
    _check_known("hops", hops, Hops)
    _check_known("method", method, Method)
    if method == "ulysses":
        _check_heads(q, k, None if expand is None else weights, axis_name)
    if segment_ids is not None and segment_starts is not None:
        raise ValueError("segment_ids and segment_starts say the same; give one of them")
    for name, array in (("segment_ids", segment_ids), ("segment_starts", segment_starts)):
        if array is not None and array.shape != q.shape[:2]:
            raise ValueError(f"{name} must be [batch, seq] = {q.shape[:2]}; got {array.shape}")
    if isinstance(window, int | np.integer) and window < 1:
        raise ValueError(f"window must be at least 1 or None; got {window}")
    own = own_tokens(q.shape[1], axis_name=axis_name, layout=layout)
    if segment_ids is not None:
        segment_starts = starts_of_segments(segment_ids, axis_name=axis_name, layout=layout)
    if segment_starts is None:
        segment_starts = jnp.zeros(q.shape[:2], jnp.int32)
    q, kept, weights, segment_starts, own = vary_alike((q, kept, weights, segment_starts, own))
    if method == "ulysses":
        return _ulysses_attention(q, kept, expand, weights, segment_starts, window, scale, axis_name, layout, backend)
    first_token = segment_starts
    if window is not None:
        # A token sees itself at least, and a large window does not overflow.
        window = jnp.clip(window, 1, own.shape[0] * lax.axis_size(axis_name)).astype(jnp.int32)
        first_token = jnp.maximum(first_token, own - window + 1)
    backend = resolve_attention_backend(backend, refusal(q, k, v, scale, None))
    ring = Ring(axis_name, layout, float(scale), backend, expand, hops)
    compute = ring_attention if method == "ring" else _all_gather_attention
    return compute(q, kept, weights, first_token, ring)


def _check_known(name: str, value: str, known) -> None:
    if value not in get_args(known):
        raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(map(repr, get_args(known)))}")


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    alike = q.ndim == k.ndim == v.ndim == 4 and k.shape[:2] == q.shape[:2] and k.shape[:3] == v.shape[:3]
    if not alike or k.shape[3] != q.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(
            "q must be [batch, seq, heads, head_dim], k [batch, seq, kv_heads, head_dim], v [batch, seq, kv_heads, value_dim], "
            f"heads a multiple of kv_heads; got q {q.shape}, k {k.shape}, v {v.shape}"
        )


def _check_heads(q: Array, k: Array, weights, axis_name: str) -> None:
    devices = axis_size(axis_name)
    if q.shape[2] % devices or k.shape[2] % devices:
        raise ValueError(
            f"method 'ulysses' splits heads over the {devices} devices of axis {axis_name!r}, which must divide the numbers "
            f"of heads and of key heads; got {q.shape[2]} and {k.shape[2]}: take method 'ring' or 'all_gather'"
        )
    shapes = [weight.shape for weight in jax.tree.leaves(weights)]
    if weights is not None and not (shapes and all(shape and shape[0] % k.shape[2] == 0 for shape in shapes)):
        raise ValueError(
            "method 'ulysses' expands the keys and values of a device's own heads alone: the leading axis of weights must be "
            f"the {k.shape[2]} key heads, one after the other; got {shapes}: take method 'ring' or 'all_gather'"
        )


def starts_of_segments(
    segment_ids: Int[Array, "batch seq"], *, axis_name: str = "context", layout: Layout = "zigzag"
) -> Int[Array, "batch seq"]:
    """The index in the sequence of the first token of each token's segment, wherever that token lies.

    A segment is a run of equal ids, padding (0) too. The ids of all devices are gathered, 4 bytes a token of the sequence.
    """
    ids = _gather(segment_ids, axis_name, layout)
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return _own_part(lax.cummax(jnp.where(begins, index, 0), axis=1), axis_name, layout)


def later(
    x: Int[Array, "batch seq"], offset: int, *, axis_name: str = "context", layout: Layout = "zigzag"
) -> Int[Array, "batch seq"]:
    """What stands `offset` tokens later in the sequence, wherever that lies; 0 behind its end. 4 bytes a token are gathered."""
    return _own_part(jnp.pad(_gather(x, axis_name, layout), ((0, 0), (0, offset)))[:, offset:], axis_name, layout)


def own_tokens(length: int, *, axis_name: str = "context", layout: Layout = "zigzag") -> Int[Array, "length"]:
    """The indices in the sequence of this device's `length` tokens."""
    devices = axis_size(axis_name)
    return token_indices(length, lax.axis_index(axis_name), devices, layout)


def _gather(x: Array, axis_name: str, layout: Layout) -> Array:
    """The tokens of all devices in the order of the sequence."""
    devices = axis_size(axis_name)
    return unshard_sequence(lax.all_gather(x, axis_name, axis=1, tiled=True), devices, layout)


def _own_part(whole: Array, axis_name: str, layout: Layout) -> Array:
    """This device's tokens of those in the order of the sequence."""
    devices = axis_size(axis_name)
    length = whole.shape[1] // devices
    parts = shard_sequence(whole, devices, layout)
    return lax.dynamic_slice_in_dim(parts, lax.axis_index(axis_name) * length, length, axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _all_gather_attention(q, kept: Kept, weights, first_token, ring: Ring):
    return _all_gather_forward(q, kept, weights, first_token, ring)[0]


def _all_gather_forward(q, kept: Kept, weights, first_token, ring: Ring):
    keys = keys_and_values(ring.expand, weights, _gather_all(kept, ring))
    bounds = _all_gather_bounds(first_token, ring)
    out, lse = partial_attention.forward(q, *keys, bounds, scale=ring.scale, backend=ring.backend, out_dtype=q.dtype)
    return out, (q, kept, weights, first_token, out, lse)


def _all_gather_backward(ring: Ring, residuals, dout):
    q, kept, weights, first_token, out, lse = residuals
    delta = jnp.einsum("bqhe,bqhe->bhq", dout.astype(lse.dtype), out.astype(lse.dtype))
    bounds = _all_gather_bounds(first_token, ring)

    def gradient(of, keys, previous=None, **options):
        options |= dict(scale=ring.scale, backend=ring.backend, previous=previous)
        k, v = keys
        return of(partial_attention.BackwardInputs(q, k, v, dout, lse, delta), bounds, **options)

    whole = _gather_all(kept, ring)
    of_keys = partial(gradient, partial_attention.gradients_of_keys)
    of_whole, dweights = gradients_of_kept(ring.expand, weights, whole, of_keys, (None, None))
    shards = (shard_sequence(a, ring.size, ring.layout) for a in of_whole)
    dkept = tuple(lax.psum_scatter(a, ring.axis_name, scatter_dimension=1, tiled=True) for a in shards)
    # While the sums travel.
    keys = keys_and_values(ring.expand, weights, whole)
    dq = gradient(partial_attention.gradient_of_queries, keys, out_dtype=q.dtype)
    return dq, as_dtypes_of(kept, dkept), as_dtypes_of(weights, dweights), None


_all_gather_attention.defvjp(_all_gather_forward, _all_gather_backward)


def _gather_all(kept: Kept, ring: Ring) -> Kept:
    return tuple(_gather(a, ring.axis_name, ring.layout) for a in kept)


def _all_gather_bounds(first_token: Int[Array, "batch seq"], ring: Ring) -> partial_attention.Bounds:
    own = own_tokens(first_token.shape[1], axis_name=ring.axis_name, layout=ring.layout)
    return first_token, jnp.broadcast_to(own, first_token.shape)


def _ulysses_attention(
    q, kept: Kept, expand, weights, segment_starts, window, scale: float, axis_name: str, layout: Layout, backend: str | None
):
    devices = axis_size(axis_name)

    def to_heads(x: Array) -> Array:
        whole = lax.all_to_all(x, axis_name, split_axis=2, concat_axis=1, tiled=True)
        return unshard_sequence(whole, devices, layout)

    def of_own_heads(weight: Array) -> Array:
        rows = weight.shape[0] // devices
        return lax.dynamic_slice_in_dim(weight, lax.axis_index(axis_name) * rows, rows)

    if expand is None:
        k, v = map(to_heads, kept)
    else:
        k, v = expand(jax.tree.map(of_own_heads, weights), *_gather_summing(axis_name, layout, kept))
    # Segments that begin at different tokens are different segments.
    ids = _gather(segment_starts, axis_name, layout)
    out = attention(
        to_heads(q),
        k,
        v,
        scale=scale,
        query_segment_ids=ids,
        key_segment_ids=ids,
        window=window,
        backend=backend,
    )
    return lax.all_to_all(shard_sequence(out, devices, layout), axis_name, split_axis=1, concat_axis=2, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_summing(axis_name: str, layout: Layout, kept: Kept) -> Kept:
    """`kept` of all devices in the order of the sequence; each device's gradients travel home in its dtype, summed in f32."""
    return tuple(_gather(a, axis_name, layout) for a in kept)


def _sums_at_home(axis_name: str, layout: Layout, _, gradients: Kept) -> tuple[Kept]:
    shards = (shard_sequence(a, lax.axis_size(axis_name), layout) for a in gradients)
    return (tuple(sum_scatter(a, axis_name, 1).astype(a.dtype) for a in shards),)


_gather_summing.defvjp(lambda axis_name, layout, kept: (_gather_summing(axis_name, layout, kept), None), _sums_at_home)
