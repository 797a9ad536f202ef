"""Shadow experts: for one call, the experts that make all devices wait for one are copied to every device of the axis.

A device computes its own tokens' choices of a shadow, which so stay out of the exchange; the gradients of the copies are summed
for the owner. Every choice is computed once, with shadows or without: what changes is where. The idea is FasterMoE's dynamic
shadowing (https://doi.org/10.1145/3503221.3508418), here by what a device computes and not by what an expert receives.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from moe_jax.parallel.collectives.sums import sum_to_all

Weights = tuple[Array, Array]
"""Of some experts: w_gate_up and w_down."""


def select_shadows(load: Int[Array, "devices experts"], slots: int, rows_per_shadow: float) -> Int[Array, "slots"]:
    """The experts to shadow, at most `slots` of them; -1 in what is left, at the end.

    `load` says how often each device's tokens choose each expert; device i of n owns experts i*E/n to (i+1)*E/n. Minimises,
    in rows computed,

        max over devices of (choices of its own experts that are not shadowed + its own choices of those that are)
        + rows_per_shadow * (number of shadows)

    exactly for up to two shadows. More come from E greedy searches, one from each first expert, and never cost more than the
    best two. A function of its arguments alone: every device finds the same.
    """
    devices, num_experts = load.shape
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    of_expert = load.sum(axis=0, dtype=jnp.int32)
    own = of_expert.reshape(devices, -1).sum(axis=1, dtype=jnp.int32)
    is_owner = expert[:, None] // (num_experts // devices) == jnp.arange(devices)
    moved = load.T - jnp.where(is_owner, of_expert[:, None], 0)

    best, best_cost = jnp.full(slots, -1, jnp.int32), own.max().astype(jnp.float32)
    # Of each search, which begins with another expert: what it has chosen, and the devices' rows.
    chosen, rows = expert[:, None], own + moved
    for count in range(1, slots + 1):
        if count > 1:
            busiest = jnp.max(rows[:, None] + moved, axis=2)
            is_chosen = (chosen[:, :, None] == expert).any(axis=1)
            following = jnp.argmin(jnp.where(is_chosen, jnp.iinfo(jnp.int32).max, busiest), axis=1).astype(jnp.int32)
            chosen, rows = jnp.column_stack([chosen, following]), rows + moved[following]
        costs = rows.max(axis=1).astype(jnp.float32) + count * rows_per_shadow
        first = jnp.argmin(costs)
        is_better = costs[first] < best_cost
        best = jnp.where(is_better, jnp.pad(chosen[first], (0, slots - count), constant_values=-1), best)
        best_cost = jnp.minimum(costs[first], best_cost)
    return best


def rows_per_shadow(flops_per_byte: float, itemsize: int, devices: int) -> float:
    """How many rows an expert computes, forward and backward, in the time in which its weights and their gradients travel.

    A row takes 18*D*I FLOPs. Of the 3*D*I weights 2(n-1)/n bytes a byte leave each device, of their gradients as many. D and I
    cancel out: (2/3) * itemsize * (n-1)/n * flops_per_byte.
    """
    return 2 / 3 * itemsize * (devices - 1) / devices * flops_per_byte


def load_by_device(experts: Int[Array, "tokens k"], num_experts: int, axis_name: str) -> Int[Array, "devices experts"]:
    """How often each device's tokens choose each expert: an all-gather of n*E numbers. Ids outside [0, E) do not count."""
    own = jnp.sum(experts.reshape(-1) == jnp.arange(num_experts)[:, None], axis=1, dtype=jnp.int32)
    return lax.all_gather(own, axis_name)


def choices_of_shadows(
    weights: Float[Array, "tokens k"], experts: Int[Array, "tokens k"], shadows: Int[Array, "slots"]
) -> tuple[Float[Array, "tokens slots"], Int[Array, "tokens slots"], Int[Array, "tokens k"]]:
    """Each token's weights and choices of the shadows, slot s of expert shadows[s], and `experts` with -1 for those choices.

    A token that chose an expert twice has one choice of the shadow, with the sum of both weights: T * slots rows hold all.
    """
    chooses = (experts[:, None] == shadows[:, None]) & (shadows[:, None] >= 0)
    slots = jnp.arange(shadows.shape[0], dtype=jnp.int32)
    return (
        jnp.sum(jnp.where(chooses, weights[:, None], 0), axis=2),
        jnp.where(chooses.any(axis=2), slots, -1),
        jnp.where(chooses.any(axis=1), -1, experts),
    )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lend(weights: Weights, shadows: Int[Array, "slots"], axis_name: str, dtype: jnp.dtype) -> tuple[Weights, Weights]:
    """`weights` as they are, and on every device a copy in `dtype` of the shadows'; zeros in the slots that hold none.

    The gradients of the copies travel in `dtype`, are summed over the devices in f32 and added where the owner's gradients
    lie. Each way moves as many slots as there are shadows, 2(n-1)/n of their bytes out of each device.

    Raises:
        NotImplementedError: under `jax.vmap` over shadows.
    """
    return _lend_forward(weights, shadows, axis_name, dtype)[0]


@custom_vmap
def _of_one_batch(shadows: Int[Array, "slots"]) -> Int[Array, "slots"]:
    return shadows


@_of_one_batch.def_vmap
def _refuse_several(axis_size: int, in_batched: list[bool], shadows: Array):
    # The weights are one for all batches: a gradient that `lend` passes on for each of them would count so many times.
    raise NotImplementedError(
        "shadow_experts under jax.vmap: shadows are chosen for all tokens of a call; pass those of all batches as one, or take "
        "shadow_experts=0"
    )


def _lend_forward(weights: Weights, shadows: Array, axis_name: str, dtype: jnp.dtype):
    shadows = _of_one_batch(shadows)
    local_experts = weights[0].shape[0]
    local = shadows - lax.axis_index(axis_name).astype(jnp.int32) * local_experts
    # Different numbers out of range for other devices' shadows: a scatter may then take every index for unique.
    nowhere = local_experts + jnp.arange(shadows.shape[0], dtype=jnp.int32)
    place = jnp.where((shadows >= 0) & (local >= 0) & (local < local_experts), local, nowhere)
    count = jnp.sum(shadows >= 0, dtype=jnp.int32)
    # All but the owner add zeros.
    owned = [w.at[place].get(mode="fill", fill_value=0).astype(dtype) for w in weights]
    return (weights, tuple(_sum_slots(owned, count, axis_name))), (place, count)


def _lend_backward(axis_name: str, dtype: jnp.dtype, kept: tuple[Array, Array], gradients: tuple[Weights, Weights]):
    place, count = kept
    d_weights, d_copies = gradients
    sums = _sum_slots(list(d_copies), count, axis_name)
    # Row by row into the owner's gradients: a sum of two arrays would read and write those of all its experts.
    add = [
        dw.at[place].add(rows.astype(dw.dtype), mode="drop", unique_indices=True)
        for dw, rows in zip(d_weights, sums, strict=True)
    ]
    return tuple(add), None


lend.defvjp(_lend_forward, _lend_backward)


def _sum_slots(arrays: list[Array], count: Int[Array, ""], axis_name: str) -> list[Array]:
    """Each array's first `count` slots summed over the devices, on each of them; the others hold zeros and stay."""

    def sum_first(slots: int, arrays: list[Array]) -> list[Array]:
        if slots == 0:
            return arrays
        flat, restore = ravel_pytree([a[:slots] for a in arrays])
        sums = restore(sum_to_all(flat, axis_name))
        # With `a.at[:slots].set(moved)` XLA's compiler for CPUs crashes here (jax 0.11.2).
        return [jnp.concatenate([moved, a[slots:]]) for moved, a in zip(sums, arrays, strict=True)]

    # Devices beside this axis may have other numbers of shadows. That an all-to-all within groups allows, a `ppermute` not.
    return lax.switch(count, [partial(sum_first, slots) for slots in range(arrays[0].shape[0] + 1)], arrays)
