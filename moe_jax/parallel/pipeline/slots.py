"""Slots of memory for a schedule in lockstep ticks: where each array lies until its last use.

| kind of slot | written | read by |
|---|---|---|
| input | behind the tick of F of the stage before | F |
| gradient | behind the tick of the next stage's backward pass; for the last stage by the loss, a tick after its F | B or b |
| saved | by F | B or b |
| product | by b | W |

Arrays that are needed in the same tick never share a slot. The lowest free slot is taken (greedy colouring of intervals), so
that a rank has as many as it needs at once. Nothing here imports JAX.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from moe_jax.parallel.pipeline.schedules import Result, Schedule

SlotKind = Literal["input", "gradient", "saved", "product"]


class Kept(NamedTuple):
    """An array that a stage keeps for a micro-batch."""

    kind: SlotKind
    direction: int
    stage: int
    micro_batch: int


class Sizes(NamedTuple):
    """The number of slots of each kind, of the rank that needs most."""

    inputs: int
    gradients: int
    saved: int
    products: int


class Slots(NamedTuple):
    """The slot of each array on its rank, and the numbers of slots."""

    of: Mapping[Kept, int]
    sizes: Sizes


def allocate(schedule: Schedule, when: Mapping[Result, int]) -> Slots:
    """Returns the slots of a schedule whose results are computed in the ticks `when`."""
    of: dict[Kept, int] = {}
    counts: dict[SlotKind, int] = {"input": 0, "gradient": 0, "saved": 0, "product": 0}
    for chunks in schedule.stages:
        intervals = [interval for chunk, stage in enumerate(chunks) for interval in _intervals(schedule, when, chunk, stage)]
        for kind in counts:
            used = _colour((interval for interval in intervals if interval.array.kind == kind), of)
            counts[kind] = max(counts[kind], used)
    return Slots(of, Sizes(*counts.values()))


class _Interval(NamedTuple):
    """The ticks in which an array holds a slot, both ends included."""

    begin: int
    end: int
    array: Kept


def _intervals(schedule: Schedule, when: Mapping[Result, int], chunk: int, stage: int) -> Iterator[_Interval]:
    """Returns the intervals of a chunk's arrays.

    An array that arrives between ticks k and k + 1 holds its slot from k on, and not in the tick of its reader: what arrives
    behind that tick may take the place. What is written and read within ticks holds its slot in both.
    """
    direction, is_last = schedule.directions[chunk], stage == schedule.num_stages - 1
    for micro_batch in range(schedule.micro_batches):
        place = direction, stage, micro_batch
        f, b, w = (when[Result(kind, *place)] for kind in ("F", "b", "W"))
        if stage:
            yield _Interval(when[Result("F", direction, stage - 1, micro_batch)], f - 1, Kept("input", *place))
        arrives = f if is_last else when[Result("b", direction, stage + 1, micro_batch)]
        yield _Interval(arrives, b - 1, Kept("gradient", *place))
        yield _Interval(f, b, Kept("saved", *place))
        if w > b:
            yield _Interval(b, w, Kept("product", *place))


def _colour(intervals: Iterable[_Interval], slots: dict[Kept, int]) -> int:
    """Gives each array the lowest slot that is free, in `slots`; returns the number of slots."""
    free: list[int] = []
    held: list[tuple[int, int]] = []
    used = 0
    for begin, end, array in sorted(intervals):
        while held and held[0][0] < begin:
            heapq.heappush(free, heapq.heappop(held)[1])
        if not free:
            heapq.heappush(free, used)
            used += 1
        slots[array] = heapq.heappop(free)
        heapq.heappush(held, (end, slots[array]))
    return used
