"""Shadow experts: for one call, the experts that overload a device are copied to every device of the axis (replicas).

Each device computes its own tokens' choices of a shadow, and these choices are excluded from the exchange. The owner receives
the sum of the copies' gradients. Every choice is computed once, with or without shadows; only the device differs. The idea is
FasterMoE's dynamic shadowing (https://doi.org/10.1145/3503221.3508418), which decides by the load of an expert; here the work
of a device decides.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts.activation import Activation
from moe_jax.kernels.experts.api import experts_mlp
from moe_jax.kernels.experts.fp8.precision import Precision
from moe_jax.kernels.experts.weights import ExpertWeights
from moe_jax.parallel.collectives.hops import sum_to_all
from moe_jax.parallel.expert.one_round import ExpertInputs
from moe_jax.parallel.expert.settings import ExpertParallel
from moe_jax.parallel.mesh import axis_size

Matrices = tuple[Array, Array]
"""An array for w_gate_up, and one for w_down."""


def compute_shadows(
    parallel: ExpertParallel,
    backend: str | None,
    precision: Precision | None,
    activation: Activation,
    inputs: ExpertInputs,
    experts: Int[Array, "tokens k"],
) -> tuple[Array, Array, ExpertInputs, Array]:
    """Replicates overloaded experts to all devices for this call, and computes this device's choices of them locally.

    Returns their contribution to this device's tokens, the number of shadows, and the inputs and the choices of the exchange.
    The gradients of the shadows' copies flow into the weights of these inputs. A choice that a shadow computed is -1.

    Differentiable in `inputs`. All devices of the axis choose the same shadows.

    Raises:
        NotImplementedError: under `jax.vmap`.
    """
    weights = inputs.trained.gate_up.values, inputs.trained.down.values
    assert weights[0] is not None and weights[1] is not None
    axis_name, num_experts = parallel.axis_name, axis_size(parallel.axis_name) * weights[1].shape[0]
    dtype = inputs.x.dtype
    load = load_by_device(experts, num_experts, axis_name)
    cost = rows_per_shadow(parallel.flops_per_byte, dtype.itemsize, load.shape[0])
    shadows = select_shadows(load, parallel.shadow_experts, cost)
    own, copies = lend((weights[0], weights[1]), shadows, axis_name, dtype)
    weights_of_shadows, slots, others = choices_of_shadows(inputs.weights, experts, shadows)
    options: Any = dict(backend=backend, precision=precision, activation=activation)
    y = experts_mlp(inputs.x, *copies, weights_of_shadows, slots, **options)
    left = inputs._replace(trained=ExpertWeights.of(*own))
    return y, jnp.sum(shadows >= 0, dtype=jnp.int32), left, others


def select_shadows(load: Int[Array, "devices experts"], slots: int, rows_per_shadow: float) -> Int[Array, "slots"]:
    """Returns the experts to shadow, at most `slots`; unused slots at the end hold -1.

    load[d, e] is the number of choices of expert e by device d's tokens. Device i of n owns experts i*E/n to (i+1)*E/n. The
    function minimises, in rows computed,

        max over devices of (all choices of its own unshadowed experts + its own tokens' choices of shadows)
        + rows_per_shadow * (number of shadows)

    The minimum is exact for up to two shadows. Larger sets come from E greedy searches, one from each first expert, and never
    cost more than the best two. The result depends only on the arguments, so all devices find the same experts.
    """
    devices, num_experts = load.shape
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    of_expert = load.sum(axis=0, dtype=jnp.int32)
    own = of_expert.reshape(devices, -1).sum(axis=1, dtype=jnp.int32)
    is_owner = expert[:, None] // (num_experts // devices) == jnp.arange(devices)
    moved = load.T - jnp.where(is_owner, of_expert[:, None], 0)

    best, best_cost = jnp.full(slots, -1, jnp.int32), own.max().astype(jnp.float32)
    # One greedy search for each first expert: `chosen` holds its experts, `rows` the rows of each device.
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
    """Returns the rows that an expert computes, forward and backward, while its weights and their gradients travel.

    A row costs 18*D*I FLOPs. An expert has 3*D*I weights. For each byte of weights, and of gradients, 2(n-1)/n bytes leave each
    device. D and I cancel out: (2/3) * itemsize * (n-1)/n * flops_per_byte.
    """
    return 2 / 3 * itemsize * (devices - 1) / devices * flops_per_byte


def load_by_device(experts: Int[Array, "tokens k"], num_experts: int, axis_name: str) -> Int[Array, "devices experts"]:
    """Counts choices per device and expert, by an all-gather of n*E counts. Ids outside [0, E) do not count."""
    own = jnp.sum(experts.reshape(-1) == jnp.arange(num_experts)[:, None], axis=1, dtype=jnp.int32)
    return lax.all_gather(own, axis_name)


def choices_of_shadows(
    weights: Float[Array, "tokens k"], experts: Int[Array, "tokens k"], shadows: Int[Array, "slots"]
) -> tuple[Float[Array, "tokens slots"], Int[Array, "tokens slots"], Int[Array, "tokens k"]]:
    """Returns weights and ids of each token's choices of shadows, and `experts` with those choices replaced by -1.

    Slot s is expert shadows[s]. If a token chose an expert twice, it makes one choice of the shadow, with the sum of both
    weights. So T * slots rows hold all choices.
    """
    chooses = (experts[:, None] == shadows[:, None]) & (shadows[:, None] >= 0)
    slots = jnp.arange(shadows.shape[0], dtype=jnp.int32)
    return (
        jnp.sum(jnp.where(chooses, weights[:, None], 0), axis=2),
        jnp.where(chooses.any(axis=2), slots, -1),
        jnp.where(chooses.any(axis=1), -1, experts),
    )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lend(weights: Matrices, shadows: Int[Array, "slots"], axis_name: str, dtype: jnp.dtype) -> tuple[Matrices, Matrices]:
    """Broadcasts shadow experts: returns `weights`, and a copy of the shadows' weights in `dtype`. Unused slots are zero.

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


def _lend_forward(weights: Matrices, shadows: Array, axis_name: str, dtype: jnp.dtype):
    shadows = _refuse_vmap(shadows)
    local_experts = weights[0].shape[0]
    local = shadows - lax.axis_index(axis_name).astype(jnp.int32) * local_experts
    # Another device's shadow gets a distinct out-of-range index, as `unique_indices` in the backward pass requires.
    out_of_range = local_experts + jnp.arange(shadows.shape[0], dtype=jnp.int32)
    index = jnp.where((shadows >= 0) & (local >= 0) & (local < local_experts), local, out_of_range)
    count = jnp.sum(shadows >= 0, dtype=jnp.int32)
    # Every device except the owner contributes zeros to the sum.
    owned = [w.at[index].get(mode="fill", fill_value=0).astype(dtype) for w in weights]
    return (weights, tuple(_sum_slots(owned, count, axis_name))), (index, count)


def _lend_backward(axis_name: str, dtype: jnp.dtype, residuals: tuple[Array, Array], gradients: tuple[Matrices, Matrices]):
    index, count = residuals
    d_weights, d_copies = gradients
    sums = _sum_slots(list(d_copies), count, axis_name)
    # Adds only the shadows' rows to the owner's gradients: a sum of whole arrays would read and write all experts' gradients.
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
