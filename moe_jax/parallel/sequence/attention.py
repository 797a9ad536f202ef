"""Context parallelism: attention over a sequence that is split over the devices of a mesh axis.

Call everything here inside `jax.shard_map` (with or without `check_vma`) on a device's own tokens. `sequence.shard_sequence`
lays them out. Three methods compute the same result:

    method       what travels                                        for
    ring         keys travel round the devices while each computes   long sequences
                 with the keys that have arrived (`ring`)
    all_gather   keys are gathered whole; their gradients are        few key heads, short sequences, windows;
                 reduced in f32 to the devices that hold them        takes memory for all keys
    ulysses      queries and keys change from a part of the tokens   at most as many devices as key heads
                 to a part of the heads, and back (Jacobs et al.,
                 2023, https://arxiv.org/abs/2309.14509)

If keys and values are expanded from something smaller, as in latent attention, that travels instead. With `ulysses` every
device gathers it whole, and expands the keys and values of its own heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Num

from moe_jax.kernels.attention import partial as partial_attention
from moe_jax.kernels.attention.api import attention, flash_refusal, resolve_attention_backend
from moe_jax.kernels.shapes import vary_alike
from moe_jax.layers.attend import KV, Expansion, keys_and_values
from moe_jax.parallel.choices import Hops
from moe_jax.parallel.collectives.hops import sum_scatter
from moe_jax.parallel.mesh import axis_size
from moe_jax.parallel.sequence.layouts import Layout, shard_sequence, token_indices, unshard_sequence
from moe_jax.parallel.sequence.ring import (
    AttentionResiduals,
    KVGradients,
    SequenceRing,
    as_dtypes_of,
    gradients_of_kv,
    ring_attention,
)

Method = Literal["ring", "all_gather", "ulysses"]

WholeKV = tuple[Float[Array, "batch keys ..."], ...]
"""A `KV` of all devices' tokens."""


@dataclass(frozen=True)
class ContextParallel:
    """Splits a model's sequences over a mesh axis. Models use it inside `jax.shard_map`.

    Attributes:
      axis_name: the mesh axis.
      layout: the tokens of each device; see `sequence.layouts`.
      method: how attention is computed; see the table of `sequence.attention`.
      hops: how keys travel between devices: over "nccl", or as peer-to-peer "copies". The program must be compiled for it
        (`Parallelism.compiler_options`). With "copies" a ring has many transfers in flight. `Parallelism` overrides it.

    Raises:
      ValueError: an unknown layout, method or hops.
    """

    axis_name: str = "context"
    layout: Layout = "zigzag"
    method: Method = "ring"
    hops: Hops = "nccl"

    def __post_init__(self):
        for name, value, known in (("layout", self.layout, Layout), ("method", self.method, Method), ("hops", self.hops, Hops)):
            if value not in get_args(known):
                raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(map(repr, get_args(known)))}")

    def starts_of_segments(self, segment_ids: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
        """Returns `starts_of_segments` for this axis and layout."""
        return starts_of_segments(segment_ids, axis_name=self.axis_name, layout=self.layout)

    def positions(self, starts: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
        """Returns each token's index in its segment, for rotary embeddings."""
        return own_tokens(starts.shape[1], axis_name=self.axis_name, layout=self.layout) - starts

    def shift_left(self, x: Num[Array, "batch seq"], offset: int) -> Num[Array, "batch seq"]:
        """Returns, for each local token, the entry of x `offset` tokens later in the sequence; 0 past its end.

        Gathers the entries of all devices, 4 bytes per token.
        """
        whole = jnp.pad(_gather(x, self.axis_name, self.layout), ((0, 0), (0, offset)))[:, offset:]
        return _own_part(whole, self.axis_name, self.layout)

    def attention(
        self,
        q,
        kv: KV,
        starts: Int[Array, "batch seq"],
        *,
        scale: float,
        expansion: Expansion | None = None,
        window: Int[Array, ""] | None = None,
    ) -> Array:
        """Computes `context_attention` for segments that begin at `starts`."""
        return context_attention(q, *kv, scale=scale, parallel=self, expansion=expansion, segment_starts=starts, window=window)


def context_attention(
    q: Float[Array, "batch seq heads head_dim"],
    *kv: Float[Array, "batch seq ..."],
    scale: float,
    parallel: ContextParallel = ContextParallel(),
    expansion: Expansion | None = None,
    segment_starts: Int[Array, "batch seq"] | None = None,
    window: Int[Array, ""] | int | None = None,
    backend: str | None = None,
) -> Float[Array, "batch seq heads value_dim"]:
    """Computes causal attention over a sequence split over devices. Each device passes and gets its own tokens.

    A token sees itself and the earlier tokens of its segment. With a window (which may be traced) it sees at most the last
    `window` tokens. q and k are already rotated by their positions (`ContextParallel.positions`).

    Args:
      kv: k [batch, seq, kv_heads, head_dim] and v [batch, seq, kv_heads, value_dim], or the arrays that `expansion` expands.
      parallel: the mesh axis, the layout, the method, and how keys travel.
      expansion: (k, v) = expand(weights, *kv). `kv` travels instead of k and v, and each device expands the received parts.
        Each device's gradients of `kv` are in the dtype of `kv`, and are summed in f32. The gradients of the weights are summed
        in f32 over all received parts. With `ulysses` the leading axis of the weights is the heads, or the concatenated rows of
        the heads. From a part of this axis `expand` computes the keys and values of these heads.
      segment_starts: `starts_of_segments` of the segment ids, computed once for many layers. Default: one segment.
      backend: "mosaic" (default on Hopper in bf16 and f16) or "xla".

    Raises:
      ValueError: shapes that do not match; a window below 1; an unknown backend, or one that does not support the input. Also a
        length that the layout cannot split. With `ulysses`, heads, key heads or rows of weights that the devices do not divide.
      NameError: outside `shard_map`, or inside one whose mesh lacks the axis.
    """
    axis_name, layout = parallel.axis_name, parallel.layout
    expand, weights = expansion or (None, ())
    if expand is None and len(kv) != 2:
        raise ValueError(f"without an expansion, kv must be k and v; got {len(kv)} arrays")
    k, v = jax.eval_shape(partial(keys_and_values, expand), weights, kv)
    _check_shapes(q, k, v)
    if parallel.method == "ulysses":
        _check_heads(q, k, None if expand is None else weights, axis_name)
    if segment_starts is not None and segment_starts.shape != q.shape[:2]:
        raise ValueError(f"segment_starts must be [batch, seq] = {q.shape[:2]}; got {segment_starts.shape}")
    if isinstance(window, int | np.integer) and window < 1:
        raise ValueError(f"window must be at least 1 or None; got {window}")
    own = own_tokens(q.shape[1], axis_name=axis_name, layout=layout)
    if segment_starts is None:
        segment_starts = jnp.zeros(q.shape[:2], jnp.int32)
    q, kv, weights, segment_starts, own = vary_alike((q, kv, weights, segment_starts, own))
    expansion = None if expand is None else Expansion(expand, weights)
    if parallel.method == "ulysses":
        attend = partial(attention, scale=scale, window=window, backend=backend)
        return _ulysses_attention(q, kv, expansion, segment_starts, parallel, attend)
    first_token = segment_starts
    if window is not None:
        # At least 1, so that a token sees itself; at most the sequence, so that `own - window` does not overflow.
        window = jnp.clip(window, 1, own.shape[0] * lax.axis_size(axis_name)).astype(jnp.int32)
        first_token = jnp.maximum(first_token, own - window + 1)
    backend = resolve_attention_backend(backend, partial(flash_refusal, q, k, v, scale, None))
    ring = SequenceRing(axis_name, layout, float(scale), backend, expand, parallel.hops)
    compute = ring_attention if parallel.method == "ring" else _all_gather_attention
    return compute(q, kv, weights, first_token, ring)


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
            f"of heads and of key heads; got {q.shape[2]} and {k.shape[2]}: use method 'ring' or 'all_gather'"
        )
    shapes = [weight.shape for weight in jax.tree.leaves(weights)]
    if weights is not None and not (shapes and all(shape and shape[0] % k.shape[2] == 0 for shape in shapes)):
        raise ValueError(
            "method 'ulysses' expands only the keys and values of a device's own heads: the leading axis of weights must be "
            f"the {k.shape[2]} key heads, one after the other; got {shapes}: use method 'ring' or 'all_gather'"
        )


def starts_of_segments(
    segment_ids: Int[Array, "batch seq"], *, axis_name: str = "context", layout: Layout = "zigzag"
) -> Int[Array, "batch seq"]:
    """Returns the global index of the first token of each token's segment, which may be on another device.

    A segment is a run of equal ids; padding (0) is one too. Gathers the ids of all devices, 4 bytes per token.
    """
    ids = _gather(segment_ids, axis_name, layout)
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return _own_part(lax.cummax(jnp.where(begins, index, 0), axis=1), axis_name, layout)


def own_tokens(length: int, *, axis_name: str = "context", layout: Layout = "zigzag") -> Int[Array, "length"]:
    """Returns the global indices of this device's `length` tokens."""
    devices = axis_size(axis_name)
    return token_indices(length, lax.axis_index(axis_name), devices, layout)


def _gather(x: Array, axis_name: str, layout: Layout) -> Array:
    """Returns the tokens of all devices in the order of the sequence."""
    devices = axis_size(axis_name)
    return unshard_sequence(lax.all_gather(x, axis_name, axis=1, tiled=True), devices, layout)


def _own_part(whole: Array, axis_name: str, layout: Layout) -> Array:
    """Returns this device's tokens of an array in the order of the sequence."""
    devices = axis_size(axis_name)
    length = whole.shape[1] // devices
    parts = shard_sequence(whole, devices, layout)
    return lax.dynamic_slice_in_dim(parts, lax.axis_index(axis_name) * length, length, axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _all_gather_attention(q, kv: KV, weights, first_token, ring: SequenceRing):
    return _all_gather_forward(q, kv, weights, first_token, ring)[0]


def _all_gather_forward(q, kv: KV, weights, first_token, ring: SequenceRing) -> tuple[Array, AttentionResiduals]:
    keys = keys_and_values(ring.expand, weights, _gather_all(kv, ring))
    bounds = _all_gather_bounds(first_token, ring)
    out, lse = partial_attention.forward(q, *keys, bounds, scale=ring.scale, backend=ring.backend, out_dtype=q.dtype)
    out, lse = checkpoint_name((out, lse), "attention")
    return out, AttentionResiduals(q, kv, weights, first_token, out, lse)


def _all_gather_backward(ring: SequenceRing, residuals: AttentionResiduals, dout):
    q, kv, weights, first_token, out, lse = residuals
    delta = jnp.einsum("bqhe,bqhe->bhq", dout.astype(lse.dtype), out.astype(lse.dtype))
    bounds = _all_gather_bounds(first_token, ring)

    def gradient(kernel, keys, previous=None, **options):
        options |= dict(scale=ring.scale, backend=ring.backend, previous=previous)
        k, v = keys
        return kernel(partial_attention.BackwardInputs(q, k, v, dout, lse, delta), bounds, **options)

    whole = _gather_all(kv, ring)
    key_gradients = partial(gradient, partial_attention.gradients_of_keys)
    of_whole, dweights = gradients_of_kv(ring.expand, weights, whole, key_gradients, KVGradients(None, None))
    assert of_whole is not None
    shards = (shard_sequence(a, ring.size, ring.layout) for a in of_whole)
    dkv = tuple(lax.psum_scatter(a, ring.axis_name, scatter_dimension=1, tiled=True) for a in shards)
    # dq is computed last: meanwhile the gradients of keys travel.
    keys = keys_and_values(ring.expand, weights, whole)
    dq = gradient(partial_attention.gradient_of_queries, keys, out_dtype=q.dtype)
    return dq, as_dtypes_of(kv, dkv), as_dtypes_of(weights, dweights), None


_all_gather_attention.defvjp(_all_gather_forward, _all_gather_backward)


def _gather_all(kv: KV, ring: SequenceRing) -> WholeKV:
    return tuple(_gather(a, ring.axis_name, ring.layout) for a in kv)


def _all_gather_bounds(first_token: Int[Array, "batch seq"], ring: SequenceRing) -> partial_attention.Bounds:
    own = own_tokens(first_token.shape[1], axis_name=ring.axis_name, layout=ring.layout)
    return first_token, jnp.broadcast_to(own, first_token.shape)


def _ulysses_attention(
    q,
    kv: KV,
    expansion: Expansion | None,
    segment_starts: Int[Array, "batch seq"],
    parallel: ContextParallel,
    attend: Callable,
):
    axis_name, layout = parallel.axis_name, parallel.layout
    devices = axis_size(axis_name)

    def to_heads(x: Array) -> Array:
        whole = lax.all_to_all(x, axis_name, split_axis=2, concat_axis=1, tiled=True)
        return unshard_sequence(whole, devices, layout)

    def of_own_heads(weight: Array) -> Array:
        rows = weight.shape[0] // devices
        return lax.dynamic_slice_in_dim(weight, lax.axis_index(axis_name) * rows, rows)

    if expansion is None:
        k, v = map(to_heads, kv)
    else:
        own_weights = jax.tree.map(of_own_heads, expansion.weights)
        k, v = expansion.expand(own_weights, *_gather_summing(axis_name, layout, kv))
    # Segments that begin at different tokens are different segments, so the first tokens serve as ids.
    ids = _gather(segment_starts, axis_name, layout)
    out = attend(to_heads(q), k, v, query_segment_ids=ids, key_segment_ids=ids)
    return lax.all_to_all(shard_sequence(out, devices, layout), axis_name, split_axis=1, concat_axis=2, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_summing(axis_name: str, layout: Layout, kv: KV) -> WholeKV:
    """Gathers `kv` of all devices in the order of the sequence.

    Each device's gradients return in the dtype of `kv`, and are summed there in f32.
    """
    return tuple(_gather(a, axis_name, layout) for a in kv)


def _sums_at_home(axis_name: str, layout: Layout, _, gradients: WholeKV) -> tuple[KV]:
    shards = (shard_sequence(a, lax.axis_size(axis_name), layout) for a in gradients)
    return (tuple(sum_scatter(a, axis_name, 1).astype(a.dtype) for a in shards),)


_gather_summing.defvjp(lambda axis_name, layout, kv: (_gather_summing(axis_name, layout, kv), None), _sums_at_home)
