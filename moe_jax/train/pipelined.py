"""Gradients and values of a model in a pipeline: each rank along `pipe` runs its own layers on every micro-batch.

`parallel.pipeline.executor` runs the passes of `train.pipeline_passes` in the order of a schedule.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from moe_jax.layers.lora import Frozen
from moe_jax.models.decoder import Decoder
from moe_jax.models.execution import Execution
from moe_jax.models.forward import Carry, run_stage
from moe_jax.models.remat import remat_option
from moe_jax.parallel.choices import UNIFORM
from moe_jax.parallel.layout import lies_in_chunks, parameter_path
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.pipeline.chunks import layers_of_chunk, stage_in_pipe
from moe_jax.parallel.pipeline.executor import from_stages, run_table, to_stages
from moe_jax.parallel.pipeline.limits import divides_backward, schedule_by_name, split_axes, split_problem
from moe_jax.parallel.pipeline.schedules import Schedule
from moe_jax.parallel.pipeline.table import forward_only, lockstep_table, undivided
from moe_jax.parallel.pipeline.ticks import uniform
from moe_jax.train.batch import Batch, micro_batches_of
from moe_jax.train.gradients import Gradients, GradientsFn, sum_on_mesh, zeros_of
from moe_jax.train.micro_batch import MicroBatchPasses
from moe_jax.train.objective import Objective, check_objective
from moe_jax.train.on_devices import merged_model, on_devices
from moe_jax.train.pipeline_passes import RankPasses, Totals, fp8_copies_of_rank, passes_of_layers


def accumulate_pipelined(
    objective: Objective,
    graphdef: nnx.GraphDef,
    execution: Execution,
    parallelism: Parallelism,
    micro_batches: int,
) -> GradientsFn:
    """Returns a function that sums gradients over micro-batches with pipeline parallelism (like `gradients.accumulate`).

    The passes run in the order of `parallelism.pipe_schedule`. A uniform tick computes a chunk's forward pass for one
    micro-batch and a chunk's backward pass for another, in one loop over the layers. "uniform-w" postpones some gradients of
    weights to the end. Where `divides_backward` is False, DualPipe and DualPipeV compute whole backward passes instead of
    separate b and W.

    Args:
      objective: must have `of_states` and return a sum over tokens. It gets the tokens of a micro-batch in one part
        per rank, along one axis. If the model has MTP modules, parts are whole rows.

    Raises:
      TypeError: an objective that works on batches alone.
      ValueError: a schedule that the mesh refuses (`schedule_of`, `check_branches`), or one from a table with
        remat="offload". A number of layers, or parts, as `remat`. At the first call, parameters in another layout.
    """
    check_objective(objective, "a pipeline")
    name = parallelism.pipe_schedule
    if execution.num_kept or execution.keep:
        kept = remat_option(execution.num_kept, execution.keep)
        raise ValueError(f"remat={kept!r} needs a mesh without pipe: give remat True, False or 'offload'")
    if name not in UNIFORM:
        if execution.remat == "offload":
            raise ValueError(
                f"remat='offload' needs pipe_schedule='uniform': slots of {name!r} stay in the GPU's memory; "
                "use that schedule, or remat True or False"
            )
        check_branches(parallelism)
    schedule_of(parallelism, micro_batches)

    def sum_of(params: nnx.State, fixed: nnx.State, execution: Execution, stacked: Batch, scalars: Batch) -> Gradients:
        frozen, _ = nnx.split_state(fixed, Frozen, ...)
        schedule = schedule_of(parallelism, micro_batches, frozen=bool(jax.tree.leaves(frozen)))
        table = lockstep_table(schedule)
        own, fixed = (_layers_of_rank(part, schedule) for part in (params, fixed))
        front = Front(passes_of_layers(objective, graphdef, own, fixed, execution, parallelism.mesh), stacked)
        passes = _rank_passes(front, scalars, parallelism, schedule)
        totals = run_table(passes.of_pipeline(divides="W" in table.kinds), table, passes.zeros())
        gradients = _gradients_of_chunks(front.backward(totals.embedded[:-1], totals.gradients), params, schedule)
        return Gradients(totals.value, passes.aux_of_layers(totals.aux, totals.router), gradients)

    on_mesh = sum_on_mesh(sum_of, graphdef, execution, parallelism, micro_batches)
    return _checked(on_mesh, graphdef, parallelism)


def evaluate_pipelined(
    objective: Objective, graphdef: nnx.GraphDef, parallelism: Parallelism, micro_batches: int
) -> Callable[[nnx.State, nnx.State, Batch], tuple[Float[Array, ""], Any]]:
    """Returns evaluated(params, fixed, batch) -> (value, aux), with forward passes pipelined over the ranks.

    Arguments, micro-batches, errors, value and aux are the same as in `accumulate_pipelined`. Layers save no residuals. A step
    of m micro-batches needs m v + p - 1 ticks, if the p ranks divide m: with few micro-batches most ranks wait.
    """
    check_objective(objective, "a pipeline")

    def of_device(model: Decoder, batch: Batch) -> tuple[Array, Any]:
        graph, params, *rest = nnx.split(model, nnx.Param, ...)
        (fixed,) = rest
        # With remat a chunk saves only its layers' inputs, and XLA removes a stack that nothing reads.
        execution = model.execution.with_remat(True)
        # Layers are stored as uniform ticks need them, so an evaluation sends none to other ranks.
        schedule = uniform(*parallelism.pipe, micro_batches)
        params, fixed = (_layers_of_rank(part, schedule) for part in (params, fixed))
        micro = passes_of_layers(objective, graph, params, fixed, execution, parallelism.mesh)
        stacked, scalars = micro_batches_of(batch, micro_batches)
        return _evaluated(_rank_passes(Front(micro, stacked), scalars, parallelism, schedule))

    return _checked(on_devices(of_device, graphdef, parallelism=parallelism), graphdef, parallelism)


@dataclass(frozen=True)
class Front:
    """The computation before the pipeline: the embedding, and dense first layers as in DeepSeek-V3.

    Rank r computes the dense layers of micro-batches g p + r. They run before the first tick, and again, with their backward
    pass, after the last tick: the ranks share the work evenly. During the step every rank has their outputs for all
    micro-batches, and the outputs' gradients. Without dense layers the first rank embeds each micro-batch in the tick in
    which it enters. All of this is inside `jax.shard_map` over `pipe`.
    """

    micro: MicroBatchPasses
    stacked: Batch

    def forward(self) -> Float[Array, "micro_batches batch seq hidden"] | None:
        """Computes the dense first layers of all micro-batches; outputs are on every rank, None without such layers."""
        if not self._num_stages:
            return None

        def run(batch: Batch) -> Array:
            return self._run(self.micro.params, self.micro.enter(batch).carry.x, batch)

        outputs = lax.all_gather(lax.map(run, self._of_rank), "pipe", axis=1)
        return outputs.reshape(-1, *outputs.shape[2:])[: len(self.stacked["tokens"])]

    def backward(self, dx: Float[Array, "micro_batches batch seq hidden"], gradients: nnx.State) -> nnx.State:
        """Adds the gradients of dense layers and embedding to `gradients`.

        Args:
          dx: the gradients of the pipeline's inputs, on the first rank; zeros on the others.
        """
        if not self._num_stages:
            tokens, dx = (x.reshape(-1, *x.shape[2:]) for x in (self.stacked["tokens"], dx))
            return self.micro.embedding(tokens, dx, gradients)
        layers, outside = self._split(self.micro.params)

        def add(sums: nnx.State, of_micro_batch: tuple[Batch, Array]) -> tuple[nnx.State, Array]:
            batch, dy = of_micro_batch

            def run(layers: nnx.State, x) -> Array:
                return self._run(nnx.merge_state(layers, outside), x, batch)

            own, dx = jax.vjp(run, layers, self.micro.enter(batch).carry.x)[1](dy)
            return jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, own), dx

        ranks = lax.axis_size("pipe")
        filled = jnp.pad(dx, [(0, -len(dx) % ranks), *[(0, 0)] * (dx.ndim - 1)])
        dy = lax.psum_scatter(filled.reshape(-1, ranks, *dx.shape[1:]), "pipe", scatter_dimension=1, tiled=False)
        sums, of_others = self._split(gradients)
        sums, dx = lax.scan(add, sums, (self._of_rank, dy))
        tokens, dx = (x.reshape(-1, *x.shape[2:]) for x in (self._of_rank["tokens"], dx))
        return self.micro.embedding(tokens, dx, nnx.merge_state(sums, of_others))

    def _run(self, params: nnx.State, x: Float[Array, "batch seq hidden"], batch: Batch) -> Float[Array, "batch seq hidden"]:
        """Runs the dense layers on a micro-batch."""
        model, entered, carry = self.micro.model(params), self.micro.enter(batch), Carry(x, None)
        for number in range(self._num_stages):
            of_stage = entered.per_layer[number]
            carry, _ = run_stage(model.stages[number], number, entered.inputs, of_stage, carry, self.micro.execution)
        return carry.x

    @property
    def _of_rank(self) -> Batch:
        """The micro-batches of the rank, stacked. An incomplete group is filled with copies of the last one."""
        ranks, last = lax.axis_size("pipe"), len(self.stacked["tokens"]) - 1
        own = jnp.minimum(jnp.arange(last // ranks + 1) * ranks + lax.axis_index("pipe"), last)
        return {name: x[own] for name, x in self.stacked.items()}

    @property
    def _num_stages(self) -> int:
        return self.micro.num_stages - 1

    def _split(self, tree: nnx.State) -> tuple[nnx.State, nnx.State]:
        """Splits a tree of parameters into (the dense layers, everything else)."""
        layers, others = nnx.split_state(tree, lambda path, _: path[0] == "stages" and path[1] < self._num_stages, ...)
        return layers, others


def _evaluated(passes: RankPasses) -> tuple[Array, Any]:
    """Runs the rank's forward passes and losses."""

    def loss(i, last_rank: int, finished, totals: Totals) -> tuple[None, Totals]:
        value, aux = jax.tree.map(jnp.add, (totals.value, totals.aux), passes.value_of(i, finished))
        return None, totals._replace(value=value, aux=aux)

    value, aux = zeros_of(jax.eval_shape(lambda: passes.value_of(0, passes.enter(0))))
    start = Totals(value, aux, None, None, passes.zeros_of_layers())
    table = forward_only(lockstep_table(passes.schedule))
    totals = run_table(replace(passes.of_pipeline(), loss=loss), table, start)
    return totals.value, passes.aux_of_layers(totals.aux, totals.router)


def _rank_passes(front: Front, scalars: Batch, parallelism: Parallelism, schedule: Schedule) -> RankPasses:
    copies = fp8_copies_of_rank(front.micro, parallelism.mesh)
    return RankPasses(front.micro, schedule, front.stacked, scalars, front.forward(), copies=copies)


def _checked[Result](on_mesh: Callable[..., Result], graphdef: nnx.GraphDef, parallelism: Parallelism) -> Callable[..., Result]:
    """Returns the function of (params, fixed, batch) with a check that the layers are split into chunks."""

    def checked(params: nnx.State, fixed: nnx.State, batch: Batch) -> Result:
        _check_chunks(merged_model(graphdef, params, fixed), *parallelism.pipe)
        return on_mesh(params, fixed, batch)

    return checked


def _layers_of_rank(params: nnx.State, schedule: Schedule) -> nnx.State:
    """Returns the rank's layers, [chunks, 1, layers of a chunk, ...], of its stages in the schedule, along one axis.

    Other arrays, such as biases of experts, are unchanged.
    """

    def join(key_path: tuple, array: Array) -> Array:
        if not lies_in_chunks(parameter_path(key_path), array.shape):
            return array
        return to_stages(array.squeeze(1), schedule).reshape(-1, *array.shape[3:])

    return jax.tree.map_with_path(join, params)


def _gradients_of_chunks(gradients: nnx.State, params: nnx.State, schedule: Schedule) -> nnx.State:
    """Converts gradients of `_layers_of_rank` to the parameters' layout."""

    def home(key_path: tuple, gradient: Array, like: Array) -> Array:
        if lies_in_chunks(parameter_path(key_path), like.shape):
            gradient = from_stages(gradient.reshape(len(schedule.directions), -1, *gradient.shape[1:]), schedule)
        return gradient.reshape(like.shape)

    return jax.tree.map_with_path(home, gradients, params)


def _check_chunks(model: Decoder, ranks: int, chunks: int) -> None:
    """Checks that a model's last layers of one kind are split into chunks.

    Raises:
      ValueError: they are not, or layers with experts precede them.
    """
    stages = nnx.state(model, (nnx.Param, Frozen))["stages"]
    stage = stage_in_pipe(stages)
    wanted = (chunks, ranks, layers_of_chunk(model.config.stages[stage].repeats, ranks, chunks))
    shape = jax.tree.leaves(stages[stage])[0].shape
    if shape[:3] != wanted:
        raise ValueError(
            f"the layers of a pipeline are stacked as {list(wanted)} (chunks, ranks, layers of a chunk); a parameter has shape "
            f"{list(shape)}: lay the parameters out with parallel.pipeline.chunks.to_chunks"
        )


def schedule_of(parallelism: Parallelism, micro_batches: int, *, frozen: bool = False) -> Schedule:
    """Returns the schedule of a step. DualPipe and DualPipeV do not separate b and W where `divides_backward` is False.

    Args:
      frozen: adapters are trained on frozen weights, which have no gradients to postpone.

    Raises:
      ValueError: sizes that the schedule refuses, or ZB-H1, ZB-V and `uniform-w` where `divides_backward` is False.
    """
    name = parallelism.pipe_schedule
    schedule = schedule_by_name(name, parallelism.mesh.shape["pipe"], parallelism.pipe_chunks, micro_batches)
    axes, expert = parallelism.mesh.shape, parallelism.expert_parallel
    if problem := split_problem(name, axes, expert, frozen=frozen):
        raise ValueError(problem)
    if divides_backward(axes, expert, frozen=frozen) or not any(
        part.kind == "W" for slots in schedule.ranks for slot in slots for part in slot
    ):
        return schedule
    return undivided(schedule)


def check_branches(parallelism: Parallelism) -> None:
    """Raises if a transfer inside the layers would deadlock when ranks run different branches.

    Raises:
      ValueError: a `ppermute` inside the layers: experts over "pairwise", a ring of sequences, or gathers by copies. A
        `ppermute` in a caller's own transport is found when a step is traced (`executor.checked_branch`).
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
                f"wait for ranks that never send: use {instead}, or pipe_schedule='uniform'"
            )
