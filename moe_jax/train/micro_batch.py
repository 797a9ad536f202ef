"""The passes of one micro-batch through a model, apart: forward, loss and backward, for a step that orders them itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_jax.kernels.precision import at_least_f32
from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.moe import accumulated_gradients, add_expert_gradients_to
from moe_jax.layers.passes import (
    BackwardRun,
    ForwardRun,
    LayerArrays,
    Pass,
    SavedLayers,
    backward_loop,
    forward_loop,
)
from moe_jax.models.decoder import Decoder
from moe_jax.models.execution import Execution
from moe_jax.models.forward import Carry, Entered, StageLayers, StageRouting, stage_layers
from moe_jax.train.batch import Batch
from moe_jax.train.objective import Objective
from moe_jax.train.on_devices import merged_model


class Forwarded(NamedTuple):
    """A micro-batch behind its last layer."""

    x: Float[Array, "batch seq hidden"]
    routings: list[StageRouting]
    """One for each stage with experts."""
    saved: list[SavedLayers]
    """One for each stage."""


class LossRun(NamedTuple):
    """The value of a micro-batch's objective, and the gradients with which its backward pass begins."""

    value: Float[Array, ""]
    aux: Any
    dx: Float[Array, "batch seq hidden"]
    """The gradient of `Forwarded.x`."""
    droutings: list[Any]
    """The gradients of `Forwarded.routings`."""
    gradients: nnx.State
    """The sums of gradients, with the gradients of norm, head and modules that predict further tokens added."""


@dataclass(frozen=True)
class MicroBatchPasses:
    """The passes of a micro-batch. Together they compute an objective's value and its gradients, as `jax.value_and_grad` does.

        forwarded = run_pass(passes.forward(batch))
        found = passes.loss(batch, forwarded, gradients)
        dx, gradients = run_pass(passes.backward(batch, forwarded.saved, found.dx, found.droutings, found.gradients))
        gradients = passes.embedding(batch["tokens"], dx, gradients)

    Attributes:
      objective: one that has `of_states`.
      graphdef, fixed, execution: as in `train.on_devices`.
      params: as the model reads them; on a mesh, what `ShardedParameters.enter` returns.
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
        """The number of loops of a forward or a backward pass."""
        return len(self.model().config.stages)

    @property
    def longest_stage(self) -> int:
        """The index of the stage that has the most layers with experts, or else the most layers."""
        stages = self.model().config.stages
        return max(range(len(stages)), key=lambda number: (stages[number].sparse, stages[number].num_layers))

    def zeros(self) -> nnx.State:
        """Returns sums of gradients before the first micro-batch, in f32 (f64 for f64)."""
        dtype = at_least_f32(self.model().dtype)
        return jax.tree.map(lambda w: vary_as(jnp.zeros(w.shape, dtype), w), self.params)

    def enter(self, batch: Batch) -> Entered:
        """Embeds the tokens, and builds what all layers read of them."""
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
            run: ForwardRun = yield forward_loop(*stage, carry)
            carry = run.x
            saved.append(run.saved)
            if run.y is not None:
                routings.append(run.y)
        return Forwarded(carry.x, routings, saved)

    def loss(self, batch: Batch, forwarded: Forwarded, gradients: nnx.State) -> LossRun:
        """Computes the objective behind the last layer, and its gradients, which it adds to `gradients`."""
        inputs = self.enter(batch).inputs

        def value(model: Decoder, x, routings):
            return self.objective.of_states(model, model.leave(inputs, Carry(x, None), routings), batch)

        return self.loss_of(value, forwarded.x, forwarded.routings, gradients)

    def loss_of(self, value: Callable[[Decoder, Any, Any], tuple[Array, Any]], x, routings, gradients: nnx.State) -> LossRun:
        """Computes value(model, x, routings) -> (scalar, aux) and the scalar's gradients; those of parameters are added."""
        of_stages, outside = self._split(self.params)

        def of_outside(outside: nnx.State, x, routings):
            return value(self.model(nnx.merge_state(of_stages, outside)), x, routings)

        found, pullback, aux = jax.vjp(of_outside, outside, x, routings, has_aux=True)
        own, dx, droutings = pullback(jnp.ones_like(found))
        of_stages, of_others = self._split(gradients)
        return LossRun(found, aux, dx, droutings, nnx.merge_state(of_stages, _add(of_others, own)))

    def backward(self, batch: Batch, saved: list[SavedLayers], dx, droutings: list[Any], gradients: nnx.State) -> Pass:
        """Runs all stages backwards; the result is (gradient of the embedded tokens, `gradients` with the stages' added)."""
        entered = self.enter(batch)
        carry, droutings = Carry(dx, None), list(droutings)
        stages = {}
        for number in reversed(range(self.num_stages)):
            layers, arrays = self._stage(number, entered, gradients)
            routing = droutings.pop() if self.model().config.stages[number].sparse else None
            sums = sums_of_loop(gradients["stages"][number], arrays)
            run: BackwardRun = yield backward_loop(layers, arrays, saved[number], carry, routing, sums)
            stages[number], carry = gradients_of_stage(run), run.dx
        return carry.x, nnx.merge_state(nnx.State({"stages": stages}), self._split(gradients)[1])

    def embedding(
        self, tokens: Int[Array, "batch seq"], dx: Float[Array, "batch seq hidden"], gradients: nnx.State
    ) -> nnx.State:
        """Adds the embedding table's gradient, summed over these tokens in f32, to `gradients`."""
        table, others = _split(self.params, lambda path: path[0] == "embed_tokens")
        in_f32 = jax.tree.map(lambda w: w.astype(at_least_f32(w.dtype)), table)

        def embed(table: nnx.State):
            model = self.model(nnx.merge_state(others, table))
            return model.embed_tokens(tokens, model.dtype)

        _, pullback = jax.vjp(embed, in_f32)
        of_table, of_others = _split(gradients, lambda path: path[0] == "embed_tokens")
        return nnx.merge_state(of_others, _add(of_table, pullback(dx)[0]))

    def model(self, params: nnx.State | None = None) -> Decoder:
        """Returns the model of these parameters; default: of `self.params`."""
        return merged_model(self.graphdef, self.params if params is None else params, self.fixed, self.execution)

    def _stage(self, number: int, entered: Entered, gradients: nnx.State) -> StageLayers:
        """Returns the layers of a stage; in place, with the sums of the experts' gradients as accumulators."""
        model = self.model()
        if self.in_place:
            add_expert_gradients_to(model, gradients)
        return stage_layers(model.stages[number], number, entered.inputs, entered.per_layer[number], self.execution)

    def _split(self, tree: nnx.State) -> tuple[nnx.State, nnx.State]:
        """Splits a tree of parameters into the stages of the passes, and everything else."""
        stages = self.num_stages
        return _split(tree, lambda path: path[0] == "stages" and path[1] < stages)


def sums_of_loop(gradients: nnx.State, arrays: LayerArrays) -> nnx.State:
    """Returns the sums of a stage's gradients to which the stage's backward loop adds."""
    # Accumulated matrices, and matrices with tickets, are no parameters of the loop.
    own = {path for path, _ in nnx.to_flat_state(arrays.parameters)}
    return nnx.filter_state(gradients, lambda path, _: path in own)


def gradients_of_stage(run: BackwardRun) -> nnx.State:
    """Returns the sums of a stage's gradients after its backward loop: the loop's sums, and those that its kernels added to."""
    return nnx.merge_state(run.parameters, accumulated_gradients(run.accumulators))


def _split(tree: nnx.State, is_first: Callable[[tuple], bool]) -> tuple[nnx.State, nnx.State]:
    """Splits a tree by the paths of its leaves."""
    first, others = nnx.split_state(tree, lambda path, _: is_first(path), ...)
    return first, others


def _add(sums: nnx.State, gradients: nnx.State) -> nnx.State:
    return jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, gradients)
