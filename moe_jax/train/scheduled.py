"""Gradients of a step whose layers lie in a pipeline with a schedule of its own: 1F1B, zero-bubble schedules or DualPipe.

`train.pipelined` runs uniform ticks. Here `parallel.pipeline.table_executor` runs any schedule from its table. The passes, the
embedding, the head and the router's sums are those of `train.pipelined`, with other layers on the ranks.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
from flax import nnx
from jax import lax

from moe_jax.layers.tickets import inputs_backward, weights_backward
from moe_jax.models.execution import Execution
from moe_jax.models.forward import Carry
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.pipeline.of_mesh import check_branches, schedule_of
from moe_jax.parallel.pipeline.schedules import Schedule
from moe_jax.parallel.pipeline.stages import from_stages, layers_of_all_stages, layers_of_stages, to_stages
from moe_jax.parallel.pipeline.table import lockstep_table
from moe_jax.parallel.pipeline.table_executor import TablePasses, run_table
from moe_jax.parallel.pipeline.ticks import TickPass
from moe_jax.train.batch import Batch
from moe_jax.train.gradients import Gradients, GradientsFn, sum_on_mesh
from moe_jax.train.micro_batch import MicroBatchPasses
from moe_jax.train.objective import Objective
from moe_jax.train.on_devices import merged_model
from moe_jax.train.overlap import check_objective
from moe_jax.train.pipelined import RankPasses, check_model


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
        raise ValueError("remat='offload' is not for a pipeline, whose slots lie in the GPU's memory: take True or False")
    check_branches(parallelism)
    ranks, chunks = parallelism.mesh.shape["pipe"], parallelism.pipe_chunks
    schedule = schedule_of(parallelism, micro_batches)
    table = lockstep_table(schedule)

    def sum_of(params: nnx.State, fixed: nnx.State, execution: Execution, stacked: Batch, scalars: Batch) -> Gradients:
        own, shapes = _to_stages(params, schedule)
        micro = MicroBatchPasses(objective, graphdef, own, fixed, execution, in_place=False)
        passes = ScheduledPasses(micro, len(schedule.directions), stacked, scalars, schedule=schedule)
        totals = run_table(passes.of_table(any(("W",) == kinds for kinds in table.kinds)), table, passes.zeros())
        tokens, dx = (x.reshape(-1, *x.shape[2:]) for x in (stacked["tokens"], totals.embedded[:-1]))
        gradients = passes.micro.embedding(tokens, dx, totals.gradients)
        return Gradients(totals.value, passes.aux_of_layers(totals), _from_stages(gradients, shapes, schedule))

    on_mesh = sum_on_mesh(sum_of, graphdef, execution, parallelism, micro_batches, stack_over_data=stack_over_data)

    def summed(params: nnx.State, fixed: nnx.State, batch: Batch) -> Gradients:
        check_model(merged_model(graphdef, params, fixed), ranks, chunks)
        return on_mesh(params, fixed, batch)

    return summed


@dataclass
class ScheduledPasses(RankPasses):
    """The passes of a rank whose chunks are stages of a schedule."""

    schedule: Schedule = field(kw_only=True)

    def of_table(self, divides: bool) -> TablePasses:
        """Returns the functions of a table; `divides`: its backward passes are divided into b and W.

        Recomputed layers need tickets in b alone. Otherwise what a forward pass saves must be what b needs, and a whole B is b
        and then W.
        """
        apart = replace(self, divided=divides)
        whole = self if self.micro.execution.remat else apart

        def b(*arguments):
            apart.saved_structure = whole.saved_structure
            return apart.inputs_backward(*arguments)

        return TablePasses(
            enter=self.enter,
            forward=whole.forward,
            backward=whole.backward,
            inputs_backward=b,
            weights_backward=apart.weights_backward,
            run=self.run,
            loss=self.loss_of_rank,
            leave=self.leave,
        )

    def loss_of_rank(self, i, last_rank: int, finished, totals):
        """Computes `loss` of what left the last stage on a rank."""
        return replace(self, last_rank=last_rank).loss(i, finished, totals)

    def backward(self, of_tick: TickPass, saved, dy, totals):
        """Returns a chunk's backward pass, which adds to the sums of gradients."""
        if not self.divided:
            return super().backward(of_tick, saved, dy, totals)
        loop, finish = self.inputs_backward(of_tick, saved, dy, totals)

        def finish_both(run):
            dx, product, totals = finish(run)
            return dx, self.run(self.weights_backward(of_tick, product, totals))[0]

        return loop, finish_both

    def inputs_backward(self, of_tick: TickPass, saved, dy, totals):
        """Returns b of a chunk, which adds the gradients of vectors; its product are the operands of those of matrices."""
        layers, arrays = self._stage(of_tick)
        saved = jax.tree.unflatten(self.saved_structure, saved)
        stage = totals.gradients["stages"][0]
        own = {path for path, _ in nnx.to_flat_state(arrays.parameters)}
        sums = nnx.filter_state(stage, lambda path, _: path in own)
        chunk = self._chunk(of_tick)
        loop = inputs_backward(layers, arrays, saved, Carry(dy.x, None), self._droutings(dy), sums, chunk)

        def finish(run):
            changed = nnx.merge_state(stage, run.vectors)
            return type(dy)(run.dx.x, dy.router, dy.counts), run.products, _with_stage(totals, changed)

        return loop, finish

    def weights_backward(self, of_tick: TickPass, product, totals):
        """Returns W of a chunk, which adds the gradients of matrices."""
        loop = weights_backward(product, totals.gradients["stages"][0], self._chunk(of_tick))
        return loop, partial(_with_stage, totals)

    @property
    def _layers_of_chunk(self) -> int:
        return -(-self.num_layers // self.schedule.num_stages)

    def _of_rank(self, stacked):
        return layers_of_stages(stacked, self.schedule, self._layers_of_chunk, lax.axis_index("pipe"))

    def _of_all_ranks(self, own):
        placed = layers_of_all_stages(own, self.schedule, self._layers_of_chunk, lax.axis_index("pipe"))
        return jax.tree.map(lambda a: a[: self.num_layers], placed)


def _with_stage(totals, stage: nnx.State):
    return totals._replace(gradients=nnx.merge_state(totals.gradients, nnx.State({"stages": {0: stage}})))


def _to_stages(params: nnx.State, schedule: Schedule) -> tuple[nnx.State, nnx.State]:
    """Returns the layers [chunks of `to_chunks`, 1, l, ...] of a rank's stages along one axis, and the shapes that they had."""
    stages = jax.tree.map(lambda a: a.squeeze(1), params["stages"])
    shapes = jax.tree.map(lambda a: a.shape, params["stages"])
    joined = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), to_stages(stages, schedule))
    return nnx.merge_state(params, nnx.State({"stages": joined})), shapes


def _from_stages(gradients: nnx.State, shapes: nnx.State, schedule: Schedule) -> nnx.State:
    """Returns gradients of `_to_stages`, laid out as the parameters."""
    chunks = len(schedule.directions)
    apart = jax.tree.map(lambda g: g.reshape(chunks, -1, *g.shape[1:]), gradients["stages"])
    home = from_stages(apart, schedule)
    home = jax.tree.map(lambda g, shape: g.reshape(shape), home, shapes, is_leaf=lambda x: isinstance(x, tuple))
    return nnx.merge_state(gradients, nnx.State({"stages": home}))
