"""Calls a function of (model, batch) where the model's parameters are: on one device, or on each device of a mesh.

Dropout of adapters depends only on the step and the token's place in the batch (`with_dropout_seeds`). So a resumed
run, a mesh and a recomputed layer drop the same elements as one uninterrupted run on one device.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from moe_jax.layers.fp8 import Fp8Copies
from moe_jax.layers.lora import draw_dropout
from moe_jax.layers.moe import fp8_copies, hold_fp8_copies, precision_of
from moe_jax.models.decoder import Decoder
from moe_jax.models.execution import Execution
from moe_jax.parallel.fsdp import ShardedParameters
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.sequence.layouts import shard_sequence
from moe_jax.parallel.spread import Spread
from moe_jax.parallel.zero1 import stacked_specs
from moe_jax.train.batch import Batch, batch_specs

SEEDS = "dropout_seeds"
"""Name of a batch's array [batch, seq] inside a step: a seed for each token."""


def on_devices(
    function: Callable[[Decoder, Batch], Any],
    graphdef: nnx.GraphDef,
    *,
    execution: Execution | None = None,
    parallelism: Parallelism | None = None,
    differentiate: bool = False,
    stack_over_data: bool = False,
) -> Callable[[nnx.State, nnx.State, Batch], Any]:
    """Returns call(params, fixed, batch), which merges the model and returns function(model, batch), on any mesh.

    With `parallelism` the call runs inside `jax.shard_map`: each device has its own tokens and its part of the parameters, as
    `model.execution.spread` describes. The function must return the same on every device (`sum_over_devices`).

    Args:
      function: computes arrays from a model and a batch; the model carries its `execution`.
      graphdef: `nnx.graphdef(model)`.
      execution: the `Decoder.execution` of the merged model; default: unchanged. `parallelism` sets its `spread`.
      parallelism: the mesh of the parameters. None: one device, or all collectives left to XLA.
      differentiate: `function` returns (a scalar, aux), and the call ((scalar, aux), gradients) as `jax.value_and_grad` does.
        Gradients are taken in `params`, in their dtypes and layout. `fixed` holds the rest of the model, without gradients:
        frozen matrices laid out like parameters, and arrays that are whole on every device.
      stack_over_data: gradients are not summed over the mesh axis `data`. A parameter of shape [...] has gradients [data, ...];
        each device along `data` holds its own row. `parallel.zero1.sum_to_parts` sums them. Needs `differentiate`.
    """
    transform = partial(jax.value_and_grad, has_aux=True) if differentiate else lambda f: f

    def call_on(model: Decoder, batch: Batch) -> Any:
        return function(*ready_for_pass(model, batch))

    if parallelism is None:

        def alone(params: nnx.State, fixed: nnx.State, batch: Batch):
            return transform(lambda params: call_on(merged_model(graphdef, params, fixed, execution), batch))(params)

        return alone

    def local(params: nnx.State, fixed: nnx.State, batch: Batch, sharded: ShardedParameters, execution: Execution):
        def of_parts(params: nnx.State):
            return call_on(merged_model(graphdef, sharded.enter(params), fixed, execution), batch)

        return transform(of_parts)(params)

    return on_mesh(local, graphdef, execution, parallelism, has_gradients=differentiate, stack_over_data=stack_over_data)


def on_mesh(
    local: Callable[..., Any],
    graphdef: nnx.GraphDef,
    execution: Execution | None,
    parallelism: Parallelism,
    *,
    has_gradients: bool,
    stack_over_data: bool,
) -> Callable[[nnx.State, nnx.State, Batch], Any]:
    """Returns call(params, fixed, batch), which runs `local` on each device inside `jax.shard_map`.

    Args:
      local: local(params, fixed, batch, sharded, execution) of the device's parts and rows. `execution` holds the spread. The
        result is the same on every device; with `has_gradients` it is a pair with gradients laid out like the parts.
      graphdef, execution, parallelism, stack_over_data: as in `on_devices`.
    """

    def call(params: nnx.State, fixed: nnx.State, batch: Batch):
        whole = merged_model(graphdef, params, fixed, execution)
        sharded = sharded_parameters(whole, params, fixed, parallelism)
        spread = replace(whole.execution, spread=spread_of(parallelism, sharded))

        def on_device(params: nnx.State, fixed: nnx.State, batch: Batch):
            fixed = sharded.enter_fixed(fixed)
            if not stack_over_data:
                return local(params, fixed, batch, sharded, spread)
            # Parameters that vary over `data` get only the gradients of this device's tokens.
            params = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
            value, gradients = local(params, fixed, batch, sharded, spread)
            return value, jax.tree.map(lambda g: g[None], gradients)

        of_gradients = stacked_specs(sharded.specs) if stack_over_data else sharded.specs
        return jax.shard_map(
            on_device,
            mesh=parallelism.mesh,
            in_specs=(sharded.specs, sharded.fixed_specs, batch_specs(batch, parallelism)),
            out_specs=(PartitionSpec(), of_gradients) if has_gradients else PartitionSpec(),
        )(params, fixed, batch)

    return call


def merged_model(graphdef: nnx.GraphDef, params: nnx.State, fixed: nnx.State, execution: Execution | None = None) -> Decoder:
    """Builds the model from these arrays; `execution`, if given, sets the defaults of its calls.

    `fixed` may also hold FP8 copies of the experts (`with_fp8_copies`).
    """
    copies, fixed = nnx.split_state(fixed, Fp8Copies, ...)
    model = nnx.merge(graphdef, params, fixed)
    if copies:
        hold_fp8_copies(model, copies)
    if execution is not None:
        model.execution = execution
    return model


def with_fp8_copies(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    fixed: nnx.State,
    parallelism: Parallelism | None,
    *,
    on_one_device: bool = False,
) -> nnx.State:
    """Returns `fixed` with FP8 copies of the experts' weights, for all micro-batches of a step (`layers.moe.fp8_copies`).

    If a mesh splits the weights, there are no copies: each layer rounds the weights that it gathered. A pipeline makes a rank's
    copies itself (`pipeline_passes.fp8_copies_of_rank`).

    Raises:
      ValueError: experts that multiply in FP8, and a pipeline with another schedule than "uniform".
    """
    mesh = {} if parallelism is None else parallelism.mesh.shape
    if parallelism is not None and parallelism.pipelined:
        is_uniform = parallelism.pipe_schedule == "uniform"
        if not is_uniform and precision_of(nnx.merge(graphdef, params, fixed)) is not None:
            raise ValueError(
                f"weight tickets of pipe_schedule={parallelism.pipe_schedule!r} hold operands in bf16: use the schedule "
                "'uniform', or precision 'bf16'"
            )
        return fixed
    if any(devices > 1 for axis, devices in mesh.items() if axis != "data"):
        return fixed
    copies = fp8_copies(merged_model(graphdef, params, fixed), on_one_device=on_one_device)
    return nnx.merge_state(fixed, copies) if copies else fixed


def sum_over_devices[Values](model: Decoder, values: Values) -> Values:
    """Sums arrays over all devices that hold different tokens of the batch (psum); unchanged on one device.

    An objective calls it on sums over its own rows: `train.sum_over_devices(model, log_probs.sum()) / batch["num_labels"]`.
    """
    return model.execution.spread.sum(values)


def mean_over_devices[Values](model: Decoder, values: Values) -> Values:
    """Averages arrays over all devices that hold different tokens of the batch (pmean); unchanged on one device.

    Devices have equal numbers of rows, so the average of their means is the mean over all rows.
    """
    axes = model.execution.spread.mesh_axes
    return jax.lax.pmean(values, axes) if axes else values


def sharded_parameters(model: Decoder, params: nnx.State, fixed: nnx.State, parallelism: Parallelism) -> ShardedParameters:
    """Returns the model's `ShardedParameters` on the mesh of `parallelism`."""
    exchange = parallelism.expert_parallel
    # Shadows are copies of the weights in the model's dtype.
    in_fp8 = precision_of(model) is not None and (exchange is None or not exchange.shadow_experts)
    return ShardedParameters.of(
        params,
        parallelism.mesh,
        dtype=model.dtype,
        token_axes=parallelism.token_axes,
        hops=parallelism.hops,
        experts_in_fp8=in_fp8,
        fixed=fixed,
    )


def spread_of(parallelism: Parallelism, sharded: ShardedParameters) -> Spread:
    """Builds the `Spread` of a model's calls on the mesh of `parallelism`."""
    return Spread(
        expert=parallelism.expert_parallel,
        context=parallelism.context_parallel,
        layer_gathers=sharded.layers,
        mesh_axes=parallelism.token_axes,
    )


def with_dropout_seeds(batch: Batch, step: Int[Array, ""], parallelism: Parallelism | None = None) -> Batch:
    """Adds a dropout seed per token to the batch, in the order of the tokens on the mesh."""
    shape = (batch["tokens"] if "tokens" in batch else next(a for a in batch.values() if a.ndim > 1)).shape[:2]
    seeds = jax.random.bits(jax.random.fold_in(jax.random.PRNGKey(0), step), shape, "uint32")
    if parallelism is not None and (context := parallelism.context_parallel) is not None:
        seeds = shard_sequence(seeds, parallelism.mesh.shape[context.axis_name], context.layout)
    return batch | {SEEDS: seeds}


def ready_for_pass(model: Decoder, batch: Batch) -> tuple[Decoder, Batch]:
    """Sets the model's dropout keys from the batch's seeds and removes these; without seeds, returns both unchanged."""
    if SEEDS not in batch:
        return model, batch
    draw_dropout(model, batch[SEEDS])
    return model, {name: array for name, array in batch.items() if name != SEEDS}
