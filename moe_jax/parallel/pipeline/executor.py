"""Runs a pipeline in uniform ticks: in each tick every rank runs one chunk forward and one chunk backward, in one program.

Interleaved 1F1B (Narayanan et al., 2021, https://arxiv.org/abs/2104.04473) whose passes come in pairs. `ticks` says which chunk
and micro-batch a rank has in a tick. All ranks run the same operations: what a rank has none for is computed and not counted.
So no collective can wait for a rank that does not take part in it.

| tick of a step | forward pass | loss | backward pass |
|---|---|---|---|
| the first v p | yes | | |
| the middle | yes | of the micro-batch that the last rank finished one tick before | yes |
| the last v p | | as in the middle | yes |

Behind a tick the outputs go to the next rank, and the gradients to the rank before. Evaluation runs forward passes and losses
alone (`run_forward_ticks`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from moe_jax.kernels.varying import vary_as
from moe_jax.parallel.collectives.hops import hop
from moe_jax.parallel.pipeline.ticks import (
    TickPass,
    backward_at,
    forward_at,
    input_slots,
    num_passes,
    num_ticks,
    pass_number,
)


@dataclass(frozen=True)
class PipelinePasses:
    """Functions of arrays inside `jax.shard_map` that a pipeline runs.

    A `TickPass` says which chunk and micro-batch. If it does not exist, gradients and sums must not count it.
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
    loss: Callable[[Any, Any, Any], tuple[Any, Any]]
    """(micro-batch, what leaves the last layer on the last rank, totals) -> (its gradient, totals)."""
    leave: Callable[[TickPass, Any, Any], Any]
    """(pass, the gradient of what entered the first layer, totals) -> totals."""
    memory: jax.memory.Space = jax.memory.Space.Device
    """The memory of the slots. `forward` saves there, and `backward` gets arrays in the device's memory. In the host's memory a
    forward pass must save inputs alone: over inputs of zeros, a backward pass is finite."""


class Slot(NamedTuple):
    """The place where a forward pass saves, `slots[number]`."""

    slots: Any
    """Arrays like those that a pass saves, stacked."""
    number: Int[Array, ""]


@dataclass(frozen=True)
class ForwardPasses:
    """Functions of a pipeline without gradients; otherwise as in `PipelinePasses`."""

    enter: Callable[[Any], Any]
    """(micro-batch) -> what enters the first layer."""
    forward: Callable[[TickPass, Any], tuple[Any, Callable[[Any], Any]]]
    """(pass, what enters the chunk) -> (output, totals -> totals)."""
    loss: Callable[[Any, Any, Any], Any]
    """(micro-batch, what leaves the last layer on the last rank, totals) -> totals."""


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
    totals: Any


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

    def tick(has_forward: bool, has_backward: bool, t, state: _State) -> _State:
        ahead, back = (_or_first(at(t, rank, *sizes)) for at in (forward_at, backward_at))
        totals, running = state.totals, []
        if has_forward:
            entering = _entering(passes.enter, ahead, state.arriving)
            running.append(passes.forward(ahead, entering, Slot(state.slots, slot_of(ahead))))
        if has_backward:
            # The same on all ranks, so that the ranks agree whether there is a loss to compute.
            done = forward_at(t - 1, ranks - 1, *sizes)
            dy, totals = _loss(passes, done, done.chunk == chunks - 1, state, totals)
            dy = _where((rank == ranks - 1) & (back.chunk == chunks - 1), dy, state.returning)
            dy = _where(back.exists, dy, jax.tree.map(jnp.zeros_like, dy))
            saved = _take(state.slots, slot_of(back))
            if on_host:
                saved = jax.device_put(saved, jax.memory.Space.Device)
            running.append(passes.backward(back, saved, dy, totals))
        results = list(passes.run(*running))
        if has_forward:
            output, slots, count = results.pop(0)
            if not has_backward and not on_host:
                # A backward pass that does not exist reads what a forward pass over the same chunk and micro-batch saved.
                # With zeros in place of residuals, its gradients would be NaN, and not the zeros that add nothing.
                is_first = ahead.exists & (ahead.chunk == 0) & (ahead.micro_batch == 0)
                slots = lax.cond(is_first, lambda s, i: _put(s, _take(s, i), num_slots), lambda s, i: s, slots, slot_of(ahead))
            state = state._replace(arriving=jax.tree.map(lambda a: hop(a, "pipe", 1), output), finished=output, slots=slots)
        if has_backward:
            dx, totals = results.pop(0)
            totals = passes.leave(back._replace(exists=back.exists & (rank == 0) & (back.chunk == 0)), dx, totals)
            state = state._replace(returning=jax.tree.map(lambda a: hop(a, "pipe", -1), dx))
        return state._replace(totals=count(totals) if has_forward else totals)

    entering = passes.enter(jnp.zeros((), jnp.int32))
    first = TickPass(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), rank < 0)
    saved = jax.eval_shape(lambda x: passes.run(passes.forward(first, x, None))[0][1], entering)
    everywhere = (entering, rank, totals)
    zeros = vary_as(jax.tree.map(jnp.zeros_like, entering), everywhere)
    slots = _slots(num_slots, saved, everywhere, on_host=on_host)
    state = _State(zeros, zeros, zeros, slots, totals)
    forward_ends = num_passes(*sizes) + ranks - 1
    spans = (
        ((True, False), 0, ranks * chunks),
        ((True, True), ranks * chunks, forward_ends),
        ((False, True), forward_ends, num_ticks(*sizes)),
    )
    for kinds, begins, ends in spans:
        state = lax.fori_loop(begins, ends, partial(tick, *kinds), state)
    return state.totals


def _slots(number: int, saved: Any, everywhere: Any, *, on_host: bool) -> Any:
    """Returns empty slots for arrays like `saved`, and one more, which is zeros."""

    def zeros(*shape: int, dtype: Any) -> Array:
        return vary_as(jnp.zeros(shape, dtype), everywhere)

    if not on_host:
        return jax.tree.map(lambda s: zeros(number + 1, *s.shape, dtype=s.dtype), saved)

    def of_array(s) -> Array:
        # Zeros of all slots would be made in the device's memory first. Every other slot is written before it is read.
        slots = vary_as(lax.empty((number + 1, *s.shape), s.dtype), everywhere)
        slots, last = (jax.device_put(a, jax.memory.Space.Host) for a in (slots, zeros(*s.shape, dtype=s.dtype)))
        return lax.dynamic_update_index_in_dim(slots, last, number, 0)

    return jax.tree.map(of_array, saved)


def run_forward_ticks(passes: ForwardPasses, chunks: int, micro_batches: int, totals: Any) -> Any:
    """Runs the forward passes and the losses of all micro-batches; arguments and result as in `run_ticks`.

    If p divides m, this takes m v + p - 1 ticks of one chunk each, of which a rank needs m v.
    """
    ranks, rank = lax.axis_size("pipe"), lax.axis_index("pipe")
    sizes = ranks, chunks, micro_batches

    def tick(t, carry):
        arriving, totals = carry
        ahead, done = _or_first(forward_at(t, rank, *sizes)), forward_at(t, ranks - 1, *sizes)
        output, count = passes.forward(ahead, _entering(passes.enter, ahead, arriving))
        # The same on all ranks, so that the ranks agree whether there is a loss to compute.
        has_loss = done.exists & (done.chunk == chunks - 1)
        totals = lax.cond(has_loss, passes.loss, lambda i, finished, totals: totals, done.micro_batch, output, count(totals))
        return jax.tree.map(lambda a: hop(a, "pipe", 1), output), totals

    entering = passes.enter(jnp.zeros((), jnp.int32))
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
        dy, totals = passes.loss(done.micro_batch, finished, totals)
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


def _take(stacked, i):
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), stacked)


def _put(stacked, values, i):
    return jax.tree.map(lambda a, value: lax.dynamic_update_index_in_dim(a, value, i, 0), stacked, values)
