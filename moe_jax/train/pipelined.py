"""Gradients of a step whose layers lie in a pipeline: each rank along `pipe` runs its own layers on every micro-batch.

`parallel.pipeline.executor` orders the passes of `train.pipeline_passes`.
"""

import jax
from flax import nnx

from moe_jax.models.execution import Execution
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.pipeline.executor import run_ticks
from moe_jax.parallel.pipeline.of_mesh import schedule_of
from moe_jax.train.batch import Batch
from moe_jax.train.divided_passes import DividedPasses
from moe_jax.train.gradients import Gradients, GradientsFn, sum_on_mesh
from moe_jax.train.objective import Objective
from moe_jax.train.on_devices import merged_model
from moe_jax.train.overlap import check_objective
from moe_jax.train.pipeline_front import Front
from moe_jax.train.pipeline_passes import RankPasses, check_chunks, fp8_copies_of_rank, join_chunks, passes_of_layers


def accumulate_pipelined(
    objective: Objective,
    graphdef: nnx.GraphDef,
    execution: Execution,
    parallelism: Parallelism,
    micro_batches: int,
    *,
    stack_over_data: bool = False,
) -> GradientsFn:
    """Returns what `gradients.accumulate` returns, for parameters of `parallel.pipeline.chunks.to_chunks`.

    Each tick computes a chunk forward for one micro-batch beside a chunk backward for another, in one loop over the layers.
    With `parallelism.pipe_schedule` "uniform-w" some gradients of weights are put off to the end.

    Args:
      objective: one that has `of_states`, and whose value is a sum over tokens. It sees the tokens of a micro-batch in as many
        parts as there are ranks, along one axis. If the model has modules that predict further tokens, parts are whole rows.
      stack_over_data: as in `train.on_devices`.

    Raises:
      TypeError: an objective that works on batches alone.
      ValueError: "uniform-w" where matrices are split inside a rank (`schedule_of`). At the first call, parameters that lie
        otherwise.
    """
    check_objective(objective, "a pipeline")
    ranks, chunks = parallelism.mesh.shape["pipe"], parallelism.pipe_chunks
    puts_off = parallelism.pipe_schedule == "uniform-w"
    if puts_off:
        schedule_of(parallelism, micro_batches)

    def sum_of(params: nnx.State, fixed: nnx.State, execution: Execution, stacked: Batch, scalars: Batch) -> Gradients:
        own, shapes = join_chunks(params)
        front = Front(passes_of_layers(objective, graphdef, own, fixed, execution, parallelism.mesh), stacked)
        kind = DividedPasses if puts_off else RankPasses
        copies = fp8_copies_of_rank(front.micro, parallelism.mesh)
        passes = kind(front.micro, chunks, stacked, scalars, front.forward(), copies=copies)
        totals = run_ticks(passes.of_pipeline(), chunks, micro_batches, passes.zeros())
        gradients = front.backward(totals.embedded[:-1], totals.gradients)
        return Gradients(totals.value, passes.aux_of_layers(totals.aux, totals.router), _split_chunks(gradients, shapes))

    on_mesh = sum_on_mesh(sum_of, graphdef, execution, parallelism, micro_batches, stack_over_data=stack_over_data)

    def summed(params: nnx.State, fixed: nnx.State, batch: Batch) -> Gradients:
        check_chunks(merged_model(graphdef, params, fixed), ranks, chunks)
        return on_mesh(params, fixed, batch)

    return summed


def _split_chunks(gradients: nnx.State, shapes: nnx.State) -> nnx.State:
    return jax.tree.map(lambda g, shape: g.reshape(shape), gradients, shapes, is_leaf=lambda x: isinstance(x, tuple))
