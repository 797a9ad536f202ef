"""Transport `pairwise`: the exchange in n/g steps, each with one group of g devices (FasterMoE, https://doi.org/10.1145/3503221.3508418).

In step s the devices of group a send to those of group a + s and receive from those of group a - s, each by a `ppermute` of its
own. Nothing but data orders the steps: while step s computes, the tokens of step s + 1 may arrive and the outputs of step s - 1
travel home. Step 0, which with g = 1 stays on the device, comes last, so that no computation waits for its tokens and the last
outputs travel beside it. The same bytes as `all_to_all`. Where a buffer has room for all tokens, all of them are sent as they
stand: nothing is packed, and what comes home is summed as it is.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from moe_jax.kernels.precision import widened
from moe_jax.parallel.expert.routes import Route
from moe_jax.parallel.expert.slots import unpack


def to_experts(x: Num[Array, "tokens features"], route: Route, axis_name: str, group: int) -> Num[Array, "received features"]:
    """The tokens that the devices sent here, C slots of each, in the order of the steps; zeros in empty slots."""
    me, received = jax.lax.axis_index(axis_name), []
    for to in _partners(axis_name, group):
        block = x if _sends_all(route) else x.at[route.token_of_slot[jnp.asarray(to)[me]]].get(mode="fill", fill_value=0)
        received.append(_permute(block, axis_name, list(enumerate(to))))
    return jnp.concatenate(received)


def to_home(
    rows: Float[Array, "received features"], route: Route, axis_name: str, group: int
) -> Float[Array, "tokens features"]:
    """Each token's sum over the slots in which it travelled; the rows stand in the order of the steps."""
    devices, slots = route.token_of_slot.shape
    partners = _partners(axis_name, group)
    blocks = [
        _permute(block, axis_name, [(receiver, sender) for sender, receiver in enumerate(to)])
        for to, block in zip(partners, jnp.split(rows, devices), strict=True)
    ]
    if _sends_all(route):
        return functools.reduce(jnp.add, (widened(block) for block in blocks))
    # The block of device d came home in the step in which this device sent to d.
    step_of_device = jnp.argsort(jnp.asarray(partners)[:, jax.lax.axis_index(axis_name)])
    moved = route.slot_of_token + (step_of_device - jnp.arange(devices)).astype(jnp.int32)[:, None] * slots
    travels = route.slot_of_token < devices * slots
    in_steps = dataclasses.replace(route, slot_of_token=jnp.where(travels, moved, devices * slots))
    return unpack(jnp.stack(blocks), in_steps)


def _partners(axis_name: str, group: int) -> list[list[int]]:
    """For each step of each member of a group, the device that device i sends to."""
    devices = jax.lax.axis_size(axis_name)
    if devices % group:
        raise ValueError(f"group_size must divide the {devices} devices of axis {axis_name!r}; got {group}")
    groups = devices // group
    return [
        [(i // group + step) % groups * group + (i + member) % group for i in range(devices)]
        for step in (*range(1, groups), 0)
        for member in range(group)
    ]


def _sends_all(route: Route) -> bool:
    return route.token_of_slot.shape[1] == route.slot_of_token.shape[1]


def _permute(block: Array, axis_name: str, pairs: list[tuple[int, int]]) -> Array:
    return block if all(source == target for source, target in pairs) else jax.lax.ppermute(block, axis_name, pairs)
