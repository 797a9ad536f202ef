"""Transport `pairwise`: one `ppermute` for each pair of devices (FasterMoE, https://doi.org/10.1145/3503221.3508418).

A device's own tokens come first, then the previous device's, and so on. While the experts compute some tokens, others arrive
and earlier outputs return. The caller (`mlp`) chooses which devices' tokens are computed together. It moves the same bytes
as `all_to_all`. If a buffer has room for all tokens, they are sent unpacked, and the returned rows are summed without
unpacking.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from moe_jax.kernels.precision import widened
from moe_jax.parallel.collectives.hops import hop
from moe_jax.parallel.expert.routes import Route, unpack


def to_experts(x: Num[Array, "tokens features"], route: Route, axis_name: str) -> Num[Array, "received features"]:
    """Dispatches tokens: returns those sent to this device, C slots per sender, its own first, then by distance."""
    devices, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

    def block(distance: int) -> Array:
        if sends_all(route):
            return x
        return x.at[route.token_of_slot[(me + distance) % devices]].get(mode="fill", fill_value=0)

    return jnp.concatenate([hop(block(distance), axis_name, distance) for distance in range(devices)])


def to_home(
    rows: Float[Array, "received features"], route: Route, axis_name: str, steps: tuple[int, ...] = ()
) -> Float[Array, "tokens features"]:
    """Returns outputs to the sending devices; the result is each token's sum over its slots, in the order of `to_experts`.

    The rows of a step leave after the previous step's last row has arrived. Without that barrier XLA schedules all copies at
    the end, and none overlaps with the experts of the next step.
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
    distance_of = (device - jax.lax.axis_index(axis_name)) % devices
    moved = route.slot_of_token + ((distance_of - device) * slots)[:, None]
    travels = route.slot_of_token < devices * slots
    distance_route = dataclasses.replace(route, slot_of_token=jnp.where(travels, moved, devices * slots))
    return unpack(jnp.stack(blocks), distance_route)


def by_distance(received: Num[Array, "received features"], axis_name: str) -> list[Num[Array, "slots features"]]:
    """Reorders blocks of rows from device order to order of distance, as in `to_experts`."""
    devices, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    blocks = received.reshape(devices, -1, received.shape[1])
    return [jax.lax.dynamic_index_in_dim(blocks, (me - distance) % devices, keepdims=False) for distance in range(devices)]


def sends_all(route: Route) -> bool:
    """Returns True if each buffer fits all of a device's tokens, so that they are sent unpacked."""
    return route.token_of_slot.shape[1] == route.slot_of_token.shape[1]
