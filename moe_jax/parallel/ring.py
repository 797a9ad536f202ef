"""Ring attention (Liu et al., 2023, https://arxiv.org/abs/2310.01889): keys go round the devices, queries stay.

In step i device r computes with the keys of device r - i, while those of device r - i - 1 are on their way to it. Which keys
a query sees is one interval of the sequence and, in every layout of `sequence`, one of each device's tokens: no masks and no
segment ids travel, and a step is one kernel without a branch, which skips what nobody sees.

Per step and device, for c tokens in bf16: k and v move, 4*c*kv_heads*head_dim bytes; backward dk and dv too, in f32,
8*c*kv_heads*head_dim bytes, and are at home after the last step. out, dq, dk and dv are summed in f32 inside the kernels.

Where keys and values are made of something smaller (latent attention), that travels in their place: each device expands what
arrives, and takes its gradients back through the expansion before they leave.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.kernels import partial_attention
from moe_jax.kernels.precision import widened
from moe_jax.parallel.sequence import Layout, token_indices, tokens_before

Kept = tuple[Float[Array, "batch seq ..."], ...]
"""k and v, or what they are made of."""

Expand = Callable[..., tuple[Array, Array]]
"""(k, v) = expand(weights, *kept), of any tokens and of each alone; its gradients are taken by `jax.vjp`."""


@dataclass(frozen=True)
class Ring:
    """The devices of a mesh axis, how the sequence lies on them, and how each computes."""

    axis_name: str
    layout: Layout
    scale: float
    backend: str
    expand: Expand | None = None

    @property
    def size(self) -> int:
        """How many devices there are."""
        return lax.axis_size(self.axis_name)

    def pass_on(self, message: Array) -> Array:
        """Sends the message to the next device; returns that of the device before."""
        return lax.ppermute(message, self.axis_name, [(i, (i + 1) % self.size) for i in range(self.size)])

    def visible(self, first_token: Int[Array, "batch seq"], step: int) -> partial_attention.Bounds:
        """Each query's interval of the keys that this device has in a step, none if it ends before it begins."""
        length, device = first_token.shape[1], lax.axis_index(self.axis_name)
        holder = (device - step) % self.size
        before = partial(tokens_before, length=length, device=holder, num_shards=self.size, layout=self.layout)
        behind = token_indices(length, device, self.size, self.layout) + 1
        return before(first_token), jnp.broadcast_to(before(behind) - 1, first_token.shape)


def keys_and_values(expand: Expand | None, weights, kept: Kept) -> tuple[Array, Array]:
    """expand(weights, *kept); without `expand`, `kept` are keys and values."""
    k, v = kept if expand is None else expand(weights, *kept)
    return k, v


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def ring_attention(
    q: Float[Array, "batch seq heads head_dim"],
    kept: Kept,
    weights,
    first_token: Int[Array, "batch seq"],
    ring: Ring,
) -> Float[Array, "batch seq heads value_dim"]:
    """Attention of this device's queries to the tokens first_token[i] .. own index of the whole sequence, in q's dtype.

    Inside `jax.shard_map`, where all arrays vary over the ring's axis. `kept` and `weights` are the arguments of `ring.expand`,
    without which `kept` is k [batch, seq, kv_heads, head_dim] and v [batch, seq, kv_heads, value_dim], and `weights` is ().
    Kept for backward: the arguments, out and lse.
    """
    return _forward(q, kept, weights, first_token, ring)[0]


def _forward(q, kept: Kept, weights, first_token, ring: Ring):
    travelling, sums = _pack(kept), None
    for step in range(ring.size):
        k, v = keys_and_values(ring.expand, weights, _unpack(travelling, kept) if step > 0 else kept)
        if step + 1 < ring.size:
            travelling = ring.pass_on(travelling)
        bounds = ring.visible(first_token, step)
        sums = partial_attention.forward(q, k, v, bounds, scale=ring.scale, backend=ring.backend, previous=sums)
        travelling, sums = _after_each_other(travelling, sums)
    assert sums is not None
    out, lse = sums
    out = out.astype(q.dtype)
    return out, (q, kept, weights, first_token, out, lse)


def _backward(ring: Ring, residuals, dout):
    q, kept, weights, first_token, out, lse = residuals
    delta = jnp.einsum("bqhe,bqhe->bhq", dout.astype(lse.dtype), out.astype(lse.dtype))

    def gradient(of, step: int, keys, previous):
        bounds = ring.visible(first_token, step)
        return of(dout, q, *keys, lse, delta, bounds, scale=ring.scale, backend=ring.backend, previous=previous)

    def of_queries(step: int, kept: Kept, previous):
        keys = keys_and_values(ring.expand, weights, kept)
        return gradient(partial_attention.gradient_of_queries, step, keys, previous)

    def of_kept(step: int, kept: Kept, previous):
        of_keys = partial(gradient, partial_attention.gradients_of_keys, step)
        return gradients_of_kept(ring.expand, weights, kept, of_keys, previous)

    # One hop at a time, each beside one kernel, for over NCCL XLA keeps no two in flight: the sums of dk and dv travel while
    # dq is computed, keys while dk and dv are, and the sums go home while a device computes what its own keys add to them.
    travelling, sums, dweights = _pack(kept), None, None
    if ring.size > 1:
        travelling = ring.pass_on(travelling)
    dq = of_queries(0, kept, None)
    for step in range(1, ring.size):
        (travelling, sums), dq = _after_each_other((travelling, sums), dq)
        arrived = _unpack(travelling, kept)
        if sums is not None:
            sums = ring.pass_on(sums)
        dq = of_queries(step, arrived, dq)
        (travelling, sums), dq = _after_each_other((travelling, sums), dq)
        if step + 1 < ring.size:
            travelling = ring.pass_on(travelling)
        sums = None if sums is None else _unpack(sums, kept)
        sums, dweights = of_kept(step, arrived, (sums, dweights))
        sums = _pack(sums)
    kept, (dq, sums) = _after_each_other(kept, (dq, sums))
    if sums is not None:
        sums = ring.pass_on(sums)
    dkept, dweights = of_kept(0, kept, (None, dweights))
    if sums is not None:
        dkept = _add(dkept, _unpack(sums, kept))
    return dq.astype(q.dtype), as_dtypes_of(kept, dkept), as_dtypes_of(weights, dweights), None


def gradients_of_kept(expand: Expand | None, weights, kept: Kept, of_keys: Callable, previous) -> tuple:
    """The gradients of (kept, weights) with `previous`, others or None of each, added: in f32.

    `of_keys(keys, previous)` gives those of keys and values, the previous ones added; those taken back through `expand` are
    in the dtypes of its arguments before they are added.
    """
    of_kept, of_weights = previous
    if expand is None:
        return of_keys(kept, of_kept), ()
    keys, pullback = jax.vjp(expand, weights, *kept)
    own_weights, *own_kept = pullback(as_dtypes_of(keys, of_keys(keys, None)))
    return _add(of_kept, tuple(own_kept)), _add(of_weights, own_weights)


def _add(previous, gradients):
    """The sum in f32 of arrays alike, or the one where there is no other."""
    wide = jax.tree.map(widened, gradients)
    return wide if previous is None else jax.tree.map(jnp.add, previous, wide)


def as_dtypes_of(like, arrays):
    """The arrays in the dtypes of `like`, a pytree alike."""
    return jax.tree.map(lambda like, a: a.astype(like.dtype), like, arrays)


def _pack(arrays: Kept) -> Array:
    """All as one array: over NCCL, XLA would run one of two hops beside a kernel and wait for the other."""
    return jnp.concatenate([a.reshape(-1) for a in arrays])


def _unpack(message: Array, like: Kept) -> Kept:
    parts = jnp.split(message, list(accumulate(a.size for a in like[:-1])))
    return tuple(part.reshape(a.shape) for part, a in zip(parts, like, strict=True))


def _after_each_other(later, earlier):
    """Both as they are; what uses `later` begins after `earlier` is there."""
    return lax.optimization_barrier((later, earlier))


ring_attention.defvjp(_forward, _backward)
