"""Which token travels to which device, in which round and in which slot of the buffers.

Letters: T tokens of this device, K choices of each, n devices of the axis, C slots of a buffer for one device. A token queues
once for each device that holds an expert of its choice, however many it holds there.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from moe_jax.kernels.experts.routing import wide_ids
from moe_jax.parallel.expert.settings import Capacity


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Queues:
    """This device's tokens in line for each device of the axis; no token stands in line for a device without its experts."""

    place: Int[Array, "devices tokens"]
    """The token's place in the device's queue; `tokens` where it does not stand there."""
    length: Int[Array, "devices"]
    """How many tokens stand in each queue."""
    first: Int[Array, "devices"]
    """How many of them, from the front, fit into the first round."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Route:
    """One round's slots: device d is sent, in slot c, the token token_of_slot[d, c]."""

    token_of_slot: Int[Array, "devices slots"]
    """`tokens` for an empty slot."""
    slot_of_token: Int[Array, "devices tokens"]
    """d * slots + c; `devices * slots` where the token does not travel. The inverse of token_of_slot."""
    sent: Int[Array, "devices"]
    """How many slots are filled: the first ones."""


def owners(topk_experts: Int[Array, "tokens k"], num_experts: int, devices: int) -> Int[Array, "tokens k"]:
    """The device that holds each choice; -1 for an id outside [0, num_experts)."""
    topk_experts = wide_ids(topk_experts)
    in_range = (topk_experts >= 0) & (topk_experts < num_experts)
    owner = topk_experts // (num_experts // devices)
    return jnp.where(in_range, owner.astype(jnp.int32), -1)


def queue(
    owner: Int[Array, "tokens k"],
    weights: Array,
    devices: int,
    capacity: Capacity,
    order: Literal["position", "probability"] = "position",
) -> Queues:
    """Queues in the order of the tokens, or the one first whose choices on that device weigh most together.

    A first round takes tokens from the front as long as both they and their choices stay within `capacity`.
    """
    tokens = owner.shape[0]
    chosen = owner == jnp.arange(devices)[:, None, None]
    pairs = chosen.sum(axis=2, dtype=jnp.int32)
    if order == "probability":
        weight = jnp.sum(jnp.where(chosen, weights, 0), axis=2)
        line = jnp.argsort(jnp.where(pairs > 0, -weight, jnp.inf), axis=1, stable=True)
        pairs_in_line = jnp.take_along_axis(pairs, line, axis=1)
    else:
        pairs_in_line = pairs
    stands = pairs_in_line > 0
    place = jnp.cumsum(stands, axis=1, dtype=jnp.int32) - 1
    fits = stands & (place < capacity.tokens) & (jnp.cumsum(pairs_in_line, axis=1) <= capacity.pairs)
    place = jnp.where(stands, place, tokens)
    if order == "probability":
        place = jnp.take_along_axis(place, jnp.argsort(line, axis=1), axis=1)
    return Queues(place, stands.sum(axis=1, dtype=jnp.int32), fits.sum(axis=1, dtype=jnp.int32))


def first_route(queues: Queues, capacity: Capacity) -> Route:
    """The slots of the first round."""
    return _route(queues, jnp.zeros_like(queues.first), queues.first, capacity.tokens)


def further_route(queues: Queues, turn: Int[Array, ""], capacity: Capacity) -> Route:
    """The slots of further round number `turn`, counted from 0."""
    begin = queues.first + turn * capacity.tokens
    return _route(queues, begin, jnp.clip(queues.length - begin, 0, capacity.tokens), capacity.tokens)


def further_rounds(queues: Queues, capacity: Capacity, axis_name: str) -> Int[Array, ""]:
    """How many further rounds empty the longest queue of any device: every device of the axis takes as many."""
    own = -(-jnp.max(queues.length - queues.first) // capacity.tokens)
    return jax.lax.pmax(own, axis_name)


def in_first_round(queues: Queues, owner: Int[Array, "tokens k"]) -> Bool[Array, "tokens k"]:
    """Whether each choice is computed in the first round."""
    travels = queues.place < queues.first[:, None]
    return jnp.take_along_axis(travels, jnp.maximum(owner, 0).T, axis=0).T & (owner >= 0)


def _route(queues: Queues, begin: Array, sent: Array, slots: int) -> Route:
    devices, tokens = queues.place.shape
    slot = queues.place - begin[:, None]
    travels = (slot >= 0) & (slot < sent[:, None])
    flat = jnp.arange(devices, dtype=jnp.int32)[:, None] * slots + slot
    # Different numbers out of range for those that stay: a scatter may then take every index for unique.
    nowhere = devices * slots + jnp.arange(devices * tokens, dtype=jnp.int32).reshape(devices, tokens)
    source = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), flat.shape)
    empty = jnp.full(devices * slots, tokens, jnp.int32)
    token_of_slot = empty.at[jnp.where(travels, flat, nowhere)].set(source, unique_indices=True, mode="drop")
    return Route(token_of_slot.reshape(devices, slots), jnp.where(travels, flat, devices * slots), sent)
