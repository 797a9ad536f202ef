"""Transport `pairwise`: each device sends to each other by a `ppermute` of its own (FasterMoE, https://doi.org/10.1145/3503221.3508418).

A device's own tokens come first, then those of the device before it, and so on. While some are computed, others may arrive and
the outputs of those before travel home. Which are computed together is the caller's choice (`mlp`). The same bytes as
`all_to_all`. Where a buffer has room for all tokens, all of them are sent as they stand: nothing is packed, and what comes home
is summed as it is.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from moe_jax.kernels.precision import widened
from moe_jax.parallel.collectives.hops import hop
from moe_jax.parallel.expert.routes import Route
from moe_jax.parallel.expert.slots import unpack


def to_experts(x: Num[Array, "tokens features"], route: Route, axis_name: str) -> Num[Array, "received features"]:
    """The tokens that the devices sent here, C slots of each: its own, then by distance; zeros in empty slots."""
    devices, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

    def block(distance: int) -> Array:
        if sends_all(route):
            return x
        return x.at[route.token_of_slot[(me + distance) % devices]].get(mode="fill", fill_value=0)

    return jnp.concatenate([hop(block(distance), axis_name, distance) for distance in range(devices)])


def to_home(
    rows: Float[Array, "received features"], route: Route, axis_name: str, steps: tuple[int, ...] = ()
) -> Float[Array, "tokens features"]:
    """Each token's sum over the slots in which it travelled; the rows stand as `to_experts` brought them.

    Those of one step leave when the last of the step before is at home: else XLA leaves all hops to the end, and runs none
    beside the experts of the next step.
    """
    devices, slots = route.token_of_slot.shape
    begins = set(itertools.accumulate(steps))
    blocks: list[Array] = []
    for distance, block in enumerate(jnp.split(rows, devices)):
        if distance > 1 and distance in begins:
            block, blocks[-1] = jax.lax.optimization_barrier((block, blocks[-1]))
        blocks.append(hop(block, axis_name, -distance))
    if sends_all(route):
        return functools.reduce(jnp.add, (widened(block) for block in blocks))
    device = jnp.arange(devices, dtype=jnp.int32)
    place = (device - jax.lax.axis_index(axis_name)) % devices
    moved = route.slot_of_token + ((place - device) * slots)[:, None]
    travels = route.slot_of_token < devices * slots
    as_they_stand = dataclasses.replace(route, slot_of_token=jnp.where(travels, moved, devices * slots))
    return unpack(jnp.stack(blocks), as_they_stand)


def by_distance(received: Num[Array, "received features"], axis_name: str) -> list[Num[Array, "slots features"]]:
    """What each device sent, in the order of `to_experts`, of what stands in the devices' order."""
    devices, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    blocks = received.reshape(devices, -1, received.shape[1])
    return [jax.lax.dynamic_index_in_dim(blocks, (me - distance) % devices, keepdims=False) for distance in range(devices)]


def sends_all(route: Route) -> bool:
    """Whether a buffer has room for all of a device's tokens, which then travel as they stand."""
    return route.token_of_slot.shape[1] == route.slot_of_token.shape[1]
