"""The passes of one rank of a pipeline: the functions that the executor of `parallel.pipeline` runs, for a model's layers and
an objective.

The embedding and the head are whole on every rank. The last rank distributes the tokens of a micro-batch to all ranks, and each
computes the loss of its part. MTP modules run with the loss, on whole rows: a rank without a row computes padding. The router's
sums over all layers travel with the tokens from rank to rank, and their gradients travel back.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.loops import Loop, run_loops
from moe_jax.layers.lora import Frozen
from moe_jax.layers.moe import add_expert_gradients_to, fp8_copies
from moe_jax.layers.passes import Chunk, SavedPlace, backward_loop, forward_loop
from moe_jax.layers.router_sums import RouterSums
from moe_jax.layers.tickets import defer_weight_gradients, inputs_backward, weights_backward
from moe_jax.models.decoder import Decoder
from moe_jax.models.execution import Execution
from moe_jax.models.forward import Carry, StageLayers, StageRouting, stage_layers
from moe_jax.models.output import HiddenStates
from moe_jax.parallel.pipeline.chunks import layers_of_chunk
from moe_jax.parallel.pipeline.executor import PipelinePasses, Slot, layers_of_all_stages, layers_of_stages
from moe_jax.parallel.pipeline.schedules import Schedule
from moe_jax.parallel.pipeline.table import NO_PASS, PassRow
from moe_jax.train.batch import Batch, micro_batch_at
from moe_jax.train.gradients import zeros_of
from moe_jax.train.micro_batch import LossRun, MicroBatchPasses, gradients_of_stage, sums_of_loop
from moe_jax.train.objective import Objective


class _Moving(NamedTuple):
    """The arrays that travel from chunk to chunk, or their gradients, which travel back."""

    x: Float[Array, "batch seq hidden"]
    router: Any
    """The floats of the router's sums over the layers so far (`_parts`); None for dense layers."""
    counts: Any
    """The integers of these sums, which have no gradient."""


class Totals(NamedTuple):
    """Sums over micro-batches on one pipeline rank: value, aux and gradients."""

    value: Float[Array, ""]
    aux: Any
    gradients: Any
    """The sums of gradients; None in evaluation, like `embedded`."""
    embedded: Any
    """The gradients of the pipeline's inputs, [micro_batches + 1, batch, seq, hidden]; the last row is a dummy slot."""
    router: RouterSums | None
    """The router's sums of the rank's layers, stacked."""


@dataclass
class RankPasses:
    """The passes of one pipeline rank. Parameters hold only this rank's layers; `fixed` is replicated."""

    micro: MicroBatchPasses
    """Embedding, loss and head of a micro-batch; the pipeline runs the layers itself."""
    schedule: Schedule
    """The schedule whose stages are the rank's chunks."""
    stacked: Batch
    scalars: Batch
    entering: Float[Array, "micro_batches batch seq hidden"] | None = None
    """The outputs of dense layers before the pipeline (`pipelined.Front`); None without such layers."""
    divided: bool = False
    """True if the layers' matrices have tickets (`layers.tickets`), which split backward passes into b and W."""
    copies: nnx.State = field(default_factory=lambda: nnx.State({}))
    """FP8 copies of the experts of the rank's layers (`fp8_copies_of_rank`); if empty, each pass makes its own."""
    saved_structure: Any = None
    """The tree structure of the residuals of the last traced forward pass."""

    def of_pipeline(self, *, divides: bool = False) -> PipelinePasses:
        """Returns the callbacks for the executor; with `divides`, backward passes are split into b and W.

        Recomputed layers need tickets only in b. Otherwise a forward pass must save the residuals of b, and a whole B is b
        followed by W.
        """
        remat = self.micro.execution.remat
        memory = jax.memory.Space.Host if remat == "offload" else jax.memory.Space.Device
        others = self.run, self.loss, self.leave, memory
        if not divides:
            return PipelinePasses(self.enter, self.forward, self.backward, *others)
        apart = replace(self, micro=replace(self.micro, in_place=False), divided=True)
        whole = self if remat else apart

        def inputs_backward(*arguments):
            apart.saved_structure = whole.saved_structure
            return apart.inputs_backward(*arguments)

        return PipelinePasses(self.enter, whole.forward, whole.backward, *others, inputs_backward, apart.weights_backward)

    def zeros(self) -> Totals:
        """Returns zero totals."""
        moving = self.enter(0)
        gradients = self.micro.zeros()
        found = jax.eval_shape(lambda: self.loss_run(0, lax.axis_size("pipe") - 1, moving, gradients)[0])
        value, aux = zeros_of((found.value, found.aux))
        embedded = self._vary(jnp.zeros((len(self.stacked["tokens"]) + 1, *moving.x.shape), moving.x.dtype))
        return Totals(value, aux, gradients, embedded, self.zeros_of_layers())

    def zeros_of_layers(self) -> RouterSums | None:
        """Returns zero router sums for the rank's layers; None for dense layers."""
        if (routing := self._routing) is None:
            return None
        matrices = nnx.state(self.micro.model().stages[self.stage], (nnx.Param, Frozen))
        held = jax.tree.leaves(matrices)[0].shape[0]
        return jax.tree.map(lambda a: self._vary(jnp.zeros((held, *a.shape[1:]), a.dtype)), routing.sums)

    def enter(self, i) -> _Moving:
        """Returns the pipeline's input for a micro-batch: embedded tokens, or outputs of the dense first layers."""
        x = self.micro.enter(micro_batch_at(self.stacked, i)).carry.x if self.entering is None else self.entering[i]
        x = self._vary(x)
        if (routing := self._routing) is None:
            return _Moving(x, None, None)
        floats, counts = _parts(jax.tree.map(lambda a: self._vary(jnp.zeros(a.shape[1:], a.dtype)), routing.sums))
        return _Moving(x, floats, counts)

    def forward(self, at: PassRow, moving: _Moving, slot: Slot | None = None):
        """Returns a chunk's forward pass, and the function that adds its result to the totals."""
        # The sums' values are not read forward. Zeros keep the sums out of the loop, which would copy them.
        layers, arrays = self._stage(at, self.micro.zeros())
        chunk = self._chunk(at)
        place = None
        if slot is not None:
            place = SavedPlace([a.reshape(-1, *a.shape[2:]) for a in slot.slots], slot.number * chunk.num_layers)
        loop = forward_loop(layers, arrays, Carry(moving.x, None), chunk, place)

        def leaves(saved) -> list[Array]:
            if slot is not None:
                return [a.reshape(-1, chunk.num_layers, *a.shape[1:]) for a in saved]
            # The pipeline keeps leaves, because two traces of a pullback have different tree structures with the same leaves.
            arrays, self.saved_structure = jax.tree.flatten(saved)
            return arrays

        def finish(run):
            if run.y is None:
                return _Moving(run.x.x, None, None), leaves(run.saved), lambda totals: totals
            exists = lax.dynamic_slice_in_dim(arrays.per_layer[0].exists, chunk.first, chunk.num_layers)

            def counted(a):
                return jnp.where(exists.reshape(-1, *[1] * (a.ndim - 1)), a, 0)

            sums = jax.tree.map(counted, run.y.sums)
            floats, counts = _parts(jax.tree.map(lambda a: a.sum(0), sums))
            moved = _Moving(run.x.x, *jax.tree.map(jnp.add, (moving.router, moving.counts), (floats, counts)))

            def count(totals):
                def add(a, part):
                    before = lax.dynamic_slice_in_dim(a, chunk.first, chunk.num_layers)
                    return lax.dynamic_update_slice_in_dim(a, before + part, chunk.first, 0)

                return totals._replace(router=jax.tree.map(add, totals.router, sums))

            return moved, leaves(run.saved), count

        return loop, finish

    def backward(self, at: PassRow, saved, dy: _Moving, totals: Totals):
        """Returns a chunk's backward pass, which adds to the gradient sums."""
        if not self.divided:
            return self._backward(backward_loop, lambda _, run: gradients_of_stage(run), at, saved, dy, totals)
        loop, finish = self.inputs_backward(at, saved, dy, totals)

        def finish_both(run):
            dx, product, totals = finish(run)
            return dx, self.run(self.weights_backward(at, product, totals))[0]

        return loop, finish_both

    def inputs_backward(self, at: PassRow, saved, dy: _Moving, totals: Totals):
        """Returns pass b of a chunk: gradients of inputs and vectors, and operands of matrix gradients."""
        loop, finish = self._backward(
            inputs_backward, lambda stage, run: nnx.merge_state(stage, run.parameters), at, saved, dy, totals
        )

        def finish_inputs(run):
            dx, totals = finish(run)
            return dx, run.accumulators, totals

        return loop, finish_inputs

    def weights_backward(self, at: PassRow, product, totals: Totals):
        """Returns pass W of a chunk, which adds the gradients of its matrices to the sums."""
        loop = weights_backward(product, self._of_stage(totals.gradients), self._chunk(at))
        return loop, partial(self._with_stage, totals)

    def _backward(self, loop_of: Callable, sums_after: Callable, at: PassRow, saved, dy: _Moving, totals: Totals):
        """Returns the loop `loop_of` of a chunk, and the function from its run to (gradient of the input, totals)."""
        layers, arrays = self._stage(at, totals.gradients)
        # The executor has already copied offloaded residuals back to the device.
        layers = layers._replace(remat=bool(layers.remat))
        saved = jax.tree.unflatten(self.saved_structure, saved)
        stage = self._of_stage(totals.gradients)
        sums = sums_of_loop(stage, arrays)
        loop = loop_of(layers, arrays, saved, Carry(dy.x, None), self._droutings(dy), sums, self._chunk(at))

        def finish(run):
            # The gradient of a sum over layers is the same for each layer.
            return _Moving(run.dx.x, dy.router, dy.counts), self._with_stage(totals, sums_after(stage, run))

        return loop, finish

    def _with_stage(self, totals: Totals, stage: nnx.State) -> Totals:
        """Returns the totals with new gradient sums for the rank's layers."""
        return totals._replace(gradients=nnx.merge_state(totals.gradients, nnx.State({"stages": {self.stage: stage}})))

    def run(self, *passes: tuple[Loop, Any]) -> tuple:
        """Runs one pass, or two passes fused in one loop."""
        loops, finishes = zip(*passes, strict=True)
        return tuple(finish(result) for finish, result in zip(finishes, run_loops(*loops), strict=True))

    def loss(self, i, last_rank: int, finished: _Moving, totals: Totals) -> tuple[_Moving, Totals]:
        """Computes the objective and gradients of a micro-batch that left the last rank."""
        found, dx, droutings = self.loss_run(i, last_rank, finished, totals.gradients)
        totals = totals._replace(
            value=totals.value + found.value, aux=jax.tree.map(jnp.add, totals.aux, found.aux), gradients=found.gradients
        )
        return _Moving(dx, droutings, jax.tree.map(jnp.zeros_like, finished.counts)), totals

    def loss_run(self, i, last_rank: int, finished: _Moving, gradients: nnx.State) -> LossRun:
        """Computes the objective of the tokens that left the last layer, on `last_rank`, and its gradients."""
        return self.micro.loss_of(self._objective_of(i, last_rank, finished), finished.x, finished.router, gradients)

    def value_of(self, i, finished: _Moving) -> tuple[Float[Array, ""], Any]:
        """Computes value and aux of a micro-batch that left the last rank, without gradients."""
        value = self._objective_of(i, lax.axis_size("pipe") - 1, finished)
        return value(self.micro.model(), finished.x, finished.router)

    def _objective_of(self, i, last_rank: int, finished: _Moving) -> Callable[[Decoder, Any, Any], tuple[Array, Any]]:
        """Returns the function (model, x, router) -> (value, aux), which every rank computes for its part of the tokens."""
        ranks, rank = lax.axis_size("pipe"), lax.axis_index("pipe")
        is_last = rank == last_rank
        batch = micro_batch_at(self.stacked, i)
        inputs = self.micro.enter(batch).inputs
        by_rows = bool(self.micro.model().config.mtp_stages)
        part = {name: lax.dynamic_index_in_dim(_deal(x, ranks, by_rows), rank, 0, False) for name, x in batch.items()}

        def value(model: Decoder, x, router) -> tuple[Float[Array, ""], Any]:
            own = lax.psum_scatter(_deal(jnp.where(is_last, x, 0), ranks, by_rows), "pipe", scatter_dimension=0, tiled=False)
            sums = self._router_sums(finished._replace(router=router), is_last).with_counts(inputs.valid, inputs.sequences)
            counts: dict[str, Any] = dict(
                num_tokens=jnp.where(is_last, sums.num_tokens, 0), num_sequences=jnp.where(is_last, sums.num_sequences, 0)
            )
            expert_ids = jnp.zeros((0, *part["tokens"].shape, 0), jnp.int32)
            states = HiddenStates(model.normed(own), self._vary(replace(sums, **counts)), expert_ids, None)
            return self.micro.objective.of_states(model, states, part | self.scalars)

        return value

    def leave(self, at: PassRow, dx: _Moving, totals: Totals) -> Totals:
        """Stores the gradient with respect to a micro-batch's embedded tokens."""
        place = jnp.where(at.is_first, at.micro_batch, len(totals.embedded) - 1)
        embedded = lax.dynamic_update_index_in_dim(totals.embedded, dx.x.astype(totals.embedded.dtype), place, 0)
        return totals._replace(embedded=embedded)

    def aux_of_layers(self, aux: Any, own: RouterSums | None) -> Any:
        """Returns aux with router statistics of all layers; `own` has the sums of the rank's layers."""
        if own is None:
            return aux
        spread = self.micro.execution.spread
        assert self._routing is not None
        router = self._routing.in_order(spread.sum(self._of_all_ranks(own)))
        devices = math.prod(map(lax.axis_size, spread.mesh_axes)) // lax.axis_size("pipe")
        return self.micro.objective.with_layers(aux, router, devices)

    @property
    def num_layers(self) -> int:
        """The number of layer-body repeats in the pipeline, without padding."""
        return self.micro.model().config.stages[self.stage].repeats

    @property
    def stage(self) -> int:
        """The index of the stage that the pipeline splits."""
        return self.micro.num_stages - 1

    @cached_property
    def _routing(self) -> StageRouting | None:
        """The shapes of a chunk's routing; None for dense layers."""
        if not self.micro.model().config.stages[self.stage].sparse:
            return None
        x = self.micro.enter(micro_batch_at(self.stacked, 0)).carry.x

        def routing(x):
            layers, arrays = self._stage(NO_PASS, self.micro.zeros())
            (run,) = run_loops(forward_loop(layers, arrays, Carry(self._vary(x), None), self._chunk(NO_PASS)))
            return run.y

        return jax.eval_shape(routing, x)

    def _droutings(self, dy: _Moving):
        """Returns the gradients of a chunk's routing: each layer's is the gradient of the sum; None for dense layers."""
        if self._routing is None:
            return None
        gradients = iter(jax.tree.leaves(dy.router))

        def of_leaf(shape) -> Any:
            # The routing's only floats are in its sums.
            if not jnp.issubdtype(shape.dtype, jnp.floating):
                return np.zeros(shape.shape, jax.dtypes.float0)
            gradient = jnp.broadcast_to(next(gradients), shape.shape)
            # A constant, as the sum within sequences of a loss without that term, is typed as the same on all devices.
            return gradient if shape.manual_axis_type.varying else jnp.zeros(shape.shape, shape.dtype)

        return jax.tree.map(of_leaf, self._routing)

    def _stage(self, at: PassRow, gradients: nnx.State) -> StageLayers:
        """Returns the rank's layers for a micro-batch; in place, with the sums of the experts' gradients as accumulators."""
        micro = self.micro
        entered = micro.enter(micro_batch_at(self.stacked, at.micro_batch))
        # Frozen weights are the rank's already; biases of experts have a row for every layer.
        fixed, others = nnx.split_state(
            micro.fixed, lambda path, leaf: path[:2] == ("stages", self.stage) and not isinstance(leaf, Frozen), ...
        )
        whole = entered.per_layer[self.stage]._replace(exists=jnp.ones(self.num_layers, bool)), fixed
        per_layer, fixed = self._vary(self._of_rank(whole))
        per_layer = per_layer._replace(exists=per_layer.exists & at.exists)
        stage = replace(micro, fixed=nnx.merge_state(fixed, others, self.copies)).model().stages[self.stage]
        if self.divided:
            defer_weight_gradients(stage, self._vary(entered.carry.x), micro.execution.spread, self.stage)
        elif micro.in_place:
            add_expert_gradients_to(stage, self._of_stage(gradients), in_stacks=True)
        return stage_layers(stage, self.stage, self._vary(entered.inputs), per_layer, micro.execution)

    def _of_stage(self, gradients: nnx.State) -> nnx.State:
        """Returns the gradients of the rank's layers; empty if adapters are only outside the layers."""
        return gradients.get("stages", {}).get(self.stage, nnx.State({}))

    def _chunk(self, at: PassRow) -> Chunk:
        return Chunk(at.chunk * self._layers_of_chunk, self._layers_of_chunk)

    @property
    def _layers_of_chunk(self) -> int:
        return layers_of_chunk(self.num_layers, 1, self.schedule.num_stages)

    def _of_rank(self, stacked):
        """Returns the rank's layers of arrays [layers, ...], in the order of the parameters."""
        return layers_of_stages(stacked, self.schedule, self._layers_of_chunk, lax.axis_index("pipe"))

    def _of_all_ranks(self, own):
        """Returns arrays of the rank's layers as [layers, ...], zeros for the layers of other ranks."""
        placed = layers_of_all_stages(own, self.schedule, self._layers_of_chunk, lax.axis_index("pipe"))
        return jax.tree.map(lambda a: a[: self.num_layers], placed)

    def _router_sums(self, finished: _Moving, is_last) -> RouterSums:
        """Returns sums shaped for all layers, with the total in the first one: losses need only the sum over layers."""
        if self._routing is None:
            return self._vary(RouterSums.of_no_layer(1))
        joined = _joined(*jax.tree.map(lambda a: jnp.where(is_last, a, 0), (finished.router, finished.counts)))
        padded = jax.tree.map(lambda a: jnp.pad(a[None], [(0, self.num_layers - 1), *[(0, 0)] * a.ndim]), joined)
        return self._routing.in_order(padded)

    def _vary(self, arrays):
        """Casts arrays to vary over all mesh axes along which devices have different tokens or layers."""
        return vary_as(arrays, (self.micro.params, self.stacked, lax.axis_index("pipe")))


def _deal(x: Array, ranks: int, by_rows: bool) -> Array:
    """Splits [batch, seq, ...] into parts for the ranks, zero-padded at the end.

    `by_rows`: [ranks, rows of a rank, seq, ...]; else [ranks, 1, tokens of a rank, ...].
    """
    parts = x if by_rows else x.reshape(-1, *x.shape[2:])
    missing = -len(parts) % ranks
    filled = jnp.pad(parts, [(0, missing), *[(0, 0)] * (parts.ndim - 1)])
    return filled.reshape(ranks, -1, *x.shape[1:]) if by_rows else filled.reshape(ranks, 1, -1, *x.shape[2:])


def _parts(sums: RouterSums) -> tuple[RouterSums, RouterSums]:
    """Returns the floats and the integers of the sums, each with None instead of the others."""

    def is_float(a) -> bool:
        return jnp.issubdtype(a.dtype, jnp.floating)

    floats = jax.tree.map(lambda a: a if is_float(a) else None, sums)
    return floats, jax.tree.map(lambda a: None if is_float(a) else a, sums)


def _joined(floats: RouterSums, counts: RouterSums) -> RouterSums:
    """Inverts `_parts`."""
    return jax.tree.map(lambda f, c: c if f is None else f, floats, counts, is_leaf=lambda a: a is None)


def passes_of_layers(
    objective: Objective, graphdef: nnx.GraphDef, params: nnx.State, fixed: nnx.State, execution: Execution, mesh: Mesh
) -> MicroBatchPasses:
    """Returns the micro-batch passes through this rank's layers only, stacked along one axis."""
    spread = execution.spread
    shadows = spread.expert is not None and spread.expert.shadow_experts > 0
    # If experts are trained, and whole on their device, kernels read weights inside the stack, and add to their sums there.
    frozen = bool(jax.tree.leaves(nnx.split_state(fixed, Frozen, ...)[0]))
    in_place = not frozen and not shadows and all(mesh.shape[axis] == 1 for axis in ("fsdp", "context"))
    return MicroBatchPasses(objective, graphdef, params, fixed, execution, in_place)


def fp8_copies_of_rank(micro: MicroBatchPasses, mesh: Mesh) -> nnx.State:
    """Returns FP8 copies of the experts in this rank's layers, made once per step.

    Empty if experts compute in the model's dtype, or a mesh splits the weights inside the rank.
    """
    if any(size > 1 for axis, size in mesh.shape.items() if axis not in ("data", "pipe")):
        return nnx.State({})
    number = micro.num_stages - 1
    return nnx.State({"stages": {number: fp8_copies(micro.model().stages[number], on_one_device=True)}})
