"""Gradients of an objective: for one batch, or summed over micro-batches in one of several ways.

Each function here returns a function (params, fixed, batch) -> `Gradients`, so they are interchangeable. A pipeline has its
own. `fixed` is the part of the model without gradients.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from moe_jax.kernels.precision import at_least_f32
from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.moe import add_expert_gradients_to
from moe_jax.models.decoder import Decoder
from moe_jax.models.execution import Execution
from moe_jax.parallel.fsdp import ShardedParameters
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.train.batch import USED, Batch, micro_batch_at, micro_batches_of
from moe_jax.train.on_devices import merged_model, on_devices, on_mesh
from moe_jax.train.state import as_f32


class Gradients(NamedTuple):
    """An objective's value and auxiliary output, and its gradients in f32, sharded like the parameters."""

    value: Float[Array, ""]
    aux: Any
    gradients: nnx.State


ObjectiveFn = Callable[[Decoder, Batch], tuple[Float[Array, ""], Any]]
GradientsFn = Callable[[nnx.State, nnx.State, Batch], Gradients]
SumFn = Callable[[nnx.State, nnx.State, Execution, Batch, Batch], Gradients]
"""sum_of(params, fixed, execution, stacked, scalars): sums over the micro-batches of one device, inside `jax.shard_map`.

`params` is the result of `ShardedParameters.enter`, and the gradients have the same layout. Value and aux are the same on every
device."""


def gradients_fn(
    objective: ObjectiveFn,
    graphdef: nnx.GraphDef,
    execution: Execution | None = None,
    parallelism: Parallelism | None = None,
    *,
    stack_over_data: bool = False,
) -> GradientsFn:
    """Returns gradients(params, fixed, batch), which differentiates objective(model, batch) -> (scalar, aux).

    Arguments as in `on_devices`. On a mesh, value and gradients equal the whole batch's on one device.
    """
    call = on_devices(
        objective, graphdef, execution=execution, parallelism=parallelism, differentiate=True, stack_over_data=stack_over_data
    )

    def gradients(params: nnx.State, fixed: nnx.State, batch: Batch) -> Gradients:
        (value, aux), grads = call(params, fixed, batch)
        return Gradients(value, aux, as_f32(grads))

    return gradients


def accumulate(gradients: GradientsFn, micro_batches: int) -> GradientsFn:
    """Returns a function that sums `gradients` (value, aux and gradients) over micro-batches, one after another.

    Micro-batch i of n holds the rows i, i + n, ... of the batch, and all of its scalars.
    """
    if micro_batches == 1:
        return gradients

    def summed(params: nnx.State, fixed: nnx.State, batch: Batch) -> Gradients:
        def of_micro_batch(carry: None, batch: Batch) -> tuple[Gradients, None]:
            return gradients(params, fixed, batch), carry

        return _summed(of_micro_batch, None, batch, micro_batches)[0]

    return summed


def accumulate_in_place(
    objective: ObjectiveFn, graphdef: nnx.GraphDef, execution: Execution | None, micro_batches: int
) -> GradientsFn:
    """Returns `accumulate` for one device; kernels add expert gradients directly to the f32 sums.

    Experts' gradients are not rounded to the parameters' dtype before they are added, and no second array of the experts' size
    holds them. The sums have the model's dtype, at least f32.
    """

    def summed(params: nnx.State, fixed: nnx.State, batch: Batch) -> Gradients:
        dtype = at_least_f32(merged_model(graphdef, params, fixed).dtype)
        experts, others = nnx.split_state(params, lambda path, _: "experts" in path, ...)

        def of_micro_batch(accumulators: nnx.State, batch: Batch) -> tuple[Gradients, nnx.State]:
            def value(others: nnx.State, accumulators: nnx.State):
                model = merged_model(graphdef, nnx.merge_state(experts, others), fixed, execution)
                add_expert_gradients_to(model, accumulators)
                return objective(model, batch)

            # The accumulators' "gradient" is their value plus this micro-batch's gradients.
            (value_, aux), (grads, accumulators) = jax.value_and_grad(value, (0, 1), has_aux=True)(others, accumulators)
            return Gradients(value_, aux, as_f32(grads)), accumulators

        accumulators = jax.tree.map(lambda w: jnp.zeros(w.shape, dtype), experts)
        sums, accumulators = _summed(of_micro_batch, accumulators, batch, micro_batches)
        return sums._replace(gradients=nnx.merge_state(sums.gradients, as_f32(accumulators)))

    return summed


def sum_on_mesh(
    sum_of: SumFn,
    graphdef: nnx.GraphDef,
    execution: Execution,
    parallelism: Parallelism,
    micro_batches: int,
) -> GradientsFn:
    """Returns a function that sums gradients on a mesh (like `accumulate`); `sum_of` orders each device's micro-batches.

    Parameters outside the layers are gathered once for all micro-batches, and their gradients are summed over devices once.
    If the optimizer's state is split over `data`, gradients are stacked as in `on_devices` with `stack_over_data`.

    Args:
      sum_of: called on each device; its `execution` defines how the model is spread.
      graphdef, execution, parallelism: as in `on_devices`.
    """

    def local(params: nnx.State, fixed: nnx.State, batch: Batch, sharded: ShardedParameters, execution: Execution):
        # Rows are split evenly over devices, so a device's rows i, i + n, ... are its part of micro-batch i.
        found = sum_of(sharded.enter(params), fixed, execution, *micro_batches_of(batch, micro_batches))
        return (found.value, found.aux), sharded.leave(params, found.gradients)

    stack_over_data = parallelism.splits_optimizer
    call = on_mesh(local, graphdef, execution, parallelism, has_gradients=True, stack_over_data=stack_over_data)

    def summed(params: nnx.State, fixed: nnx.State, batch: Batch) -> Gradients:
        jax.eval_shape(partial(micro_batches_of, micro_batches=micro_batches), batch)
        (value, aux), gradients = call(params, fixed, batch)
        return Gradients(value, aux, as_f32(gradients))

    return summed


def _summed[Carry](
    of_micro_batch: Callable[[Carry, Batch], tuple[Gradients, Carry]], carry: Carry, batch: Batch, micro_batches: int
) -> tuple[Gradients, Carry]:
    """Sums `of_micro_batch` over the batch's micro-batches in turn; also returns the last carry.

    A scalar `USED` of the batch leaves out the micro-batches from this number on.
    """
    stacked, scalars = micro_batches_of(batch, micro_batches)

    def add(state: tuple[Gradients, Carry], arrays: Batch):
        sums, carry = state
        found, carry = of_micro_batch(carry, arrays | scalars)
        return (jax.tree.map(jnp.add, sums, found), carry), None

    found, _ = jax.eval_shape(of_micro_batch, carry, jax.tree.map(lambda x: x[0], stacked) | scalars)
    start = zeros_of(found), carry
    if USED not in scalars:
        return jax.lax.scan(add, start, stacked)[0]
    return jax.lax.fori_loop(0, scalars[USED], lambda i, state: add(state, micro_batch_at(stacked, i))[0], start)


def zeros_of(shapes: PyTree) -> PyTree:
    """Returns zeros with these shapes and dtypes, varying over the same mesh axes inside `jax.shard_map`."""
    return jax.tree.map(lambda x: vary_as(jnp.zeros(x.shape, x.dtype), x), shapes)
