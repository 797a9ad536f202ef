"""Runs any pipeline schedule from its table, in one program: in uniform ticks, or with a branch for each rank.

`table` defines which passes every rank computes in a tick and which slots of memory it reads and writes. A tick is, in this
order:

1. the loss of each micro-batch that left the last stage in the previous tick, on all ranks together;
2. the passes: F, B, F and B in one loop, b, W, or none;
3. the hops: outputs go to the ranks of the next stages, gradients to the ranks of the previous stages.

In uniform ticks all ranks run the same passes, and mask missing ones. So no collective waits for a rank that does not
participate. With other schedules, and where `uniform-w` has both W and B, each rank runs its branch of a `lax.switch`. Ranks
are then in different branches at the same time. There only collectives with groups are legal, over mesh axes other than `pipe`:
`all_to_all`, `all_gather`, `psum`. All members of a group have the same position along `pipe`, so they run the same branch. A
`ppermute` has no groups: it would wait for ranks in another branch. Losses and hops are the same on all ranks and may use any
collective.

A schedule may need stages on other ranks than where `chunks.to_chunks` stores them, or on two ranks:

| schedule | stages of rank r | storage |
|---|---|---|
| uniform, 1f1b, interleaved, zb-h1 | r, p + r, ... | as wanted |
| dualpipe | r and p - 1 - r | the second on rank p - 1 - r |
| zb-v, dualpipe-v | r and 2 p - 1 - r | the second on rank p - 1 - r |

So one exchange between ranks r and p - 1 - r at each end of a step (`to_stages`, `from_stages`) is enough. Checkpoints and
optimizers are independent of the schedule.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jaxtyping import Array, Int

from moe_jax.kernels.shapes import vary_as
from moe_jax.parallel.collectives.hops import hop
from moe_jax.parallel.pipeline.schedules import Schedule
from moe_jax.parallel.pipeline.table import NO_PASS, Kinds, PassRow, Row, Table, TickSpan

OF_ALL_DEVICES = ("ppermute", "pbroadcast", "psend", "precv")
"""Primitives without groups, or their prefixes (as in `ppermute_start`)."""

WITH_GROUPS = ("psum", "pmax", "pmin", "all_gather", "all_to_all", "ragged_all_to_all", "reduce_scatter", "unreduced")
"""Primitives whose groups are along the axes that they name."""


@dataclass(frozen=True)
class PipelinePasses:
    """The callbacks that run one chunk's pass over one micro-batch, inside `jax.shard_map`. A `PassRow` names both."""

    enter: Callable[[Any], Any]
    """(micro-batch) -> the input of the first layer."""
    forward: Callable[[PassRow, Any, "Slot | None"], Any]
    """(pass, the chunk's input, the slot to save to) -> a pass for `run`."""
    backward: Callable[[PassRow, Any, Any, Any], Any]
    """(pass, residuals, dy, totals) -> a pass for `run`."""
    run: Callable[..., tuple]
    """Runs one pass, or a forward and a backward pass in one loop. A forward pass returns (output, saved, add_to_totals).
    `saved` is all slots, or the residuals if no slot was given. A backward pass returns (dx, totals)."""
    loss: Callable[[Any, int, Any, Any], tuple[Any, Any]]
    """(micro-batch, rank of the last layer, that layer's output, totals) -> (its gradient, totals). Without backward passes the
    gradient is None."""
    leave: Callable[[PassRow, Any, Any], Any]
    """(pass, dx, totals) -> totals, for a pass with `is_first`: stores the gradient of the first layer's input."""
    memory: jax.memory.Space = jax.memory.Space.Device
    """The memory of the slots. `forward` saves there, and `backward` gets arrays in the device's memory. In the host's memory a
    forward pass must save only inputs: with inputs of zeros, a backward pass is finite."""
    inputs_backward: Callable[[PassRow, Any, Any, Any], Any] | None = None
    """b, the first half of a backward pass, with the arguments of `backward`. It returns (dx, product, totals)."""
    weights_backward: Callable[[PassRow, Any, Any], Any] | None = None
    """(pass, the product of b, totals) -> W, the second half, for `run`; it returns totals. The product of a masked pass adds
    zeros."""


class Slot(NamedTuple):
    """The slot `slots[number]`, in which a forward pass saves its residuals."""

    slots: Any
    """The residuals of a pass, stacked over slots."""
    number: Int[Array, ""]


class _State(NamedTuple):
    """The state between two ticks. Stacked arrays are slots; the last slot of the first two kinds receives unused results."""

    output: Any
    """The output of the rank's last forward pass."""
    dx: Any
    """The gradient of the input of the rank's last backward pass. None without backward passes, like the next slots."""
    inputs: Any
    gradients: Any
    saved: Any
    products: Any
    totals: Any


def run_table(passes: PipelinePasses, table: Table, totals: Any) -> Any:
    """Runs one training step of a pipeline and returns the totals, inside `jax.shard_map` over `pipe`.

    Args:
      passes: the passes, whose results vary over the same mesh axes as their arguments. A table with b and W needs both halves.
      table: for the number of ranks along `pipe`.
      totals: arrays that the passes add to, of any structure.

    Raises:
      ValueError: a table for another number of ranks, or a pass with transfers that would hang (`checked_branch`).
    """
    if lax.axis_size("pipe") != (ranks := table.rows.branch.shape[1]):
        raise ValueError(f"the table is for {ranks} ranks; the mesh axis pipe has {lax.axis_size('pipe')}")
    columns, structure = jax.tree.flatten(table.rows)
    rows, rank = jnp.asarray(np.stack(columns, -1), jnp.int32), lax.axis_index("pipe")

    def row_at(t) -> Row:
        # One read for all columns: separate reads would each be a kernel.
        own = rows[t, rank]
        return jax.tree.unflatten(structure, [own[i].astype(column.dtype) for i, column in enumerate(columns)])

    def tick(span: TickSpan, branches: list[Callable], t, state: _State) -> _State:
        row, kinds = row_at(t), set(itertools.chain(*span.kinds))
        if span.has_losses:
            for losses, slot, last_rank in zip(table.losses, row.losses, table.last_ranks, strict=True):
                state = _with_loss(passes, jnp.asarray(losses)[t], last_rank, slot, state)
        state = branches[0](row, state) if len(branches) == 1 else lax.switch(row.branch, branches, row, state)
        inputs, gradients = state.inputs, state.gradients
        for distance, slot in zip(table.forward_hops, row.inputs, strict=True):
            inputs = put(inputs, _hop(state.output, distance), slot) if "F" in kinds else inputs
        for distance, slot in zip(table.backward_hops, row.gradients, strict=True):
            gradients = put(gradients, _hop(state.dx, distance), slot) if kinds & {"B", "b"} else gradients
        return state._replace(inputs=inputs, gradients=gradients)

    state = _first_state(passes, table, totals)
    for span in table.spans:
        branches = [_branch(passes, kinds, masked=len(span.kinds) == 1) for kinds in span.kinds]
        if len(branches) > 1:
            branches = [checked_branch(branch, row_at(0), state) for branch in branches]
        state = lax.fori_loop(span.begins, span.ends, partial(tick, span, branches), state)
    return state.totals


def _first_state(passes: PipelinePasses, table: Table, totals: Any) -> _State:
    kinds = table.kinds
    on_host = passes.memory == jax.memory.Space.Host
    entering = passes.enter(NO_PASS.micro_batch)

    def results(entering, totals):
        output, saved, _ = passes.run(passes.forward(NO_PASS, entering, None))[0]
        product = None
        if "b" in kinds:
            assert passes.inputs_backward is not None
            restored = jax.device_put(saved, jax.memory.Space.Device) if on_host else saved
            _, product, _ = passes.run(passes.inputs_backward(NO_PASS, restored, output, totals))[0]
        return (saved, product) if kinds & {"B", "b"} else (None, None)

    saved, product = jax.eval_shape(results, entering, totals)
    everywhere = (entering, lax.axis_index("pipe"), totals)
    zeros = vary_as(jax.tree.map(jnp.zeros_like, entering), everywhere)

    def slots(number: int, like):
        return vary_as(jax.tree.map(lambda a: jnp.zeros((number, *a.shape), a.dtype), like), everywhere)

    def unwritten(a) -> Array:
        # Every slot is written before it is read, except the last one of uniform ticks, which masked passes read.
        number = table.sizes["saved"]
        stack = vary_as(lax.empty((number, *a.shape), a.dtype), everywhere)
        last = vary_as(jnp.zeros(a.shape, a.dtype), everywhere)
        if on_host:
            stack, last = (jax.device_put(x, passes.memory) for x in (stack, last))
        return lax.dynamic_update_index_in_dim(stack, last, number - 1, 0)

    backward = zeros if kinds & {"B", "b"} else None
    return _State(
        output=zeros,
        dx=backward,
        inputs=slots(table.sizes["input"] + 1, entering),
        gradients=slots(table.sizes["gradient"] + 1, backward),
        saved=jax.tree.map(unwritten, saved),
        products=slots(table.sizes["product"], product),
        totals=totals,
    )


def _branch(passes: PipelinePasses, kinds: Kinds, *, masked: bool) -> Callable[[Row, _State], _State]:
    """Returns the passes of these kinds. Without `masked`, they exist on every rank that runs them."""
    on_host = passes.memory == jax.memory.Space.Host

    def at(of_row: PassRow) -> PassRow:
        return of_row if masked else of_row._replace(exists=jnp.ones((), bool))

    def forward(row: Row, state: _State):
        arrived = take(state.inputs, row.forward.arrived)
        x = _where(row.forward.is_first, passes.enter(row.forward.micro_batch), arrived)
        return passes.forward(at(row.forward), x, None if state.saved is None else Slot(state.saved, row.forward.saved))

    def backward(row: Row, state: _State):
        saved, dy = take(state.saved, row.backward.saved), take(state.gradients, row.backward.arrived)
        if masked:
            dy = _where(row.backward.exists, dy, jax.tree.map(jnp.zeros_like, dy))
        if on_host:
            saved = jax.device_put(saved, jax.memory.Space.Device)
        of_kind = passes.backward if "B" in kinds else passes.inputs_backward
        assert of_kind is not None
        return of_kind(at(row.backward), saved, dy, state.totals)

    def weights(row: Row, state: _State):
        assert passes.weights_backward is not None
        return passes.weights_backward(at(row.weights), take(state.products, row.weights.product), state.totals)

    begin = {"F": forward, "B": backward, "b": backward, "W": weights}

    def branch(row: Row, state: _State) -> _State:
        results = dict(zip(kinds, passes.run(*(begin[kind](row, state) for kind in kinds)), strict=True)) if kinds else {}
        if "W" in results:
            state = state._replace(totals=results["W"])
        for kind in results.keys() & {"B", "b"}:
            dx, *product, totals = results[kind]
            state = state._replace(dx=dx, totals=passes.leave(row.backward, dx, totals))
            if product:
                state = state._replace(products=put(state.products, product[0], row.backward.product))
        if "F" in results:
            output, saved, count = results["F"]
            state = state._replace(output=output, totals=count(state.totals))
            if state.saved is not None:
                is_alone = masked and kinds == ("F",) and not on_host
                state = state._replace(saved=_with_masked_slot(saved, row.forward) if is_alone else saved)
        return state

    return branch


def _with_masked_slot(saved: Any, first: PassRow) -> Any:
    """Copies the residuals of chunk 0 of micro-batch 0 into the last slot, which masked backward passes read.

    With zeros as residuals, their gradients would be NaN instead of zeros that add nothing.
    """
    last = len(jax.tree.leaves(saved)[0]) - 1
    is_first = first.exists & (first.chunk == 0) & (first.micro_batch == 0)
    return lax.cond(is_first, lambda s, i: put(s, take(s, i), last), lambda s, i: s, saved, first.saved)


def _with_loss(passes: PipelinePasses, micro_batch, last_rank: int, slot, state: _State) -> _State:
    """Computes the loss of a micro-batch that left the last stage, if any, and stores its gradient in a slot."""

    def compute(gradients, totals):
        dy, totals = passes.loss(micro_batch, last_rank, state.output, totals)
        return put(gradients, vary_as(dy, state.dx), slot), totals

    gradients, totals = lax.cond(micro_batch >= 0, compute, lambda *arrays: arrays, state.gradients, state.totals)
    return state._replace(gradients=gradients, totals=totals)


def _hop(arrays, distance: int):
    """Sends the largest array by itself, and the others of each dtype in one message, because each message has a fixed cost."""
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


def _where(condition, one, other):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def take(stacked: Any, i) -> Any:
    """Slices slot i from every array of a pytree."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), stacked)


def put(stacked: Any, values: Any, i) -> Any:
    """Returns the pytree of stacked arrays with slot i overwritten by `values`."""
    return jax.tree.map(lambda a, value: lax.dynamic_update_index_in_dim(a, value, i, 0), stacked, values)


def checked_branch(branch: Callable, *arguments) -> Callable:
    """Traces the function and checks that it can run in one rank's branch, inside `jax.shard_map`.

    Raises:
      ValueError: the function has a `ppermute`, or a collective over `pipe`.
    """
    traced, shapes = jax.make_jaxpr(branch, return_shape=True)(*arguments)
    for equation in _equations(traced.jaxpr):
        name = equation.primitive.name
        axes = equation.params.get("axes", equation.params.get("axis_name", ()))
        if name.startswith(OF_ALL_DEVICES):
            raise ValueError(
                f"a pass has the transfer {name} over {_text(axes)}, which waits for all devices, and ranks of the pipe are in "
                "different branches: use a transfer with groups, as all_to_all or all_gather, or uniform ticks"
            )
        if name.startswith(WITH_GROUPS) and "pipe" in ((axes,) if isinstance(axes, str) else axes):
            raise ValueError(
                f"a pass has the transfer {name} over pipe, whose ranks are in different branches: reduce outside the passes"
            )
    structure = jax.tree.structure(shapes)
    return lambda *arguments: jax.tree.unflatten(structure, core.jaxpr_as_fun(traced)(*jax.tree.leaves(arguments)))


def _equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Returns the equations of a program, and of the programs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, core.ClosedJaxpr):
                    yield from _equations(inner.jaxpr)
                elif isinstance(inner, core.Jaxpr):
                    yield from _equations(inner)


def _text(axes) -> str:
    return axes if isinstance(axes, str) else " and ".join(map(str, axes))


def sources(schedule: Schedule) -> list[tuple[int, tuple[int, ...]]]:
    """Returns, per chunk of the schedule, which stored chunk it is and which rank stores it."""
    ranks = len(schedule.stages)
    return [(stages[0] // ranks, tuple(stage % ranks for stage in stages)) for stages in zip(*schedule.stages, strict=True)]


def to_stages(stored: Any, schedule: Schedule) -> Any:
    """Exchanges stored layers between ranks so that each rank has the chunks that the schedule needs."""

    if _at_home(schedule):
        return stored

    def of_array(array: Array) -> Array:
        return jnp.stack([_send(array[chunk], ranks, back=False) for chunk, ranks in sources(schedule)])

    return jax.tree.map(of_array, stored)


def from_stages(gradients: Any, schedule: Schedule) -> Any:
    """Transposes `to_stages`: returns gradients to the storing ranks, and sums gradients of a stage on two ranks."""
    if _at_home(schedule):
        return gradients

    def of_array(array: Array) -> Array:
        places = sources(schedule)
        stored: list[Any] = [None] * (1 + max(chunk for chunk, _ in places))
        for part, (chunk, ranks) in zip(array, places, strict=True):
            home = _send(part, ranks, back=True)
            stored[chunk] = home if stored[chunk] is None else stored[chunk] + home
        return jnp.stack(stored)

    return jax.tree.map(of_array, gradients)


def layers_of_stages(stacked: Any, schedule: Schedule, num_layers: int, rank: Int[Array, ""]) -> Any:
    """Selects a rank's layers from arrays of all layers: [layers, ...] to [chunks x l, ...], l = `num_layers` per stage.

    Padding layers of the last stages are zeros.
    """
    stages = _stages_of(schedule, rank)

    def own(array: Array) -> Array:
        missing = schedule.num_stages * num_layers - array.shape[0]
        filled = jnp.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)])
        return filled.reshape(-1, num_layers, *array.shape[1:])[stages].reshape(-1, *array.shape[1:])

    return jax.tree.map(own, stacked)


def layers_of_all_stages(own: Any, schedule: Schedule, num_layers: int, rank: Int[Array, ""]) -> Any:
    """Expands a rank's arrays [chunks x l, ...] to all stages, [stages x l, ...], with zeros for other ranks' layers."""
    stages = _stages_of(schedule, rank)

    def placed(array: Array) -> Array:
        parts = array.reshape(-1, num_layers, *array.shape[1:])
        whole = vary_as(jnp.zeros((schedule.num_stages, *parts.shape[1:]), parts.dtype), (parts, stages))
        return whole.at[stages].add(parts).reshape(-1, *array.shape[1:])

    return jax.tree.map(placed, own)


def _at_home(schedule: Schedule) -> bool:
    """Returns True if each rank stores the stages of its own chunks, in order."""
    ranks = tuple(range(len(schedule.stages)))
    return sources(schedule) == [(chunk, ranks) for chunk in range(len(schedule.directions))]


def _stages_of(schedule: Schedule, rank: Int[Array, ""]) -> Int[Array, " chunks"]:
    return jnp.asarray(schedule.stages, jnp.int32)[rank]


def _send(array: Array, sources: tuple[int, ...], *, back: bool) -> Array:
    """Returns the array of rank `sources[rank]`; with `back`, of the rank that has this one as its source."""
    pairs = [(source, rank) for rank, source in enumerate(sources)]
    if all(source == rank for source, rank in pairs):
        return array
    return lax.ppermute(array, "pipe", [(rank, source) for source, rank in pairs] if back else pairs)
