"""Runs a pipeline in uniform ticks: in each tick every rank runs one chunk forward and one chunk backward, in one program.

Interleaved 1F1B (Narayanan et al., 2021, https://arxiv.org/abs/2104.04473) whose passes come in pairs. `ticks` says which chunk
and micro-batch a rank has in a tick. All ranks run the same operations: what a rank has none for is computed and not counted.
So no collective can wait for a rank that does not take part in it.

| tick of a step | forward pass | loss | backward pass |
|---|---|---|---|
| the first v p | yes | | |
| the middle | yes | of the micro-batch that the last rank finished one tick before | yes |
| the last v p | | as in the middle | yes |

With W put off (`PutOff`) the first p - 1 ticks with a backward pass compute the gradients of inputs alone. In the last p - 1
ticks a rank that has no backward pass computes the gradients of weights that it put off.

Behind a tick the outputs go to the next rank, and the gradients to the rank before. Evaluation runs forward passes and losses
alone (`run_forward_ticks`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from moe_jax.kernels.shapes import vary_as
from moe_jax.parallel.collectives.hops import hop
from moe_jax.parallel.pipeline.branches import checked_branch
from moe_jax.parallel.pipeline.ticks import (
    TickPass,
    backward_at,
    first_backward,
    forward_at,
    input_slots,
    num_passes,
    num_ticks,
    pass_number,
    weights_at,
    weights_number,
)


@dataclass(frozen=True)
class PipelinePasses:
    """Functions of arrays inside `jax.shard_map` that a pipeline runs, in uniform ticks or from a table.

    A `TickPass` says which chunk and micro-batch. If it does not exist, gradients and sums must not count it. From a table,
    passes always exist, but for `leave`.
    """

    enter: Callable[[Any], Any]
    """(micro-batch) -> what enters the first layer."""
    forward: Callable[[TickPass, Any, "Slot | None"], Any]
    """(pass, what enters the chunk, where to save) -> a pass that `run` runs."""
    backward: Callable[[TickPass, Any, Any, Any], Any]
    """(pass, what the forward pass saved, the gradient of the chunk's output, totals) -> a pass that `run` runs."""
    run: Callable[..., tuple]
    """Runs one pass, or a forward and a backward pass in one loop. Forward gives (output, all slots, totals -> totals); without
    a slot, what it saved takes the place of the slots. Backward gives (the gradient of the input, totals)."""
    loss: Callable[[Any, int, Any, Any], tuple[Any, Any]]
    """(micro-batch, rank of the last layer, what leaves that layer, totals) -> (its gradient, totals)."""
    leave: Callable[[TickPass, Any, Any], Any]
    """(pass, the gradient of what entered the first layer, totals) -> totals."""
    memory: jax.memory.Space = jax.memory.Space.Device
    """The memory of the slots. `forward` saves there, and `backward` gets arrays in the device's memory. In the host's memory a
    forward pass must save inputs alone: over inputs of zeros, a backward pass is finite."""
    inputs_backward: Callable[[TickPass, Any, Any, Any], Any] | None = None
    """b, the first half of a backward pass, with the arguments of `backward`. It returns (the gradient of the input, product,
    totals). Uniform ticks with both halves put W off. Then no pass may have a transfer that waits for all devices."""
    weights_backward: Callable[[TickPass, Any, Any], Any] | None = None
    """(pass, the product of b, totals) -> W, the second half, which `run` runs; it returns totals. The product of a pass that
    does not exist adds zeros."""


class Slot(NamedTuple):
    """The place where a forward pass saves, `slots[number]`."""

    slots: Any
    """Arrays like those that a pass saves, stacked."""
    number: Int[Array, ""]


class _State(NamedTuple):
    """The state between two ticks."""

    arriving: Any
    """The input of this tick's forward pass, from the rank before."""
    returning: Any
    """The gradient of the output of this tick's backward pass, from the next rank."""
    finished: Any
    """The output of the rank's forward pass one tick before."""
    slots: Any
    """Arrays that forward passes saved, stacked. The last slot is for passes that do not exist: chunk 0 of micro-batch 0."""
    products: Any
    """The products of a rank's first p - 1 backward passes, stacked, if W is put off; else None."""
    totals: Any


class _Span(NamedTuple):
    """Consecutive ticks of one kind."""

    has_forward: bool
    backward: Literal["", "B", "b", "B or W"]
    begins: int
    ends: int


def run_ticks(passes: PipelinePasses, chunks: int, micro_batches: int, totals: Any) -> Any:
    """Runs all passes of a step and returns the totals, inside `jax.shard_map` over `pipe`.

    Args:
      passes: their results vary over the same mesh axes as their arguments.
      chunks: of each rank.
      totals: arrays that the passes add to, of any structure.
    """
    ranks, rank = lax.axis_size("pipe"), lax.axis_index("pipe")
    sizes = ranks, chunks, micro_batches
    table = np.asarray(input_slots(*sizes), np.int32)
    num_slots = int(table.max()) + 1
    on_host = passes.memory == jax.memory.Space.Host

    def slot_of(of_tick: TickPass):
        """Returns where the inputs of a pass are kept."""
        number = pass_number(of_tick.chunk, of_tick.micro_batch, ranks, chunks)
        return jnp.where(of_tick.exists, jnp.asarray(table)[number], num_slots)

    def tick(span: _Span, t, state: _State) -> _State:
        has_forward, has_backward = span.has_forward, bool(span.backward)
        ahead, back = (_or_first(at(t, rank, *sizes)) for at in (forward_at, backward_at))
        totals, running = state.totals, []
        if has_forward:
            entering = _entering(passes.enter, ahead, state.arriving)
            running.append(passes.forward(ahead, entering, Slot(state.slots, slot_of(ahead))))
        if has_backward:
            dy = state.returning
            # The last ticks come after all losses.
            if span.backward != "B or W":
                # The same on all ranks, so that the ranks agree whether there is a loss to compute.
                done = forward_at(t - 1, ranks - 1, *sizes)
                of_loss, totals = _loss(passes, done, done.chunk == chunks - 1, state, totals)
                dy = _where((rank == ranks - 1) & (back.chunk == chunks - 1), of_loss, dy)
            dy = _where(back.exists, dy, jax.tree.map(jnp.zeros_like, dy))
            saved = take(state.slots, slot_of(back))
            if on_host:
                saved = jax.device_put(saved, jax.memory.Space.Device)
            if span.backward != "B or W":
                of_span = passes.inputs_backward if span.backward == "b" else passes.backward
                assert of_span is not None
                running.append(of_span(back, saved, dy, totals))
        if span.backward == "B or W":
            results: list[tuple] = [_backward_or_weights(passes, t, sizes, (saved, dy, state.products, totals))]
        else:
            results = list(passes.run(*running))
        if has_forward:
            output, slots, count = results.pop(0)
            if not has_backward and not on_host:
                # A backward pass that does not exist reads what a forward pass over the same chunk and micro-batch saved.
                # With zeros in place of residuals, its gradients would be NaN, and not the zeros that add nothing.
                is_first = ahead.exists & (ahead.chunk == 0) & (ahead.micro_batch == 0)
                slots = lax.cond(is_first, lambda s, i: put(s, take(s, i), num_slots), lambda s, i: s, slots, slot_of(ahead))
            state = state._replace(arriving=jax.tree.map(lambda a: hop(a, "pipe", 1), output), finished=output, slots=slots)
        if has_backward:
            dx, *product, totals = results.pop(0)
            if product:
                # A rank's first passes that exist write over what passes before them wrote into place 0.
                place = jnp.maximum(t - first_backward(rank, ranks, chunks), 0)
                state = state._replace(products=put(state.products, product[0], place))
            totals = passes.leave(back._replace(exists=back.exists & (rank == 0) & (back.chunk == 0)), dx, totals)
            state = state._replace(returning=jax.tree.map(lambda a: hop(a, "pipe", -1), dx))
        return state._replace(totals=count(totals) if has_forward else totals)

    entering = passes.enter(jnp.zeros((), jnp.int32))
    first = TickPass(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), rank < 0)
    saved = jax.eval_shape(lambda x: passes.run(passes.forward(first, x, None))[0][1], entering)
    puts_off = passes.weights_backward is not None and ranks > 1
    everywhere = (entering, rank, totals)
    zeros = vary_as(jax.tree.map(jnp.zeros_like, entering), everywhere)
    slots = _slots(num_slots, saved, everywhere, on_host=on_host)
    products = _products(passes, first, saved, zeros, totals, everywhere) if puts_off else None
    state = _State(zeros, zeros, zeros, slots, products, totals)
    for span in _spans(*sizes, puts_off=puts_off):
        state = lax.fori_loop(span.begins, span.ends, partial(tick, span), state)
    return state.totals


def _spans(ranks: int, chunks: int, micro_batches: int, *, puts_off: bool) -> Iterator[_Span]:
    """Yields the ticks of a step by their kind."""
    sizes = ranks, chunks, micro_batches
    ends, put_off = num_passes(*sizes) + ranks - 1, ranks - 1 if puts_off else 0
    begins = ranks * chunks
    yield _Span(True, "", 0, begins)
    if put_off:
        yield _Span(True, "b", begins, begins + put_off)
    yield _Span(True, "B", begins + put_off, ends)
    yield _Span(False, "B", ends, num_ticks(*sizes) - put_off)
    if put_off:
        yield _Span(False, "B or W", num_ticks(*sizes) - put_off, num_ticks(*sizes))


def _products(passes: PipelinePasses, first: TickPass, saved: Any, zeros: Any, totals: Any, everywhere: Any) -> Any:
    """Returns places for the products of p - 1 backward passes."""
    b = passes.inputs_backward
    assert b is not None
    restored = jax.tree.map(lambda s: vary_as(jnp.zeros(s.shape, s.dtype), everywhere), saved)
    like = jax.eval_shape(lambda *arrays: passes.run(b(first, *arrays))[0][1], restored, zeros, totals)
    places = lax.axis_size("pipe") - 1
    return jax.tree.map(lambda s: vary_as(jnp.zeros((places, *s.shape), s.dtype), everywhere), like)


def _backward_or_weights(passes: PipelinePasses, t, sizes: tuple[int, int, int], arrays: tuple) -> tuple[Any, Any]:
    """Computes the rank's backward pass, or W of one that was put off. Returns the gradient of the input, and totals.

    Args:
      arrays: what the backward pass reads, the gradient of its output, the products that wait, and totals.
    """
    rank = lax.axis_index("pipe")
    number = weights_number(t, rank, *sizes)

    def backward(t, rank, saved, dy, products, totals):
        back = _or_first(backward_at(t, rank, *sizes))
        return passes.run(passes.backward(back, saved, dy, totals))[0]

    def weights(t, rank, saved, dy, products, totals):
        assert passes.weights_backward is not None
        product = take(products, weights_number(t, rank, *sizes))
        of_product = _or_first(weights_at(t, rank, *sizes))
        (totals,) = passes.run(passes.weights_backward(of_product, product, totals))
        return vary_as(jax.tree.map(jnp.zeros_like, dy), dy), totals

    arguments = (t, rank, *arrays)
    branches = [checked_branch(branch, *arguments) for branch in (weights, backward)]
    return lax.cond(number >= 0, *branches, *arguments)


def _slots(number: int, saved: Any, everywhere: Any, *, on_host: bool) -> Any:
    """Returns slots for arrays like `saved`, and one more, which is zeros. Every other slot is written before it is read."""

    def of_array(s) -> Array:
        slots = vary_as(lax.empty((number + 1, *s.shape), s.dtype), everywhere)
        last = vary_as(jnp.zeros(s.shape, s.dtype), everywhere)
        if on_host:
            slots, last = (jax.device_put(a, jax.memory.Space.Host) for a in (slots, last))
        return lax.dynamic_update_index_in_dim(slots, last, number, 0)

    return jax.tree.map(of_array, saved)


def run_forward_ticks(
    enter: Callable[[Any], Any], forward: Callable, loss: Callable, chunks: int, micro_batches: int, totals: Any
) -> Any:
    """Runs the forward passes and the losses of all micro-batches; other arguments and result as in `run_ticks`.

    If p divides m, this takes m v + p - 1 ticks of one chunk each, of which a rank needs m v.

    Args:
      forward: (pass, what enters the chunk) -> (output, totals -> totals).
      loss: (micro-batch, what leaves the last layer on the last rank, totals) -> totals.
    """
    ranks, rank = lax.axis_size("pipe"), lax.axis_index("pipe")
    sizes = ranks, chunks, micro_batches

    def tick(t, carry):
        arriving, totals = carry
        ahead, done = _or_first(forward_at(t, rank, *sizes)), forward_at(t, ranks - 1, *sizes)
        output, count = forward(ahead, _entering(enter, ahead, arriving))
        # The same on all ranks, so that the ranks agree whether there is a loss to compute.
        has_loss = done.exists & (done.chunk == chunks - 1)
        totals = lax.cond(has_loss, loss, lambda i, finished, totals: totals, done.micro_batch, output, count(totals))
        return jax.tree.map(lambda a: hop(a, "pipe", 1), output), totals

    entering = enter(jnp.zeros((), jnp.int32))
    zeros = vary_as(jax.tree.map(jnp.zeros_like, entering), (entering, rank, totals))
    ticks = pass_number(chunks - 1, micro_batches - 1, ranks, chunks) + ranks
    return lax.fori_loop(0, ticks, tick, (zeros, totals))[1]


def _entering(enter: Callable[[Any], Any], ahead: TickPass, arriving: Any) -> Any:
    """Returns what enters a chunk: from the rank before, or from outside into the first chunk of all."""
    is_first = (lax.axis_index("pipe") == 0) & (ahead.chunk == 0)
    return _where(is_first, enter(ahead.micro_batch), arriving)


def _loss(passes: PipelinePasses, done: TickPass, of_last_chunk, state: _State, totals: Any) -> tuple[Any, Any]:
    """Computes the loss of the micro-batch that left the last layer, if one did; returns its gradient and the totals."""

    def compute(finished, totals):
        dy, totals = passes.loss(done.micro_batch, lax.axis_size("pipe") - 1, finished, totals)
        return vary_as(dy, state.returning), totals

    def skip(finished, totals):
        return jax.tree.map(jnp.zeros_like, finished), totals

    return lax.cond(done.exists & of_last_chunk, compute, skip, state.finished, totals)


def _or_first(of_tick: TickPass) -> TickPass:
    """Returns the pass; chunk 0 of micro-batch 0 in place of one that does not exist."""
    return of_tick._replace(
        chunk=jnp.where(of_tick.exists, of_tick.chunk, 0), micro_batch=jnp.where(of_tick.exists, of_tick.micro_batch, 0)
    )


def _where(condition, one, other):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def take(stacked: Any, i) -> Any:
    """Returns slot i of stacked arrays."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), stacked)


def put(stacked: Any, values: Any, i) -> Any:
    """Returns the stacked arrays with other values in slot i."""
    return jax.tree.map(lambda a, value: lax.dynamic_update_index_in_dim(a, value, i, 0), stacked, values)
