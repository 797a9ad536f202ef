"""Runs any pipeline schedule from its table, in one program: each rank takes the branch of its slot in each tick.

`table` says what every rank computes in a tick and which slots of memory it reads and writes. A tick is, in this order:

1. the loss of each micro-batch that left the last stage one tick before, on all ranks together;
2. `lax.switch` over the kinds of slots: idle, F, B, F beside B in one loop, b, or W;
3. the hops: outputs go to the ranks of the next stages, gradients to those of the stages before.

Ranks are in different branches at the same time. Within a branch only collectives with groups are legal, over mesh axes other
than `pipe`: `all_to_all`, `all_gather`, `psum`. All members of a group have one place along `pipe`, so they take the same
branch. A `ppermute` has no groups: it would wait for ranks that are in another branch. Losses and hops are the same on all
ranks and may use any.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.kernels.shapes import vary_as
from moe_jax.parallel.collectives.hops import hop
from moe_jax.parallel.pipeline.branches import checked_branch
from moe_jax.parallel.pipeline.executor import PipelinePasses, Slot, put, take
from moe_jax.parallel.pipeline.table import Kinds, Row, Table
from moe_jax.parallel.pipeline.ticks import TickPass


class _State(NamedTuple):
    """The state between two ticks. Stacked arrays are slots; of the first two kinds the last takes what is not needed."""

    output: Any
    """The output of the rank's last forward pass."""
    dx: Any
    """The gradient of the input of the rank's last backward pass."""
    inputs: Any
    gradients: Any
    saved: Any
    products: Any
    totals: Any


def run_table(passes: PipelinePasses, table: Table, totals: Any) -> Any:
    """Runs all passes of a step and returns the totals, inside `jax.shard_map` over `pipe`.

    Args:
      passes: their results vary over the same mesh axes as their arguments. A table with b and W needs both halves.
      table: for as many ranks as `pipe` has.
      totals: arrays that the passes add to, of any structure.

    Raises:
      ValueError: a table for another number of ranks, or a pass with transfers that would hang (`checked_branch`).
    """
    if lax.axis_size("pipe") != (ranks := table.rows.kinds.shape[1]):
        raise ValueError(f"the table is for {ranks} ranks; the mesh axis pipe has {lax.axis_size('pipe')}")
    rank = lax.axis_index("pipe")
    first = _first_state(passes, table, totals)

    def row_at(t) -> Row:
        return jax.tree.map(lambda column: jnp.asarray(column)[t, rank], table.rows)

    branches = [checked_branch(_branch(passes, kinds), row_at(0), first) for kinds in table.kinds]

    def tick(t, state: _State) -> _State:
        row = row_at(t)
        for losses, slot, last_rank in zip(table.losses, row.losses, table.last_ranks, strict=True):
            state = _with_loss(passes, jnp.asarray(losses)[t], last_rank, slot, state)
        state = lax.switch(row.kinds, branches, row, state)
        inputs, gradients = state.inputs, state.gradients
        for distance, slot in zip(table.forward_hops, row.inputs, strict=True):
            inputs = put(inputs, _hop(state.output, distance), slot)
        for distance, slot in zip(table.backward_hops, row.gradients, strict=True):
            gradients = put(gradients, _hop(state.dx, distance), slot)
        return state._replace(inputs=inputs, gradients=gradients)

    return lax.fori_loop(0, table.num_ticks, tick, first).totals


def _first_state(passes: PipelinePasses, table: Table, totals: Any) -> _State:
    first = _pass(0, 0)
    entering = passes.enter(first.micro_batch)

    def results(entering, totals):
        output, saved, _ = passes.run(passes.forward(first, entering, None))[0]
        product = None
        if any("b" in kinds for kinds in table.kinds):
            assert passes.inputs_backward is not None
            _, product, _ = passes.run(passes.inputs_backward(first, saved, output, totals))[0]
        return saved, product

    saved, product = jax.eval_shape(results, entering, totals)
    everywhere = (entering, lax.axis_index("pipe"), totals)

    def slots(number: int, like):
        return vary_as(jax.tree.map(lambda a: jnp.zeros((number, *a.shape), a.dtype), like), everywhere)

    zeros = vary_as(jax.tree.map(jnp.zeros_like, entering), everywhere)
    return _State(
        output=zeros,
        dx=zeros,
        inputs=slots(table.sizes.inputs + 1, entering),
        gradients=slots(table.sizes.gradients + 1, entering),
        saved=slots(table.sizes.saved, saved),
        products=slots(table.sizes.products, product),
        totals=totals,
    )


def _branch(passes: PipelinePasses, kinds: Kinds) -> Callable[[Row, _State], _State]:
    """Returns the branch of slots of these kinds."""

    def forward(row: Row, state: _State):
        at = row.forward
        arrived = take(state.inputs, at.input)
        x = jax.tree.map(lambda a, b: jnp.where(at.is_first, a, b), passes.enter(at.micro_batch), arrived)
        return passes.forward(_pass(at.chunk, at.micro_batch), x, Slot(state.saved, jnp.asarray(at.saved)))

    def backward(row: Row, state: _State):
        at, of_kind = row.backward, passes.backward if "B" in kinds else passes.inputs_backward
        saved, dy = take(state.saved, at.saved), take(state.gradients, at.gradient)
        assert of_kind is not None
        return of_kind(_pass(at.chunk, at.micro_batch), saved, dy, state.totals)

    def branch(row: Row, state: _State) -> _State:
        if kinds == ("W",):
            assert passes.weights_backward is not None
            of_w = row.weights
            product = take(state.products, of_w.product)
            (totals,) = passes.run(passes.weights_backward(_pass(of_w.chunk, of_w.micro_batch), product, state.totals))
            return state._replace(totals=totals)
        starts = {"F": forward, "B": backward, "b": backward}
        results = dict(zip(kinds, passes.run(*(starts[kind](row, state) for kind in kinds)), strict=True)) if kinds else {}
        for kind in ("B", "b"):
            if kind in results:
                dx, *product, totals = results[kind]
                at = row.backward
                leaving = _pass(at.chunk, at.micro_batch)._replace(exists=at.is_first == 1)
                state = state._replace(dx=dx, totals=passes.leave(leaving, dx, totals))
                if product:
                    state = state._replace(products=put(state.products, product[0], at.product))
        if "F" in results:
            output, saved, count = results["F"]
            state = state._replace(output=output, saved=saved, totals=count(state.totals))
        return state

    return branch


def _with_loss(passes: PipelinePasses, micro_batch, last_rank: int, slot, state: _State) -> _State:
    """Computes the loss of a micro-batch that left the last stage, if one did, and puts its gradient into a slot."""

    def compute(gradients, totals):
        dy, totals = passes.loss(micro_batch, last_rank, state.output, totals)
        return put(gradients, vary_as(dy, state.dx), slot), totals

    gradients, totals = lax.cond(micro_batch >= 0, compute, lambda *arrays: arrays, state.gradients, state.totals)
    return state._replace(gradients=gradients, totals=totals)


def _pass(chunk, micro_batch) -> TickPass:
    return TickPass(jnp.asarray(chunk), jnp.asarray(micro_batch), jnp.ones((), bool))


def _hop(arrays, distance: int):
    """Sends the largest array by itself, and the others of each dtype in one message: a message has a cost of its own."""
    leaves, structure = jax.tree.flatten(arrays)
    largest = max(range(len(leaves)), key=lambda i: leaves[i].size)
    messages: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        messages.setdefault(None if i == largest else leaf.dtype, []).append(i)
    for places in messages.values():
        parts = [leaves[i] for i in places]
        arrived = hop(jnp.concatenate([part.reshape(-1) for part in parts]), "pipe", distance)
        ends = list(itertools.accumulate(part.size for part in parts))[:-1]
        for i, part, of_part in zip(places, parts, jnp.split(arrived, ends), strict=True):
            leaves[i] = of_part.reshape(part.shape)
    return jax.tree.unflatten(structure, leaves)
