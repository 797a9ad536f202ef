"""Ring attention (Liu et al., 2023, https://arxiv.org/abs/2310.01889): keys go round the devices, queries stay.

First device r computes with its own keys, then in turns with those of the devices before it, while those of the next turn are
on their way. Over NCCL, which runs one hop beside a kernel, a turn is one device's keys. Copies (`parallel.hops`) come from
many devices at once: a turn is then as many as `KEYS_AT_ONCE` has room for, in one kernel, and each passes its keys on by so
many places. Sums in f32 are read and written once a turn, and a turn's tiles fill the cores better.

Which keys a query sees is one interval of the sequence and, in every layout of `sequence`, one of each turn's tokens put into
the order of the sequence: no masks and no segment ids travel, and a turn is one kernel without a branch, which skips what
nobody sees.

From each device, for c tokens in bf16: of k and v 4*c*kv_heads*head_dim bytes to every other device; backward as much once
more, and of dk and dv 8*c*kv_heads*head_dim in f32, which travel with their keys and are at home after the last turn. out, dq,
dk and dv are summed in f32 inside the kernels.

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

from moe_jax.kernels.attention import partial as partial_attention
from moe_jax.kernels.precision import widened
from moe_jax.parallel.choices import Hops
from moe_jax.parallel.collectives.hops import hop
from moe_jax.parallel.sequence.layouts import Layout, join_in_order, split_in_order, token_indices, tokens_before

Kept = tuple[Float[Array, "batch seq ..."], ...]
"""k and v, or what they are made of."""

Expand = Callable[..., tuple[Array, Array]]
"""(k, v) = expand(weights, *kept), of any tokens and of each alone; its gradients are taken by `jax.vjp`."""


KEYS_AT_ONCE = 2**28
"""Bytes of k and v, of other devices, that are in one turn where hops are copies; of one device there may be more."""

Turn = list[int]
"""How many places before a device those stand whose keys it computes with in one kernel."""


@dataclass(frozen=True)
class Ring:
    """The devices of a mesh axis, how the sequence lies on them, how each computes, and how data goes from one to another."""

    axis_name: str
    layout: Layout
    scale: float
    backend: str
    expand: Expand | None = None
    hops: Hops = "nccl"

    @property
    def size(self) -> int:
        """How many devices there are."""
        return lax.axis_size(self.axis_name)

    def turns(self, kept: Kept, weights) -> list[Turn]:
        """The device itself, then all others, the last turn with those that are left."""
        keys = jax.eval_shape(partial(keys_and_values, self.expand), weights, kept)
        at_once = devices_of_turn(sum(a.size * a.dtype.itemsize for a in keys), self.hops)
        others = range(1, self.size)
        return [[0], *(list(others[i : i + at_once]) for i in range(0, len(others), at_once))]

    def pack(self, arrays: Kept) -> Kept:
        """What travels: over NCCL one array, for XLA would run one of two hops beside a kernel and wait for the other."""
        return arrays if self.hops == "copies" else (jnp.concatenate([a.reshape(-1) for a in arrays]),)

    def unpack(self, message: Kept, like: Kept) -> Kept:
        """What was packed, of arrays like these."""
        if self.hops == "copies":
            return message
        parts = jnp.split(message[0], list(accumulate(a.size for a in like[:-1])))
        return tuple(part.reshape(a.shape) for part, a in zip(parts, like, strict=True))

    def pass_on(self, messages: list[Kept], turn: Turn, following: Turn) -> list[Kept]:
        """The messages about a turn's devices, passed on to those for whom these are in the following turn: what arrives."""
        of = [min(i, len(turn) - 1) for i in range(len(following))]
        return [self._hop(messages[i], distance - turn[i]) for i, distance in zip(of, following, strict=True)]

    def send_home(self, messages: list[Kept], turn: Turn, following: Turn) -> list[Kept]:
        """Those of them that are passed on no further, sent to the devices that they are about: what arrives."""
        return [self._hop(messages[i], self.size - turn[i]) for i in range(len(following), len(turn))]

    def join(self, parts: list[Kept], turn: Turn) -> Kept:
        """The tokens of a turn's devices in the order of the sequence."""
        return tuple(join_in_order(list(arrays), self._devices(turn), self.layout) for arrays in zip(*parts, strict=True))

    def split(self, whole: Kept, turn: Turn) -> list[Kept]:
        """The inverse of `join`."""
        return list(zip(*(split_in_order(a, self._devices(turn), self.layout) for a in whole), strict=True))

    def visible(self, first_token: Int[Array, "batch seq"], turn: Turn) -> partial_attention.Bounds:
        """Each query's interval of the tokens of a turn, none if it ends before it begins."""
        length = first_token.shape[1]

        def before(index: Array) -> Array:
            of = partial(tokens_before, index, length, num_shards=self.size, layout=self.layout)
            return sum((of(device=device) for device in self._devices(turn)), jnp.int32(0))

        behind = token_indices(length, lax.axis_index(self.axis_name), self.size, self.layout) + 1
        return before(first_token), jnp.broadcast_to(before(behind) - 1, first_token.shape)

    def _devices(self, turn: Turn) -> list[Int[Array, ""]]:
        return [(lax.axis_index(self.axis_name) - distance) % self.size for distance in turn]

    def _hop(self, message: Kept, distance: int) -> Kept:
        """The message of the device `distance` places before this one."""
        return tuple(hop(a, self.axis_name, distance) for a in message)


def devices_of_turn(size: int, hops: Hops) -> int:
    """How many other devices' keys are in one turn, at most: `size` bytes of k and v are one device's."""
    return max(1, KEYS_AT_ONCE // max(1, size)) if hops == "copies" else 1


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
    turns = ring.turns(kept, weights)
    messages, sums = [ring.pack(kept)], None
    for turn, following in zip(turns, [*turns[1:], []], strict=True):
        here = kept if turn == [0] else ring.join([ring.unpack(message, kept) for message in messages], turn)
        messages = ring.pass_on(messages, turn, following)
        k, v = keys_and_values(ring.expand, weights, here)
        sums = partial_attention.forward(
            q,
            k,
            v,
            ring.visible(first_token, turn),
            scale=ring.scale,
            backend=ring.backend,
            previous=sums,
            out_dtype=None if following else q.dtype,
        )
        messages, sums = _after_each_other(messages, sums)
    assert sums is not None
    out, lse = sums
    return out, (q, kept, weights, first_token, out, lse)


def _backward(ring: Ring, residuals, dout):
    q, kept, weights, first_token, out, lse = residuals
    delta = jnp.einsum("bqhe,bqhe->bhq", dout.astype(lse.dtype), out.astype(lse.dtype))
    own, *turns = ring.turns(kept, weights)

    def gradient(of, turn: Turn, keys, previous, **options):
        bounds = ring.visible(first_token, turn)
        options |= dict(scale=ring.scale, backend=ring.backend, previous=previous)
        k, v = keys
        return of(partial_attention.BackwardInputs(q, k, v, dout, lse, delta), bounds, **options)

    def of_queries(turn: Turn, here: Kept, previous):
        keys, is_last = keys_and_values(ring.expand, weights, here), turn == [own, *turns][-1]
        dtype = q.dtype if is_last else None
        return gradient(partial_attention.gradient_of_queries, turn, keys, previous, out_dtype=dtype)

    def of_kept(turn: Turn, here: Kept, previous):
        of_keys = partial(gradient, partial_attention.gradients_of_keys, turn)
        return gradients_of_kept(ring.expand, weights, here, of_keys, previous)

    # Over NCCL one hop at a time, each beside one kernel, for XLA keeps no two in flight: the sums of dk and dv travel while dq
    # is computed, keys while dk and dv are, and the sums go home while a device computes what its own keys add to them.
    sums: list[Kept] = []
    at_home: list[Kept] = []
    dweights = None
    arriving = ring.pass_on([ring.pack(kept)], own, turns[0]) if turns else []
    dq = of_queries(own, kept, None)
    for before, turn, following in zip([own, *turns], turns, [*turns[1:], []], strict=False):
        (arriving, sums), dq = _after_each_other((arriving, sums), dq)
        here = ring.join([ring.unpack(message, kept) for message in arriving], turn)
        if sums:
            at_home += ring.send_home(sums, before, turn)
            sums = ring.pass_on(sums, before, turn)
        dq = of_queries(turn, here, dq)
        (arriving, sums), dq = _after_each_other((arriving, sums), dq)
        arriving = ring.pass_on(arriving, turn, following)
        previous = ring.join([ring.unpack(message, kept) for message in sums], turn) if sums else None
        of_turn, dweights = of_kept(turn, here, (previous, dweights))
        sums = [ring.pack(part) for part in ring.split(of_turn, turn)]
    kept, (dq, sums) = _after_each_other(kept, (dq, sums))
    if sums:
        at_home += ring.send_home(sums, turns[-1], [])
    dkept, dweights = of_kept(own, kept, (None, dweights))
    for message in at_home:
        dkept = _add(dkept, ring.unpack(message, kept))
    return dq, as_dtypes_of(kept, dkept), as_dtypes_of(weights, dweights), None


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


def _after_each_other(later, earlier):
    """Both as they are; what uses `later` begins after `earlier` is there."""
    return lax.optimization_barrier((later, earlier))


ring_attention.defvjp(_forward, _backward)
