"""Ring attention (Liu et al., 2023, https://arxiv.org/abs/2310.01889): keys go round the devices, queries stay.

In step i device r computes with the keys of device r - i, while those of device r - i - 1 are on their way to it. Which keys
a query sees is one interval of the sequence and, in every layout of `sequence`, one of each device's tokens: no masks and no
segment ids travel, and a step is one kernel without a branch, which skips what nobody sees.

Per step and device, for c tokens in bf16: k and v move, 4*c*kv_heads*head_dim bytes; backward dk and dv too, in f32,
8*c*kv_heads*head_dim bytes, and are at home after the last step. out, dq, dk and dv are summed in f32 inside the kernels.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.kernels import partial_attention
from moe_jax.parallel.sequence import Layout, token_indices, tokens_before


@dataclass(frozen=True)
class Ring:
    """The devices of a mesh axis, how the sequence lies on them, and how each computes."""

    axis_name: str
    layout: Layout
    scale: float
    backend: str

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


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def ring_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads value_dim"],
    first_token: Int[Array, "batch seq"],
    ring: Ring,
) -> Float[Array, "batch seq heads value_dim"]:
    """Attention of this device's queries to the tokens first_token[i] .. own index of the whole sequence, in q's dtype.

    Inside `jax.shard_map`, where all arrays vary over the ring's axis. Kept for backward: q, k, v, out and lse.
    """
    return _forward(q, k, v, first_token, ring)[0]


def _forward(q, k, v, first_token, ring: Ring):
    travelling, sums = _pack(k, v), None
    for step in range(ring.size):
        step_k, step_v = _unpack(travelling, k, v) if step > 0 else (k, v)
        if step + 1 < ring.size:
            travelling = ring.pass_on(travelling)
        bounds = ring.visible(first_token, step)
        sums = partial_attention.forward(q, step_k, step_v, bounds, scale=ring.scale, backend=ring.backend, previous=sums)
        travelling, sums = _after_each_other(travelling, sums)
    assert sums is not None
    out, lse = sums
    out = out.astype(q.dtype)
    return out, (q, k, v, first_token, out, lse)


def _backward(ring: Ring, kept, dout):
    q, k, v, first_token, out, lse = kept
    delta = jnp.einsum("bqhe,bqhe->bhq", dout.astype(lse.dtype), out.astype(lse.dtype))

    def gradient(of, keys, step: int, previous):
        bounds = ring.visible(first_token, step)
        return of(dout, q, *keys, lse, delta, bounds, scale=ring.scale, backend=ring.backend, previous=previous)

    # One hop at a time, each beside one kernel, for XLA keeps no two collectives in flight: the sums of dk and dv travel while
    # dq is computed, keys while dk and dv are, and the sums go home while a device computes what its own keys add to them.
    travelling, sums = _pack(k, v), None
    if ring.size > 1:
        travelling = ring.pass_on(travelling)
    dq = gradient(partial_attention.gradient_of_queries, (k, v), 0, None)
    for step in range(1, ring.size):
        (travelling, sums), dq = _after_each_other((travelling, sums), dq)
        keys = _unpack(travelling, k, v)
        if sums is not None:
            sums = ring.pass_on(sums)
        dq = gradient(partial_attention.gradient_of_queries, keys, step, dq)
        (travelling, sums), dq = _after_each_other((travelling, sums), dq)
        if step + 1 < ring.size:
            travelling = ring.pass_on(travelling)
        sums = None if sums is None else _unpack(sums, k, v)
        sums = _pack(*gradient(partial_attention.gradients_of_keys, keys, step, sums))
    (k, v), (dq, sums) = _after_each_other((k, v), (dq, sums))
    if sums is not None:
        sums = ring.pass_on(sums)
    dk, dv = gradient(partial_attention.gradients_of_keys, (k, v), 0, None)
    if sums is not None:
        dk, dv = jax.tree.map(jnp.add, (dk, dv), _unpack(sums, k, v))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


def _pack(of_k: Array, of_v: Array) -> Array:
    """Both as one array: XLA would run one of two hops beside a kernel and wait for the other."""
    return jnp.concatenate([of_k.reshape(-1), of_v.reshape(-1)])


def _unpack(message: Array, k: Array, v: Array) -> tuple[Array, Array]:
    return message[: k.size].reshape(k.shape), message[k.size :].reshape(v.shape)


def _after_each_other(later, earlier):
    """Both as they are; what uses `later` begins after `earlier` is there."""
    return lax.optimization_barrier((later, earlier))


ring_attention.defvjp(_forward, _backward)
