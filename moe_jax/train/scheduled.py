"""Gradients of a step whose layers lie in a pipeline with a schedule of its own: 1F1B, zero-bubble schedules or DualPipe.

`train.pipelined` runs uniform ticks. Here `parallel.pipeline.table_executor` runs any schedule from its table. The passes are
those of `train.pipeline_passes`, with other layers on the ranks.
"""

from dataclasses import dataclass, field, replace

import jax
from flax import nnx
from jax import lax
from jaxtyping import Array

from moe_jax.models.execution import Execution
from moe_jax.parallel.layout import lies_in_chunks, parameter_path
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.pipeline.of_mesh import check_branches, schedule_of
from moe_jax.parallel.pipeline.schedules import Schedule
from moe_jax.parallel.pipeline.stages import from_stages, layers_of_all_stages, layers_of_stages, to_stages
from moe_jax.parallel.pipeline.table import lockstep_table
from moe_jax.parallel.pipeline.table_executor import TablePasses, run_table
from moe_jax.train.batch import Batch
from moe_jax.train.divided_passes import DividedPasses
from moe_jax.train.gradients import Gradients, GradientsFn, sum_on_mesh
from moe_jax.train.objective import Objective
from moe_jax.train.on_devices import merged_model
from moe_jax.train.overlap import check_objective
from moe_jax.train.pipeline_front import Front
from moe_jax.train.pipeline_passes import check_chunks, passes_of_layers


def accumulate_scheduled(
    objective: Objective,
    graphdef: nnx.GraphDef,
    execution: Execution,
    parallelism: Parallelism,
    micro_batches: int,
    *,
    stack_over_data: bool = False,
) -> GradientsFn:
    """Returns what `pipelined.accumulate_pipelined` returns, in the order of `parallelism.pipe_schedule`.

    Arguments as there. Where matrices are split inside a pipeline's rank, DualPipe and DualPipeV compute whole backward passes
    in place of b, and no W apart.

    Raises:
      TypeError, ValueError: as `accumulate_pipelined`. Also what `check_branches` and `schedule_of` refuse.
    """
    check_objective(objective, "a pipeline")
    if execution.remat == "offload":
        raise ValueError(
            f"remat='offload' needs pipe_schedule='uniform': slots of {parallelism.pipe_schedule!r} lie in the GPU's memory; "
            "take that schedule, or remat True or False"
        )
    check_branches(parallelism)
    ranks, chunks = parallelism.mesh.shape["pipe"], parallelism.pipe_chunks
    schedule = schedule_of(parallelism, micro_batches)
    table = lockstep_table(schedule)

    def sum_of(params: nnx.State, fixed: nnx.State, execution: Execution, stacked: Batch, scalars: Batch) -> Gradients:
        own, shapes = _to_stages(params, schedule)
        front = Front(passes_of_layers(objective, graphdef, own, fixed, execution, parallelism.mesh), stacked)
        passes = ScheduledPasses(front.micro, len(schedule.directions), stacked, scalars, front.forward(), schedule=schedule)
        totals = run_table(passes.of_table(any(("W",) == kinds for kinds in table.kinds)), table, passes.zeros())
        gradients = _from_stages(front.backward(totals.embedded[:-1], totals.gradients), shapes, schedule)
        return Gradients(totals.value, passes.aux_of_layers(totals.aux, totals.router), gradients)

    on_mesh = sum_on_mesh(sum_of, graphdef, execution, parallelism, micro_batches, stack_over_data=stack_over_data)

    def summed(params: nnx.State, fixed: nnx.State, batch: Batch) -> Gradients:
        check_chunks(merged_model(graphdef, params, fixed), ranks, chunks)
        return on_mesh(params, fixed, batch)

    return summed


@dataclass
class ScheduledPasses(DividedPasses):
    """The passes of a rank whose chunks are stages of a schedule."""

    schedule: Schedule = field(kw_only=True)

    def of_table(self, divides: bool) -> TablePasses:
        """Returns the functions of a table; `divides`: its backward passes are divided into b and W."""
        halves = self.halves(divides=divides)
        return TablePasses(
            enter=self.enter,
            forward=halves.forward,
            backward=halves.backward,
            inputs_backward=halves.inputs_backward,
            weights_backward=halves.weights_backward,
            run=self.run,
            loss=self.loss_of_rank,
            leave=self.leave,
        )

    def loss_of_rank(self, i, last_rank: int, finished, totals):
        """Computes `loss` of what left the last stage on a rank."""
        return replace(self, last_rank=last_rank).loss(i, finished, totals)

    @property
    def _layers_of_chunk(self) -> int:
        return -(-self.num_layers // self.schedule.num_stages)

    def _of_rank(self, stacked):
        return layers_of_stages(stacked, self.schedule, self._layers_of_chunk, lax.axis_index("pipe"))

    def _of_all_ranks(self, own):
        placed = layers_of_all_stages(own, self.schedule, self._layers_of_chunk, lax.axis_index("pipe"))
        return jax.tree.map(lambda a: a[: self.num_layers], placed)


def _to_stages(params: nnx.State, schedule: Schedule) -> tuple[nnx.State, nnx.State]:
    """Returns the layers [chunks of `to_chunks`, 1, l, ...] of a rank's stages along one axis, and the shapes that they had."""

    def join(key_path: tuple, array: Array) -> Array:
        if not lies_in_chunks(parameter_path(key_path), array.shape):
            return array
        return to_stages(array.squeeze(1), schedule).reshape(-1, *array.shape[3:])

    return jax.tree.map_with_path(join, params), jax.tree.map(lambda a: a.shape, params)


def _from_stages(gradients: nnx.State, shapes: nnx.State, schedule: Schedule) -> nnx.State:
    """Returns gradients of `_to_stages`, laid out as the parameters."""
    chunks = len(schedule.directions)

    def home(key_path: tuple, gradient: Array, shape: tuple[int, ...]) -> Array:
        if not lies_in_chunks(parameter_path(key_path), shape):
            return gradient
        return from_stages(gradient.reshape(chunks, -1, *gradient.shape[1:]), schedule).reshape(shape)

    return jax.tree.map_with_path(home, gradients, shapes, is_leaf=lambda x: isinstance(x, tuple))
