"""The separate passes of one micro-batch (forward, loss and backward), for a step that orders them itself.

A pipeline orders them by its schedule (`train.pipelined`). On one rank, the forward pass of a micro-batch overlaps the previous
one's backward pass, in one loop over the layers. A turn of the loop computes layer l forward for micro-batch i + 1 and layer
n - 1 - l backward for micro-batch i. Tokens of one pass travel to the experts of other devices while the other pass computes.
This is the order of Megatron's combined 1F1B without a pipeline, and of DualPipe's pairs (DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 3.2.1).

| time | 0 | 1 | ... | n |
|---|---|---|---|---|
| forward | micro-batch 0 | 1 | | |
| backward | | 0 | | n - 1 |
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_jax.kernels.precision import at_least_f32
from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.loops import Pass, run_joined, run_pass
from moe_jax.layers.moe import accumulated_gradients, add_expert_gradients_to
from moe_jax.layers.passes import BackwardRun, ForwardRun, LayerArrays, SavedLayers, backward_pass, forward_pass, parts_of
from moe_jax.models.decoder import Decoder
from moe_jax.models.execution import Execution
from moe_jax.models.forward import Carry, Entered, StageLayers, StageRouting, stage_layers
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.train.batch import Batch, micro_batch_at, micro_batches_of
from moe_jax.train.gradients import Gradients, GradientsFn, sum_on_mesh, zeros_of
from moe_jax.train.objective import Objective, check_objective
from moe_jax.train.on_devices import merged_model
from moe_jax.train.state import as_f32


class Forwarded(NamedTuple):
    """The result of a micro-batch's forward pass, after its last layer."""

    x: Float[Array, "batch seq hidden"]
    routings: list[StageRouting]
    """One for each stage with experts."""
    saved: list[SavedLayers]
    """One for each stage."""


LossRun = tuple[Gradients, Float[Array, "batch seq hidden"], list[Any]]
"""A micro-batch's value and aux with the sums of gradients, and the gradients of `Forwarded.x` and its routings, with which the
backward pass starts."""


@dataclass(frozen=True)
class MicroBatchPasses:
    """The separate forward, loss and backward passes of a micro-batch; together they equal `jax.value_and_grad`.

        forwarded = run_pass(passes.forward(batch))
        found, dx, droutings = passes.loss(batch, forwarded, gradients)
        dx, gradients = run_pass(passes.backward(batch, forwarded.saved, dx, droutings, found.gradients))
        gradients = passes.embedding(batch["tokens"], dx, gradients)

    Attributes:
      objective: one that has `of_states`.
      graphdef, fixed, execution: as in `train.on_devices`.
      params: as the model reads them; on a mesh, the result of `ShardedParameters.enter`.
      in_place: the kernels add the experts' gradients to the sums; for devices that hold all experts of their layers.
    """

    objective: Objective
    graphdef: nnx.GraphDef
    params: nnx.State
    fixed: nnx.State
    execution: Execution
    in_place: bool

    @property
    def num_stages(self) -> int:
        """The number of stages of decoder layers, excluding MTP modules."""
        return len(self.model().config.stages)

    @property
    def longest_loop(self) -> tuple[int, int]:
        """The (loops before, loops after) the forward loop with most MoE layers, or with most layers if there are none."""
        loops = []
        for number, stage in enumerate(self.model().config.stages):
            own = self._execution(number)
            for _, chunk in parts_of(own.remat, own.num_kept, stage.repeats):
                loops.append((stage.sparse, len(stage.body) * (chunk.num_layers if chunk else stage.repeats)))
        before = loops.index(max(loops))
        return before, len(loops) - 1 - before

    def zeros(self) -> nnx.State:
        """Returns zero-initialized gradient sums, in f32 (f64 for f64)."""
        dtype = at_least_f32(self.model().dtype)
        return jax.tree.map(lambda w: vary_as(jnp.zeros(w.shape, dtype), w), self.params)

    def enter(self, batch: Batch) -> Entered:
        """Embeds the tokens and builds the inputs that all layers share."""
        return self.model().enter(
            batch["tokens"],
            batch["positions"],
            batch["segment_ids"],
            context=self.execution.spread.context,
            sequence_balance=self.objective.sequence_balance,
        )

    def forward(self, batch: Batch) -> Pass:
        """Embeds the tokens and runs all stages; the result is a `Forwarded`."""
        entered = self.enter(batch)
        carry, routings, saved = entered.carry, [], []
        for number in range(self.num_stages):
            # The accumulators' values are not read forward. Zeros keep the sums out of the loop, which would copy them.
            stage = self._stage(number, entered, self.zeros())
            run: ForwardRun = yield from forward_pass(*stage, carry)
            carry = run.x
            saved.append(run.saved)
            if run.y is not None:
                routings.append(run.y)
        return Forwarded(carry.x, routings, saved)

    def loss(self, batch: Batch, forwarded: Forwarded, gradients: nnx.State) -> LossRun:
        """Computes the objective and its gradients with respect to parameters, `forwarded.x` and routings."""
        inputs = self.enter(batch).inputs

        def value(model: Decoder, x, routings):
            return self.objective.of_states(model, model.leave(inputs, Carry(x, None), routings), batch)

        return self.loss_of(value, forwarded.x, forwarded.routings, gradients)

    def loss_of(self, value: Callable[[Decoder, Any, Any], tuple[Array, Any]], x, routings, gradients: nnx.State) -> LossRun:
        """Computes value(model, x, routings) -> (scalar, aux) and its gradients; adds parameter gradients to `gradients`."""
        of_stages, outside = self._split(self.params)

        def of_outside(outside: nnx.State, x, routings):
            return value(self.model(nnx.merge_state(of_stages, outside)), x, routings)

        found, pullback, aux = jax.vjp(of_outside, outside, x, routings, has_aux=True)
        own, dx, droutings = pullback(jnp.ones_like(found))
        of_stages, of_others = self._split(gradients)
        return Gradients(found, aux, nnx.merge_state(of_stages, _add(of_others, own))), dx, droutings

    def backward(self, batch: Batch, saved: list[SavedLayers], dx, droutings: list[Any], gradients: nnx.State) -> Pass:
        """Runs the backward pass of all stages; returns (gradient of embedded tokens, updated `gradients`)."""
        entered = self.enter(batch)
        carry, droutings = Carry(dx, None), list(droutings)
        stages = {}
        for number in reversed(range(self.num_stages)):
            layers, arrays = self._stage(number, entered, gradients)
            routing = droutings.pop() if self.model().config.stages[number].sparse else None
            sums = sums_of_loop(gradients["stages"][number], arrays)
            run: BackwardRun = yield from backward_pass(layers, arrays, saved[number], carry, routing, sums)
            stages[number], carry = gradients_of_stage(run), run.dx
        return carry.x, nnx.merge_state(nnx.State({"stages": stages}), self._split(gradients)[1])

    def embedding(
        self, tokens: Int[Array, "batch seq"], dx: Float[Array, "batch seq hidden"], gradients: nnx.State
    ) -> nnx.State:
        """Adds the embedding table's gradient for these tokens to `gradients`, in f32; none if it is frozen."""
        table, others = _split(self.params, lambda path: path[0] == "embed_tokens")
        if not jax.tree.leaves(table):
            return gradients
        in_f32 = jax.tree.map(lambda w: w.astype(at_least_f32(w.dtype)), table)

        def embed(table: nnx.State):
            model = self.model(nnx.merge_state(others, table))
            return model.embed_tokens(tokens, model.dtype)

        _, pullback = jax.vjp(embed, in_f32)
        of_table, of_others = _split(gradients, lambda path: path[0] == "embed_tokens")
        return nnx.merge_state(of_others, _add(of_table, pullback(dx)[0]))

    def model(self, params: nnx.State | None = None) -> Decoder:
        """Builds the model with these parameters; default: `self.params`."""
        return merged_model(self.graphdef, self.params if params is None else params, self.fixed, self.execution)

    def _stage(self, number: int, entered: Entered, gradients: nnx.State) -> StageLayers:
        """Returns the layers of a stage; in place, with the sums of the experts' gradients as accumulators."""
        model = self.model()
        if self.in_place:
            add_expert_gradients_to(model, gradients)
        return stage_layers(model.stages[number], number, entered.inputs, entered.per_layer[number], self._execution(number))

    def _execution(self, number: int) -> Execution:
        return self.execution.of_stage(self.model().config, number)

    def _split(self, tree: nnx.State) -> tuple[nnx.State, nnx.State]:
        """Splits a tree of parameters into (the stages of the passes, everything else)."""
        stages = self.num_stages
        return _split(tree, lambda path: path[0] == "stages" and path[1] < stages)


def accumulate_overlapping(
    objective: Objective,
    graphdef: nnx.GraphDef,
    execution: Execution,
    parallelism: Parallelism | None,
    micro_batches: int,
    *,
    in_place: bool = False,
) -> GradientsFn:
    """Returns a function that sums gradients (like `gradients.accumulate`) and overlaps passes of neighboring micro-batches.

    Two micro-batches are in flight: memory holds the residuals of two. Parameters outside the layers are gathered once for all
    micro-batches, and their gradients are summed over devices once, in f32. So the sums of the embedding and of the head are
    whole on every device. The gradients of all embedded tokens are kept until the end of the step.

    Args:
      objective: one that has `of_states`.
      graphdef, execution, parallelism: as in `train.on_devices`.
      micro_batches: at least 2.
      in_place: as in `MicroBatchPasses`; only without `parallelism`.

    Raises:
      ValueError: fewer than 2 micro-batches.
      TypeError: an objective that cannot start from hidden states.
    """
    if micro_batches < 2:
        raise ValueError(f"micro_batches must be at least 2, so that one can overlap the next; got {micro_batches}")
    check_objective(objective, "overlapping micro-batches")

    def sum_of(params: nnx.State, fixed: nnx.State, execution: Execution, stacked: Batch, scalars: Batch) -> Gradients:
        adds_in_kernel = in_place and parallelism is None
        return _sum_of(MicroBatchPasses(objective, graphdef, params, fixed, execution, adds_in_kernel), stacked, scalars)

    if parallelism is not None:
        return sum_on_mesh(sum_of, graphdef, execution, parallelism, micro_batches)

    def summed(params: nnx.State, fixed: nnx.State, batch: Batch) -> Gradients:
        found = sum_of(params, fixed, execution, *micro_batches_of(batch, micro_batches))
        return found._replace(gradients=as_f32(found.gradients))

    return summed


def _sum_of(passes: MicroBatchPasses, stacked: Batch, scalars: Batch) -> Gradients:
    """Sums the objective's value, aux and gradients over the micro-batches on one device."""
    before_joined, after_joined = passes.longest_loop
    first = micro_batch_at(stacked, 0) | scalars
    forwarded = run_pass(passes.forward(first))
    # The loop carries leaves, because two traces of a pullback have different tree structures with the same leaves.
    leaves, structure = jax.tree.flatten(forwarded.saved)
    found = jax.eval_shape(lambda: passes.loss(first, forwarded, passes.zeros())[0])
    sums = zeros_of(found)._replace(gradients=passes.zeros())

    def loss(forwarded: Forwarded, sums: Gradients, batch: Batch) -> tuple[Gradients, Pass]:
        forwarded = forwarded._replace(saved=jax.tree.unflatten(structure, forwarded.saved))
        found, dx, droutings = passes.loss(batch, forwarded, sums.gradients)
        value, aux = jax.tree.map(jnp.add, (sums.value, sums.aux), (found.value, found.aux))
        return found._replace(value=value, aux=aux), passes.backward(batch, forwarded.saved, dx, droutings, found.gradients)

    def tick(carry: tuple[Forwarded, Gradients], batches: tuple[Batch, Batch]):
        before, after = (batch | scalars for batch in batches)
        sums, backward = loss(*carry, before)
        forwarded, (dx, gradients) = run_joined((passes.forward(after), before_joined), (backward, after_joined))
        return (forwarded._replace(saved=jax.tree.leaves(forwarded.saved)), sums._replace(gradients=gradients)), dx

    neighbours = ({name: x[:-1] for name, x in stacked.items()}, {name: x[1:] for name, x in stacked.items()})
    carry, dx = jax.lax.scan(tick, (forwarded._replace(saved=leaves), sums), neighbours)
    sums, backward = loss(*carry, micro_batch_at(stacked, -1) | scalars)
    last_dx, gradients = run_pass(backward)
    # The table is as large as several layers: its sums are read and written once, for the tokens of all micro-batches.
    dx = jnp.concatenate([dx, last_dx[None]])
    tokens, dx = (x.reshape(-1, *x.shape[2:]) for x in (stacked["tokens"], dx))
    return sums._replace(gradients=passes.embedding(tokens, dx, gradients))


def sums_of_loop(gradients: nnx.State, arrays: LayerArrays) -> nnx.State:
    """Selects the gradient sums that a stage's backward loop adds to."""
    # Accumulated matrices, and matrices with tickets, are not parameters of the loop.
    own = {path for path, _ in nnx.to_flat_state(arrays.parameters)}
    return nnx.filter_state(gradients, lambda path, _: path in own)


def gradients_of_stage(run: BackwardRun) -> nnx.State:
    """Returns a stage's gradient sums after its backward loop, including those accumulated in kernels."""
    return nnx.merge_state(run.parameters, accumulated_gradients(run.accumulators))


def _split(tree: nnx.State, is_first: Callable[[tuple], bool]) -> tuple[nnx.State, nnx.State]:
    """Splits a tree by the paths of its leaves."""
    first, others = nnx.split_state(tree, lambda path, _: is_first(path), ...)
    return first, others


def _add(sums: nnx.State, gradients: nnx.State) -> nnx.State:
    return jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, gradients)
