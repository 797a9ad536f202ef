"""Loops and passes: a pass yields loops, which run alone, or joined with a loop of another pass.

Two loops in one program run in turn. Joined, a turn of both is one loop body, in which XLA overlaps the transfers of each pass
with the kernels of the other.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Int

Turn = Int[Array, ""] | int


class Loop(NamedTuple):
    """A pass over layers as loop pieces: `step` maps a state to the next, from `start`; `finish` extracts the result."""

    name: str
    """The scope of its operations in profiles and compiled programs."""
    turns: int
    start: Any
    step: Callable[[Turn, Any], Any]
    finish: Callable[[Any], Any]


def run_loops(*loops: Loop) -> tuple:
    """Fuses loops with equal numbers of iterations into one loop, and returns their results.

    Raises:
      ValueError: numbers of turns that differ.
    """
    turns = {loop.turns for loop in loops}
    if len(turns) != 1:
        raise ValueError(f"joined loops must have equal numbers of turns; got {', '.join(str(loop.turns) for loop in loops)}")
    (last,) = turns

    def step(carry):
        turn, states = carry
        after = []
        for loop, state in zip(loops, states, strict=True):
            with jax.named_scope(loop.name):
                after.append(loop.step(turn, state))
        return turn + 1, tuple(after)

    start = 0, tuple(loop.start for loop in loops)
    _, states = lax.while_loop(lambda carry: carry[0] < last, step, start)
    return tuple(loop.finish(state) for loop, state in zip(loops, states, strict=True))


Pass = Generator[Loop, Any, Any]
"""A pass over several stacks of layers: it yields a loop, is sent the loop's result, and at last returns its own."""


def run_pass(steps: Pass):
    """Runs the loops of a pass one after another; returns the result of the pass."""
    return _run_on(steps, None)


def run_joined(*passes: tuple[Pass, int]) -> tuple:
    """Runs several passes, fusing one loop of each into a single loop; returns each pass's result.

    Args:
      passes: pairs (pass, the number of its loops that run alone before the joint loop). Remaining loops run alone after it.
    """
    loops = []
    for steps, before in passes:
        loop = next(steps)
        for _ in range(before):
            loop = steps.send(run_loops(loop)[0])
        loops.append(loop)
    results = run_loops(*loops)
    return tuple(_run_on(steps, result) for (steps, _), result in zip(passes, results, strict=True))


def run_together(*passes: Pass) -> tuple:
    """Runs passes with equal numbers of loops, fusing loops of equal index; returns the passes' results.

    The scope of a loop ends with the number of its pass: forward_1, forward_2.
    """
    sent: Sequence[Any] = [None] * len(passes)
    results = list(sent)
    while True:
        loops = []
        for place, steps in enumerate(passes):
            try:
                loop = steps.send(sent[place])
                loops.append(loop._replace(name=f"{loop.name}_{place + 1}"))
            except StopIteration as stop:
                results[place] = stop.value
        if not loops:
            return tuple(results)
        sent = run_loops(*loops)


def _run_on(steps: Pass, sent):
    """Sends a loop's result to a pass and runs its remaining loops; returns the result of the pass."""
    try:
        while True:
            (sent,) = run_loops(steps.send(sent))
    except StopIteration as stop:
        return stop.value
