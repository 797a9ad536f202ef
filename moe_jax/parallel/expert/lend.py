"""Lends the weights of some experts to all devices of a mesh axis, for one call, and returns their gradients to the owners."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Int

from moe_jax.parallel.collectives.sums import sum_to_all

Matrices = tuple[Array, Array]
"""An array for w_gate_up, and one for w_down."""


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lend(weights: Matrices, shadows: Int[Array, "slots"], axis_name: str, dtype: jnp.dtype) -> tuple[Matrices, Matrices]:
    """Returns `weights` unchanged, and on every device a copy of the shadows' weights in `dtype`; unused slots are zero.

    The gradients of the copies travel in `dtype`. They are summed over the devices in f32 and added to the owner's gradients.
    Each direction moves one slot for each shadow: 2(n-1)/n of the slots' bytes leave each device.

    Raises:
        NotImplementedError: under `jax.vmap` over shadows.
    """
    return _lend_forward(weights, shadows, axis_name, dtype)[0]


@custom_vmap
def _refuse_vmap(shadows: Int[Array, "slots"]) -> Int[Array, "slots"]:
    return shadows


@_refuse_vmap.def_vmap
def _raise_under_vmap(axis_size: int, in_batched: list[bool], shadows: Array):
    # All batches share the weights. `lend` would add the gradient of the weights once for each batch.
    raise NotImplementedError(
        "shadow_experts under jax.vmap: shadows are chosen for all tokens of a call; pass the tokens of all batches in one "
        "call, or take shadow_experts=0"
    )


class _LendResiduals(NamedTuple):
    local_index: Int[Array, "slots"]
    """The shadow's index among this device's experts; out of range on all devices but the owner."""
    num_shadows: Int[Array, ""]
    """The number of shadows."""


def _lend_forward(weights: Matrices, shadows: Array, axis_name: str, dtype: jnp.dtype):
    shadows = _refuse_vmap(shadows)
    local_experts = weights[0].shape[0]
    local = shadows - lax.axis_index(axis_name).astype(jnp.int32) * local_experts
    # Another device's shadow gets its own index out of range: `unique_indices` in backward needs distinct indices.
    out_of_range = local_experts + jnp.arange(shadows.shape[0], dtype=jnp.int32)
    index = jnp.where((shadows >= 0) & (local >= 0) & (local < local_experts), local, out_of_range)
    count = jnp.sum(shadows >= 0, dtype=jnp.int32)
    # Every device but the owner contributes zeros to the sum.
    owned = [w.at[index].get(mode="fill", fill_value=0).astype(dtype) for w in weights]
    return (weights, tuple(_sum_slots(owned, count, axis_name))), _LendResiduals(index, count)


def _lend_backward(axis_name: str, dtype: jnp.dtype, residuals: _LendResiduals, gradients: tuple[Matrices, Matrices]):
    index, count = residuals
    d_weights, d_copies = gradients
    sums = _sum_slots(list(d_copies), count, axis_name)
    # Adds single rows to the owner's gradients: a sum of two arrays would read and write the gradients of all its experts.
    add = [
        dw.at[index].add(rows.astype(dw.dtype), mode="drop", unique_indices=True)
        for dw, rows in zip(d_weights, sums, strict=True)
    ]
    return tuple(add), None


lend.defvjp(_lend_forward, _lend_backward)


def _sum_slots(arrays: list[Array], count: Int[Array, ""], axis_name: str) -> list[Array]:
    """Sums each array's first `count` slots over the devices, with the result on every device; the other slots hold zeros."""

    def sum_first(slots: int, arrays: list[Array]) -> list[Array]:
        if slots == 0:
            return arrays
        flat, restore = ravel_pytree([a[:slots] for a in arrays])
        sums = restore(sum_to_all(flat, axis_name))
        # `a.at[:slots].set(summed)` crashes XLA's compiler for CPUs here (jax 0.11.2).
        return [jnp.concatenate([summed, a[slots:]]) for summed, a in zip(sums, arrays, strict=True)]

    # Groups of other mesh axes may have another number of shadows. An all-to-all within a group allows that, `ppermute` not.
    return lax.switch(count, [partial(sum_first, slots) for slots in range(arrays[0].shape[0] + 1)], arrays)
