"""Gradients of a step whose layers lie in a pipeline: each rank along `pipe` runs its own layers on every micro-batch.

`parallel.pipeline.executor` orders the passes. The embedding and the head are whole on every rank. The last rank deals the
tokens of a micro-batch out to all ranks, and each computes the loss of its part. The sums that the router's losses need of all
layers travel with the tokens from rank to rank, and their gradients travel back.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from moe_jax.kernels.precision import at_least_f32
from moe_jax.kernels.varying import vary_as
from moe_jax.layers.passes import Chunk, Loop, backward_loop, forward_loop, run_loops
from moe_jax.layers.router_sums import RouterSums
from moe_jax.models.decoder import Decoder
from moe_jax.models.execution import Execution
from moe_jax.models.forward import Carry, Entered, StageLayers, StageRouting, stage_layers
from moe_jax.models.output import HiddenStates
from moe_jax.parallel.fsdp import ShardedParameters
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.pipeline.chunks import join_layers, layers_of_chunk, layers_of_rank
from moe_jax.parallel.pipeline.executor import PipelinePasses, run_ticks
from moe_jax.parallel.pipeline.ticks import TickPass
from moe_jax.parallel.zero1 import stacked_specs
from moe_jax.train.batch import Batch, batch_specs, micro_batches_of
from moe_jax.train.gradients import Gradients, GradientsFn, zeros_of
from moe_jax.train.objective import Objective
from moe_jax.train.on_devices import merged_model, spread_of
from moe_jax.train.overlap import check_objective
from moe_jax.train.state import as_f32


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

    Args:
      objective: one that has `of_states`, and whose value is a sum over tokens. It sees the tokens of a micro-batch in as many
        parts as there are ranks, along one axis.
      stack_over_data: as in `train.on_devices`.

    Raises:
      TypeError: an objective that works on batches alone.
      ValueError: at the first call, a model whose layers are not all alike, or parameters that lie otherwise.
    """
    check_objective(objective, "a pipeline")
    mesh, chunks = parallelism.mesh, parallelism.pipe_chunks

    def summed(params: nnx.State, fixed: nnx.State, batch: Batch) -> Gradients:
        stacked, scalars = micro_batches_of(batch, micro_batches)
        whole = merged_model(graphdef, params, fixed)
        _check_model(whole, mesh.shape["pipe"], chunks)
        sharded = ShardedParameters.of(
            params, mesh, dtype=whole.dtype, token_axes=parallelism.token_axes, hops=parallelism.hops
        )
        on_mesh = replace(execution, spread=spread_of(parallelism, sharded))

        def local(params: nnx.State, fixed: nnx.State, stacked: Batch, scalars: Batch):
            if stack_over_data:
                params = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
            entered, shapes = _join_chunks(sharded.enter(params))
            passes = _Passes(objective, graphdef, entered, fixed, on_mesh, chunks, stacked, scalars)
            totals = run_ticks(passes.of_pipeline(), chunks, micro_batches, passes.zeros())
            totals = passes.with_embedding(totals)
            gradients = sharded.leave(params, _split_chunks(totals.gradients, shapes))
            router = None
            if totals.router is not None:
                others = tuple(name for name in parallelism.token_axes if name != "pipe")
                split = jax.tree.map(lambda a: a.reshape(chunks, 1, -1, *a.shape[1:]), totals.router)
                router = lax.psum(split, others)
            if stack_over_data:
                gradients = jax.tree.map(lambda g: g[None], gradients)
            return totals.value, totals.aux, gradients, router

        of_gradients = stacked_specs(sharded.specs) if stack_over_data else sharded.specs
        rows = {
            name: PartitionSpec(None, *spec)
            for name, spec in batch_specs({name: x[0] for name, x in stacked.items()}, parallelism).items()
        }
        value, aux, gradients, router = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(sharded.specs, PartitionSpec(), rows, PartitionSpec()),
            out_specs=(PartitionSpec(), PartitionSpec(), of_gradients, PartitionSpec(None, "pipe")),
        )(params, fixed, stacked, scalars)
        if router is not None:
            num_layers = whole.config.num_hidden_layers
            devices = mesh.size // mesh.shape["pipe"]
            router = jax.tree.map(lambda a: join_layers(a, num_layers), router)
            aux = objective.with_layers(aux, router, devices)
        return Gradients(value, aux, as_f32(gradients))

    return summed


class _Moving(NamedTuple):
    """What goes from chunk to chunk; also its gradient, which goes the other way."""

    x: Float[Array, "batch seq hidden"]
    router: Any
    """The router's sums over the layers so far, one array for each float of `RouterSums`; None for dense layers."""
    counts: Any
    """The same of its integers, which have no gradient."""


class _Totals(NamedTuple):
    """Sums over the micro-batches, on a rank."""

    value: Float[Array, ""]
    aux: Any
    gradients: nnx.State
    embedded: Float[Array, "micro_batches_and_one batch seq hidden"]
    """The gradients of the embedded tokens; the last place takes what is not needed."""
    router: RouterSums | None
    """The sums of the rank's layers, stacked."""


@dataclass
class _Passes:
    """The passes of a rank. `params` has the rank's layers along one axis."""

    objective: Objective
    graphdef: nnx.GraphDef
    params: nnx.State
    fixed: nnx.State
    execution: Execution
    chunks: int
    stacked: Batch
    scalars: Batch
    saved_structure: Any = None
    """The structure of what the last traced forward pass saved."""

    def of_pipeline(self) -> PipelinePasses:
        return PipelinePasses(self.enter, self.forward, self.backward, self.run, self.loss, self.leave)

    def zeros(self) -> _Totals:
        """Returns the totals before the first micro-batch."""
        moving = self.enter(0)
        found = jax.eval_shape(lambda: self._value(0, moving, self._outside(self.params)))
        value, aux = zeros_of(found)
        dtype = at_least_f32(self.model().dtype)
        gradients = jax.tree.map(lambda w: self._vary(jnp.zeros(w.shape, dtype)), self.params)
        micro_batches = len(self.stacked["tokens"])
        embedded = self._vary(jnp.zeros((micro_batches + 1, *moving.x.shape), moving.x.dtype))
        router = None
        if (routing := self._routing) is not None:
            held = jax.tree.leaves(self.params["stages"])[0].shape[0]
            router = jax.tree.map(lambda a: self._vary(jnp.zeros((held, *a.shape[1:]), a.dtype)), routing.sums)
        return _Totals(value, aux, gradients, embedded, router)

    def enter(self, i) -> _Moving:
        """Embeds the tokens of a micro-batch."""
        x = self._vary(self._entered(self.model(), i).carry.x)
        if (routing := self._routing) is None:
            return _Moving(x, None, None)
        floats, counts = _parts(jax.tree.map(lambda a: self._vary(jnp.zeros(a.shape[1:], a.dtype)), routing.sums))
        return _Moving(x, floats, counts)

    def forward(self, of_tick: TickPass, moving: _Moving):
        """Returns a chunk's forward pass, and how its result is counted."""
        layers, arrays = self._stage(of_tick)
        chunk = self._chunk(of_tick)
        loop = forward_loop(layers, arrays, Carry(moving.x, None), chunk)

        def leaves(saved) -> list[Array]:
            # The pipeline keeps leaves, because two traces of a pullback are two tree structures with the same leaves.
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

            def count(totals: _Totals) -> _Totals:
                def add(a, part):
                    before = lax.dynamic_slice_in_dim(a, chunk.first, chunk.num_layers)
                    return lax.dynamic_update_slice_in_dim(a, before + part, chunk.first, 0)

                return totals._replace(router=jax.tree.map(add, totals.router, sums))

            return moved, leaves(run.saved), count

        return loop, finish

    def backward(self, of_tick: TickPass, saved, dy: _Moving, totals: _Totals):
        """Returns a chunk's backward pass, which adds to the sums of gradients."""
        layers, arrays = self._stage(of_tick)
        saved = jax.tree.unflatten(self.saved_structure, saved)
        sums = totals.gradients["stages"][0]
        routing = None
        if self._routing is not None:
            routing = jax.tree.unflatten(jax.tree.structure(self._routing), self._routing_gradients(dy.router))
        loop = backward_loop(layers, arrays, saved, Carry(dy.x, None), routing, sums, self._chunk(of_tick))

        def finish(run):
            gradients = nnx.merge_state(totals.gradients, nnx.State({"stages": {0: run.parameters}}))
            # The sums over layers are sums: their gradient is the same for all layers.
            return _Moving(run.dx.x, dy.router, dy.counts), totals._replace(gradients=gradients)

        return loop, finish

    def run(self, *passes: tuple[Loop, Any]) -> tuple:
        """Runs one pass, or two in one loop."""
        loops, finishes = zip(*passes, strict=True)
        return tuple(finish(result) for finish, result in zip(finishes, run_loops(*loops), strict=True))

    def loss(self, i, finished: _Moving, totals: _Totals) -> tuple[_Moving, _Totals]:
        """Computes the objective of a micro-batch, and its gradients."""
        outside = self._outside(self.params)

        def value(outside: nnx.State, x, router):
            return self._value(i, finished._replace(x=x, router=router), outside)

        found, pullback, aux = jax.vjp(value, outside, finished.x, finished.router, has_aux=True)
        gradients, dx, drouter = pullback(jnp.ones_like(found))
        before = totals.gradients
        added = jax.tree.map(lambda a, g: a + g.astype(a.dtype), self._outside(before), gradients)
        totals = totals._replace(
            value=totals.value + found,
            aux=jax.tree.map(jnp.add, totals.aux, aux),
            gradients=nnx.merge_state(before, added),
        )
        return _Moving(dx, drouter, jax.tree.map(jnp.zeros_like, finished.counts)), totals

    def leave(self, of_tick: TickPass, dx: _Moving, totals: _Totals) -> _Totals:
        """Keeps the gradients of a micro-batch's embedded tokens."""
        place = jnp.where(of_tick.exists, of_tick.micro_batch, len(totals.embedded) - 1)
        embedded = lax.dynamic_update_index_in_dim(totals.embedded, dx.x.astype(totals.embedded.dtype), place, 0)
        return totals._replace(embedded=embedded)

    def with_embedding(self, totals: _Totals) -> _Totals:
        """Adds the gradient of the embedding table, of the tokens of all micro-batches; on the first rank alone they count."""
        dx = totals.embedded[:-1]
        table = nnx.filter_state(self.params, lambda path, _: path[0] == "embed_tokens")
        in_f32 = jax.tree.map(lambda w: w.astype(at_least_f32(w.dtype)), table)
        tokens = self.stacked["tokens"]

        def embed(table: nnx.State):
            model = self.model(nnx.merge_state(self.params, table))
            return self._vary(model.embed_tokens(tokens.reshape(-1, tokens.shape[-1]), model.dtype))

        _, pullback = jax.vjp(embed, in_f32)
        (found,) = pullback(dx.reshape(-1, *dx.shape[2:]))
        before = nnx.filter_state(totals.gradients, lambda path, _: path[0] == "embed_tokens")
        added = jax.tree.map(lambda a, g: a + g.astype(a.dtype), before, found)
        return totals._replace(gradients=nnx.merge_state(totals.gradients, added))

    def model(self, params: nnx.State | None = None) -> Decoder:
        """Returns the model whose only stage is the rank's layers; `fixed` is whole and is cut where a stage is run."""
        return merged_model(self.graphdef, self.params if params is None else params, self.fixed, self.execution)

    @property
    def num_layers(self) -> int:
        """The model's layers, without those that fill up chunks."""
        return self.model().config.num_hidden_layers

    @cached_property
    def _routing(self) -> StageRouting | None:
        """The shapes of a chunk's routing; None for dense layers."""
        if self.model().config.experts is None:
            return None
        of_tick = TickPass(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.zeros((), bool))
        x = self._entered(self.model(), 0).carry.x

        def routing(x):
            layers, arrays = self._stage(of_tick)
            (run,) = run_loops(forward_loop(layers, arrays, Carry(self._vary(x), None), self._chunk(of_tick)))
            return run.y

        return jax.eval_shape(routing, x)

    def _routing_gradients(self, router) -> list:
        """Returns the gradients of a chunk's routing, leaf by leaf: those of the sums over layers, for each layer."""
        gradients = iter(jax.tree.leaves(router))
        leaves: list[Any] = []
        # The routing's only floats are those of its sums.
        for shape in jax.tree.leaves(self._routing):
            if jnp.issubdtype(shape.dtype, jnp.floating):
                gradient = jnp.broadcast_to(next(gradients), shape.shape)
                # A constant, as the sum within sequences of a loss without that term, is typed as the same on all devices.
                is_constant = not shape.manual_axis_type.varying
                leaves.append(jnp.zeros(shape.shape, shape.dtype) if is_constant else gradient)
            else:
                leaves.append(np.zeros(shape.shape, jax.dtypes.float0))
        return leaves

    def _entered(self, model: Decoder, i) -> Entered:
        batch = _micro_batch(self.stacked, i)
        return model.enter(
            batch["tokens"],
            batch["positions"],
            batch["segment_ids"],
            context=self.execution.spread.context,
            sequence_balance=self.objective.sequence_balance,
        )

    def _stage(self, of_tick: TickPass) -> StageLayers:
        """Returns the rank's layers for a micro-batch."""
        ranks, rank = lax.axis_size("pipe"), lax.axis_index("pipe")
        model = self.model()
        entered = self._entered(model, of_tick.micro_batch)
        (per_layer,) = entered.per_layer
        exists = jnp.ones(self.num_layers, bool)
        of_rank = layers_of_rank((per_layer._replace(exists=exists), self.fixed), ranks, self.chunks, rank)
        per_layer, fixed = self._vary(of_rank)
        per_layer = per_layer._replace(exists=per_layer.exists & of_tick.exists)
        model = merged_model(self.graphdef, self.params, fixed, self.execution)
        inputs = self._vary(entered.inputs)
        return stage_layers(model.stages[0], 0, inputs, per_layer, self.execution)

    def _chunk(self, of_tick: TickPass) -> Chunk:
        num_layers = layers_of_chunk(self.num_layers, lax.axis_size("pipe"), self.chunks)
        return Chunk(of_tick.chunk * num_layers, num_layers)

    def _value(self, i, finished: _Moving, outside: nnx.State) -> tuple[Float[Array, ""], Any]:
        """Computes the objective of the tokens that the last rank finished; every rank computes a part of them."""
        ranks, rank = lax.axis_size("pipe"), lax.axis_index("pipe")
        is_last = rank == ranks - 1
        model = self.model(nnx.merge_state(self.params, outside))
        batch = _micro_batch(self.stacked, i)
        inputs = self._entered(model, i).inputs
        dealt = _deal(jnp.where(is_last, finished.x, 0), ranks, batch_axes=2)
        own = lax.psum_scatter(dealt, "pipe", scatter_dimension=0, tiled=False)
        part = {name: _own_part(x, ranks, rank) for name, x in batch.items()}
        sums = self._router_sums(finished, is_last)
        counted = sums.with_counts(inputs.valid, inputs.sequences)
        counts: dict[str, Any] = dict(
            num_tokens=jnp.where(is_last, counted.num_tokens, 0), num_sequences=jnp.where(is_last, counted.num_sequences, 0)
        )
        router = self._vary(replace(counted, **counts))
        hidden = model.norm(own[None])
        states = HiddenStates(hidden, router, jnp.zeros((0, *part["tokens"].shape, 0), jnp.int32), None)
        return self.objective.of_states(model, states, part | self.scalars)

    def _router_sums(self, finished: _Moving, is_last) -> RouterSums:
        """Returns sums of as many layers as the model has, all in the first: losses need the sum over layers alone."""
        if self._routing is None:
            return self._vary(RouterSums.of_no_layer(1))
        joined = _joined(
            jax.tree.map(lambda a: jnp.where(is_last, a, 0), (finished.router, finished.counts)), self._routing.sums
        )
        return jax.tree.map(lambda a: jnp.pad(a[None], [(0, self.num_layers - 1), *[(0, 0)] * a.ndim]), joined)

    def _outside(self, tree: nnx.State) -> nnx.State:
        """Returns the parameters outside the layers."""
        return nnx.filter_state(tree, lambda path, _: path[0] != "stages")

    def _vary(self, arrays):
        """Casts arrays to vary over all mesh axes along which devices have tokens or layers of their own."""
        return vary_as(arrays, (self.params, self.stacked, lax.axis_index("pipe")))


def _micro_batch(stacked: Batch, i) -> Batch:
    return {name: lax.dynamic_index_in_dim(x, i, 0, keepdims=False) for name, x in stacked.items()}


def _deal(x: Array, ranks: int, batch_axes: int) -> Array:
    """Returns the tokens along one axis, in as many equal parts as there are ranks; the last is filled up with zeros."""
    tokens = x.reshape(-1, *x.shape[batch_axes:])
    missing = -len(tokens) % ranks
    return jnp.pad(tokens, [(0, missing), *[(0, 0)] * (tokens.ndim - 1)]).reshape(ranks, -1, *tokens.shape[1:])


def _own_part(x: Array, ranks: int, rank) -> Array:
    """Returns the rank's tokens of an array [batch, seq] as [1, tokens]."""
    return lax.dynamic_index_in_dim(_deal(x, ranks, batch_axes=2), rank, 0)


def _parts(sums: RouterSums) -> tuple[list[Array], list[Array]]:
    """Returns the floats and the integers of the sums."""
    leaves = jax.tree.leaves(sums)
    return [a for a in leaves if jnp.issubdtype(a.dtype, jnp.floating)], [
        a for a in leaves if not jnp.issubdtype(a.dtype, jnp.floating)
    ]


def _joined(parts: tuple[list[Array], list[Array]], like: RouterSums) -> RouterSums:
    """Inverse of `_parts`."""
    floats, counts = iter(parts[0]), iter(parts[1])
    leaves, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, [next(floats if jnp.issubdtype(a.dtype, jnp.floating) else counts) for a in leaves])


def _join_chunks(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Returns the rank's layers [chunks, 1, layers of a chunk, ...] along one axis, and the shapes that they had."""
    shapes = jax.tree.map(lambda a: a.shape, params)
    joined = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), params["stages"])
    return nnx.merge_state(params, nnx.State({"stages": joined})), shapes


def _split_chunks(gradients: nnx.State, shapes: nnx.State) -> nnx.State:
    return jax.tree.map(lambda g, shape: g.reshape(shape), gradients, shapes, is_leaf=lambda x: isinstance(x, tuple))


def _check_model(model: Decoder, ranks: int, chunks: int) -> None:
    config = model.config
    if len(config.stages) != 1 or config.mtp_stages:
        raise ValueError(
            "a pipeline needs layers that are all alike; this model has "
            f"{len(config.stages)} stages and {len(config.mtp_stages)} modules that predict further tokens"
        )
    wanted = (chunks, ranks, layers_of_chunk(config.num_hidden_layers, ranks, chunks))
    shape = jax.tree.leaves(nnx.state(model.stages[0], nnx.Param))[0].shape
    if shape[:3] != wanted:
        raise ValueError(
            f"the layers of a pipeline are stacked as {list(wanted)} (chunks, ranks, layers of a chunk); a parameter has shape "
            f"{list(shape)}: lay the parameters out with parallel.pipeline.chunks.to_chunks"
        )
