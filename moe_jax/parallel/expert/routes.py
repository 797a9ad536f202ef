"""Assigns each token a round and a slot in the buffer for each device that it travels to.

Letters: T tokens of this device, K choices a token, n devices of the axis, C slots of a buffer for one device. A token queues
once for each device that holds one of its experts, even if it chose several there.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, Num

from moe_jax.kernels.experts.routing import wide_ids
from moe_jax.kernels.precision import at_least_f32
from moe_jax.parallel.expert.settings import Capacity


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Queues:
    """For each destination device, a queue of this device's tokens that chose at least one of its experts."""

    position: Int[Array, "devices tokens"]
    """The token's position in the device's queue; `tokens` if it is not in the queue."""
    length: Int[Array, "devices"]
    """The number of tokens in each queue."""
    first: Int[Array, "devices"]
    """The number of tokens, from the front of the queue, that fit into the first round."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Route:
    """The send buffer of one round: slot c for device d holds token token_of_slot[d, c]."""

    token_of_slot: Int[Array, "devices slots"]
    """`tokens` for an empty slot."""
    slot_of_token: Int[Array, "devices tokens"]
    """d * slots + c; `devices * slots` if the token does not travel. The inverse of token_of_slot."""
    sent: Int[Array, "devices"]
    """The number of filled slots. They are the first slots of the buffer."""


def owners(topk_experts: Integer[Array, "tokens k"], num_experts: int, devices: int) -> Int[Array, "tokens k"]:
    """Returns the device that holds each chosen expert; -1 for an id outside [0, num_experts)."""
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
    """Builds the `Queues`: tokens in order of position, or of decreasing routing weight on the device ("probability").

    The first round includes tokens from the front of a queue while both tokens and choices fit in `capacity`.
    """
    tokens = owner.shape[0]
    chosen = owner == jnp.arange(devices)[:, None, None]
    pairs = chosen.sum(axis=2, dtype=jnp.int32)
    if order == "probability":
        weight = jnp.sum(jnp.where(chosen, weights, 0), axis=2)
        order_of_tokens = jnp.argsort(jnp.where(pairs > 0, -weight, jnp.inf), axis=1, stable=True)
        queued_pairs = jnp.take_along_axis(pairs, order_of_tokens, axis=1)
    else:
        queued_pairs = pairs
    is_queued = queued_pairs > 0
    position = jnp.cumsum(is_queued, axis=1, dtype=jnp.int32) - 1
    fits = is_queued & (position < capacity.tokens) & (jnp.cumsum(queued_pairs, axis=1) <= capacity.pairs)
    position = jnp.where(is_queued, position, tokens)
    if order == "probability":
        position = jnp.take_along_axis(position, jnp.argsort(order_of_tokens, axis=1), axis=1)
    return Queues(position, is_queued.sum(axis=1, dtype=jnp.int32), fits.sum(axis=1, dtype=jnp.int32))


def first_route(queues: Queues, capacity: Capacity) -> Route:
    """Returns the send buffer of the first round."""
    return _route(queues, jnp.zeros_like(queues.first), queues.first, capacity.tokens)


def further_route(queues: Queues, index: Int[Array, ""], capacity: Capacity) -> Route:
    """Returns the send buffer of overflow round `index` (from 0), for tokens that did not fit earlier rounds."""
    begin = queues.first + index * capacity.tokens
    return _route(queues, begin, jnp.clip(queues.length - begin, 0, capacity.tokens), capacity.tokens)


def further_rounds(queues: Queues, capacity: Capacity, axis_name: str) -> Int[Array, ""]:
    """Returns the number of overflow rounds that all devices of the axis need until every queue is empty."""
    own = -(-jnp.max(queues.length - queues.first) // capacity.tokens)
    return jax.lax.pmax(own, axis_name)


def in_first_round(queues: Queues, owner: Int[Array, "tokens k"]) -> Bool[Array, "tokens k"]:
    """Returns True for each choice whose token fits into the first round's buffer; later rounds compute the rest."""
    travels = queues.position < queues.first[:, None]
    return jnp.take_along_axis(travels, jnp.maximum(owner, 0).T, axis=0).T & (owner >= 0)


def _route(queues: Queues, begin: Array, sent: Array, slots: int) -> Route:
    devices, tokens = queues.position.shape
    slot = queues.position - begin[:, None]
    travels = (slot >= 0) & (slot < sent[:, None])
    flat = jnp.arange(devices, dtype=jnp.int32)[:, None] * slots + slot
    # A token that does not travel gets a distinct out-of-range index, as `unique_indices` below requires.
    out_of_range = devices * slots + jnp.arange(devices * tokens, dtype=jnp.int32).reshape(devices, tokens)
    source = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), flat.shape)
    empty = jnp.full(devices * slots, tokens, jnp.int32)
    token_of_slot = empty.at[jnp.where(travels, flat, out_of_range)].set(source, unique_indices=True, mode="drop")
    return Route(token_of_slot.reshape(devices, slots), jnp.where(travels, flat, devices * slots), sent)


def pack(x: Num[Array, "tokens features"], route: Route) -> Num[Array, "devices slots features"]:
    """Fills send buffers: out[d, c] = x[token_of_slot[d, c]]; empty slots are zero."""
    return x.at[route.token_of_slot].get(mode="fill", fill_value=0)


def unpack(slots: Float[Array, "devices slots features"], route: Route) -> Float[Array, "tokens features"]:
    """Sums the slots of each token over all devices, in at least f32 and device order; the transpose of `pack`."""
    flat = slots.reshape(-1, slots.shape[2])
    of_devices = flat.at[route.slot_of_token].get(mode="fill", fill_value=0)
    return jnp.sum(of_devices, axis=0, dtype=at_least_f32(slots.dtype))
