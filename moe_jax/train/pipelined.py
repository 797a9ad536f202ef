"""Gradients and values of a model in a pipeline: each rank along `pipe` runs its own layers on every micro-batch.

The executors of `parallel.pipeline` order the passes of `train.pipeline_passes`: `executor` in uniform ticks, and
`table_executor` in any other schedule.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.models.decoder import Decoder
from moe_jax.models.execution import Execution
from moe_jax.parallel.choices import UNIFORM
from moe_jax.parallel.layout import lies_in_chunks, parameter_path
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.pipeline.chunks import from_stages, layers_of_chunk, stage_in_pipe, to_stages
from moe_jax.parallel.pipeline.executor import run_forward_ticks, run_ticks
from moe_jax.parallel.pipeline.limits import schedule_by_name, split_axes, split_problem
from moe_jax.parallel.pipeline.schedules import Schedule
from moe_jax.parallel.pipeline.table import lockstep_table, undivided
from moe_jax.parallel.pipeline.table_executor import run_table
from moe_jax.train.batch import Batch, micro_batches_of
from moe_jax.train.gradients import Gradients, GradientsFn, sum_on_mesh, zeros_of
from moe_jax.train.objective import Objective
from moe_jax.train.on_devices import merged_model, on_devices
from moe_jax.train.overlap import check_objective
from moe_jax.train.pipeline_front import Front
from moe_jax.train.pipeline_passes import RankPasses, Totals, fp8_copies_of_rank, passes_of_layers


def accumulate_pipelined(
    objective: Objective,
    graphdef: nnx.GraphDef,
    execution: Execution,
    parallelism: Parallelism,
    micro_batches: int,
) -> GradientsFn:
    """Returns what `gradients.accumulate` returns, for parameters of `parallel.pipeline.chunks.to_chunks`.

    The passes have the order of `parallelism.pipe_schedule`. In uniform ticks each tick computes a chunk forward for one
    micro-batch beside a chunk backward for another, in one loop over the layers. With "uniform-w" some gradients of weights are
    put off to the end. Where matrices are split inside a pipeline's rank, DualPipe and DualPipeV compute whole backward passes
    in place of b, and no W apart.

    Args:
      objective: one that has `of_states`, and whose value is a sum over tokens. It sees the tokens of a micro-batch in as many
        parts as there are ranks, along one axis. If the model has modules that predict further tokens, parts are whole rows.

    Raises:
      TypeError: an objective that works on batches alone.
      ValueError: a schedule that the mesh refuses (`schedule_of`, `check_branches`), or one from a table with
        remat="offload". At the first call, parameters that lie otherwise.
    """
    check_objective(objective, "a pipeline")
    name = parallelism.pipe_schedule
    schedule = table = None
    if name not in UNIFORM:
        if execution.remat == "offload":
            raise ValueError(
                f"remat='offload' needs pipe_schedule='uniform': slots of {name!r} lie in the GPU's memory; "
                "take that schedule, or remat True or False"
            )
        check_branches(parallelism)
        schedule = schedule_of(parallelism, micro_batches)
        table = lockstep_table(schedule)
    elif name == "uniform-w":
        schedule_of(parallelism, micro_batches)
    divides = name == "uniform-w" if table is None else ("W",) in table.kinds

    def sum_of(params: nnx.State, fixed: nnx.State, execution: Execution, stacked: Batch, scalars: Batch) -> Gradients:
        own = _layers_of_rank(params, schedule)
        front = Front(passes_of_layers(objective, graphdef, own, fixed, execution, parallelism.mesh), stacked)
        passes = _rank_passes(front, scalars, parallelism, schedule)
        pipeline = passes.of_pipeline(divides=divides)
        if table is None:
            totals = run_ticks(pipeline, passes.chunks, micro_batches, passes.zeros())
        else:
            totals = run_table(pipeline, table, passes.zeros())
        gradients = _gradients_of_chunks(front.backward(totals.embedded[:-1], totals.gradients), params, schedule)
        return Gradients(totals.value, passes.aux_of_layers(totals.aux, totals.router), gradients)

    on_mesh = sum_on_mesh(sum_of, graphdef, execution, parallelism, micro_batches)
    return _checked(on_mesh, graphdef, parallelism)


def evaluate_pipelined(
    objective: Objective, graphdef: nnx.GraphDef, parallelism: Parallelism, micro_batches: int
) -> Callable[[nnx.State, nnx.State, Batch], tuple[Float[Array, ""], Any]]:
    """Returns evaluated(params, fixed, batch) -> (value, aux), whose micro-batches flow through the ranks one behind another.

    Arguments, micro-batches and errors as in `accumulate_pipelined`, and value and aux equal those. Layers keep nothing for a
    backward pass. A step of m micro-batches takes m v + p - 1 ticks, if the p ranks divide m: with few micro-batches most ranks
    wait.
    """
    check_objective(objective, "a pipeline")

    def of_device(model: Decoder, batch: Batch) -> tuple[Array, Any]:
        graph, params, *rest = nnx.split(model, nnx.Param, ...)
        (fixed,) = rest
        # With remat a chunk saves its layers' inputs alone, and XLA removes a stack that nothing reads.
        execution = replace(model.execution, remat=True)
        micro = passes_of_layers(objective, graph, _layers_of_rank(params), fixed, execution, parallelism.mesh)
        stacked, scalars = micro_batches_of(batch, micro_batches)
        return _evaluated(_rank_passes(Front(micro, stacked), scalars, parallelism), micro_batches)

    return _checked(on_devices(of_device, graphdef, parallelism=parallelism), graphdef, parallelism)


def _evaluated(passes: RankPasses, micro_batches: int) -> tuple[Array, Any]:
    """Runs the rank's passes."""

    def forward(of_tick, moving):
        ((output, _, count),) = passes.run(passes.forward(of_tick, moving))
        return output, count

    def loss(i, finished, totals: Totals) -> Totals:
        value, aux = jax.tree.map(jnp.add, (totals.value, totals.aux), passes.value_of(i, finished))
        return totals._replace(value=value, aux=aux)

    value, aux = zeros_of(jax.eval_shape(lambda: passes.value_of(0, passes.enter(0))))
    start = Totals(value, aux, None, None, passes.zeros_of_layers())
    totals = run_forward_ticks(passes.enter, forward, loss, passes.chunks, micro_batches, start)
    return totals.value, passes.aux_of_layers(totals.aux, totals.router)


def _rank_passes(front: Front, scalars: Batch, parallelism: Parallelism, schedule: Schedule | None = None) -> RankPasses:
    chunks = parallelism.pipe_chunks if schedule is None else len(schedule.directions)
    copies = fp8_copies_of_rank(front.micro, parallelism.mesh)
    return RankPasses(front.micro, chunks, front.stacked, scalars, front.forward(), schedule, copies=copies)


def _checked[Result](on_mesh: Callable[..., Result], graphdef: nnx.GraphDef, parallelism: Parallelism) -> Callable[..., Result]:
    """Returns the function of (params, fixed, batch) with a check that the layers lie in chunks."""

    def checked(params: nnx.State, fixed: nnx.State, batch: Batch) -> Result:
        _check_chunks(merged_model(graphdef, params, fixed), *parallelism.pipe)
        return on_mesh(params, fixed, batch)

    return checked


def _layers_of_rank(params: nnx.State, schedule: Schedule | None = None) -> nnx.State:
    """Returns the rank's layers, [chunks, 1, layers of a chunk, ...], along one axis; with a schedule, those of its stages."""

    def join(key_path: tuple, array: Array) -> Array:
        if not lies_in_chunks(parameter_path(key_path), array.shape):
            return array
        own = array if schedule is None else to_stages(array.squeeze(1), schedule)
        return own.reshape(-1, *array.shape[3:])

    return jax.tree.map_with_path(join, params)


def _gradients_of_chunks(gradients: nnx.State, params: nnx.State, schedule: Schedule | None) -> nnx.State:
    """Returns gradients of `_layers_of_rank`, laid out as the parameters."""

    def home(key_path: tuple, gradient: Array, like: Array) -> Array:
        if schedule is not None and lies_in_chunks(parameter_path(key_path), like.shape):
            gradient = from_stages(gradient.reshape(len(schedule.directions), -1, *gradient.shape[1:]), schedule)
        return gradient.reshape(like.shape)

    return jax.tree.map_with_path(home, gradients, params)


def _check_chunks(model: Decoder, ranks: int, chunks: int) -> None:
    """Checks that a model's last layers of one kind lie in chunks.

    Raises:
      ValueError: they lie otherwise, or layers with experts stand before them.
    """
    stages = nnx.state(model, nnx.Param)["stages"]
    stage = stage_in_pipe(stages)
    wanted = (chunks, ranks, layers_of_chunk(model.config.stages[stage].repeats, ranks, chunks))
    shape = jax.tree.leaves(stages[stage])[0].shape
    if shape[:3] != wanted:
        raise ValueError(
            f"the layers of a pipeline are stacked as {list(wanted)} (chunks, ranks, layers of a chunk); a parameter has shape "
            f"{list(shape)}: lay the parameters out with parallel.pipeline.chunks.to_chunks"
        )


def schedule_of(parallelism: Parallelism, micro_batches: int) -> Schedule:
    """Returns the schedule of a step. Where matrices are split inside a rank, DualPipe and DualPipeV have no b and W.

    Raises:
      ValueError: sizes that the schedule refuses, or ZB-H1, ZB-V and `uniform-w` where matrices are split inside a rank.
    """
    name = parallelism.pipe_schedule
    schedule = schedule_by_name(name, parallelism.mesh.shape["pipe"], parallelism.pipe_chunks, micro_batches)
    if problem := split_problem(name, parallelism.mesh.shape):
        raise ValueError(problem)
    if not split_axes(parallelism.mesh.shape) or not any(
        part.kind == "W" for slots in schedule.ranks for slot in slots for part in slot
    ):
        return schedule
    return undivided(schedule)


def check_branches(parallelism: Parallelism) -> None:
    """Refuses transfers that would hang where ranks of the pipe are in different branches.

    Raises:
      ValueError: a `ppermute` inside the layers: experts over "pairwise", a ring of sequences, or gathers by copies. One in a
        transport of the caller's own is found when a step is traced (`branches`).
    """
    expert, context = parallelism.expert_parallel, parallelism.context_parallel
    by_copies = parallelism.hops == "copies" and bool(split_axes(parallelism.mesh.shape))
    for is_used, what, instead in (
        (by_copies, "hops='copies' inside the layers", "hops='nccl'"),
        (expert is not None and expert.transport == "pairwise", "the transport 'pairwise'", "'all_to_all' or 'gather'"),
        (context is not None and context.method == "ring", "the method 'ring'", "'all_gather' or 'ulysses'"),
    ):
        if is_used:
            raise ValueError(
                f"pipe_schedule={parallelism.pipe_schedule!r} runs ranks of the pipe in different branches, and {what} would "
                f"wait for ranks that never send: take {instead}, or pipe_schedule='uniform'"
            )
