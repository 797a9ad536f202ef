"""A schedule as a table of lockstep ticks: each rank's passes in a tick, and the slots of memory that they read and write.

`ticks_of` puts each slot of a schedule into the first tick after all its inputs. A tick's outputs travel between that tick and
the next. Until they are read, arrays are in slots of memory:

| kind of slot | written | read by |
|---|---|---|
| input | after the tick of F of the previous stage | F |
| gradient | after the tick of the next stage's backward pass; for the last stage by the loss, a tick after its F | B or b |
| saved | by F | B or b |
| product | by b | W |

In uniform ticks all ranks compute the same kinds of passes. A rank without such a pass computes chunk 0 of micro-batch 0. Masks
discard the results, and no other pass reads their slot. Nothing here imports JAX.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np

from moe_jax.parallel.choices import UNIFORM
from moe_jax.parallel.pipeline.schedules import Kind, Part, Result, Schedule, Slot
from moe_jax.parallel.pipeline.simulator import ticks_of
from moe_jax.parallel.pipeline.ticks import lowest_free_slots
from moe_jax.parallel.pipeline.verification import verify

Ints = Any
"""NumPy integers or booleans [ticks, ranks], or one traced element inside a program."""

Kinds = tuple[Kind, ...]
SlotKind = Literal["input", "gradient", "saved", "product"]

Kept = tuple[SlotKind, int, int, int]
"""Key of an array in a slot: the kind of slot, direction, stage, and micro-batch within the direction."""


class PassRow(NamedTuple):
    """The pass that a rank runs in a tick. If `exists` is False, its gradients and sums must be ignored."""

    exists: Ints
    chunk: Ints
    micro_batch: Ints
    is_first: Ints
    """True for stage 0, whose input is the embedded tokens instead of a slot."""
    arrived: Ints
    """The slot of the input of F, or of the gradient of the output of B and b."""
    saved: Ints
    product: Ints


NO_PASS = PassRow(False, 0, 0, False, 0, 0, 0)


class Row(NamedTuple):
    """The work of one rank in one tick: its passes, and the memory slots that they use."""

    branch: Ints
    """The index into `TickSpan.kinds`."""
    forward: PassRow
    backward: PassRow
    weights: PassRow
    losses: tuple[Ints, ...]
    """For each direction, the slot for the gradient of the last stage's output."""
    inputs: tuple[Ints, ...]
    """For each of `Table.forward_hops`, the slot that receives its result. An extra slot receives unused results."""
    gradients: tuple[Ints, ...]
    """The same for `Table.backward_hops`."""


class TickSpan(NamedTuple):
    """A range of consecutive ticks in which the same kinds of passes run."""

    begins: Any
    ends: Any
    kinds: tuple[Kinds, ...]
    """The kinds of passes, such as ("F", "B"). A single entry runs on all ranks; with several, each rank runs its own."""
    has_losses: bool


@dataclass(frozen=True)
class Table:
    """A schedule in lockstep ticks.

    Micro-batches are numbered over both directions: direction 0 comes first.

    Attributes:
      rows: the integers of each tick and rank.
      spans: all ticks of a step.
      losses: for each direction, the micro-batch that left the last stage in the previous tick, [ticks]; -1: none.
      last_ranks: for each direction, the rank of the last stage.
      forward_hops: the distances over which outputs travel, modulo the number of ranks; 0: to the same rank.
      backward_hops: the same for gradients.
      sizes: the number of slots of each kind: the maximum over ranks.
    """

    rows: Row
    spans: tuple[TickSpan, ...]
    losses: tuple[Ints, ...]
    last_ranks: tuple[int, ...]
    forward_hops: tuple[int, ...]
    backward_hops: tuple[int, ...]
    sizes: Mapping[SlotKind, int]

    @property
    def kinds(self) -> set[Kind]:
        """The kinds of all passes."""
        return {kind for span in self.spans for kinds in span.kinds for kind in kinds}


def lockstep_table(schedule: Schedule) -> Table:
    """Converts a schedule to lockstep ticks.

    Raises:
      ValueError: as in `verify`. So no schedule that could deadlock is started.
    """
    verify(schedule)
    ticks = list(zip(*ticks_of(schedule), strict=True))
    when = {
        result: tick
        for tick, slots in enumerate(ticks)
        for rank, slot in enumerate(slots)
        for part in slot
        for result in schedule.results(rank, part)
    }
    del ticks[1 + max(when.values()) :]
    slots, sizes = _allocate(schedule, when)
    forward_hops, inputs = _arrivals(schedule, when, slots, "F", sizes["input"])
    backward_hops, gradients = _arrivals(schedule, when, slots, "b", sizes["gradient"])
    losses, of_losses, last_ranks = _losses(schedule, when, slots, sizes["gradient"])
    passes = [_passes(schedule, ticks, slots, kinds) for kinds in ("F", "Bb", "W")]
    if schedule.name in UNIFORM:
        spans, sizes = _uniform_spans(ticks, losses[0]), _with_masked(ticks, passes, sizes)
    else:
        kinds = ((), *sorted({_kinds(slot) for of_tick in ticks for slot in of_tick} - {()}))
        spans = (TickSpan(0, len(ticks), kinds, True),)
    branch = np.array([[_branch(span, slot) for slot in ticks[t]] for span in spans for t in range(*span[:2])], np.int32)
    rows = Row(branch, passes[0], passes[1], passes[2], of_losses, inputs, gradients)
    return Table(rows, spans, losses, last_ranks, forward_hops, backward_hops, sizes)


def forward_only(table: Table) -> Table:
    """Returns the table with only forward passes and losses, for evaluation in uniform ticks."""
    end = 1 + int(np.flatnonzero(table.rows.forward.exists.any(1))[-1])
    spans = TickSpan(0, end, (("F",),), True), TickSpan(end, end + 1, ((),), True)
    return replace(table, spans=spans, sizes={**dict.fromkeys(table.sizes, 0), "input": table.sizes["input"]})


def undivided(schedule: Schedule) -> Schedule:
    """Returns the schedule without zero-bubble splitting: each b becomes a whole B, and W is dropped."""

    def whole(slot: Slot) -> Slot:
        return tuple(part._replace(kind="B") if part.kind == "b" else part for part in slot)

    ranks = tuple(tuple(whole(slot) for slot in slots if _kinds(slot) != ("W",)) for slots in schedule.ranks)
    return replace(schedule, ranks=ranks, weights_queue=(0,) * len(ranks))


def _kinds(slot: Slot) -> Kinds:
    return tuple(part.kind for part in slot)


def _branch(span: TickSpan, slot: Slot) -> int:
    return span.kinds.index(_kinds(slot)) if len(span.kinds) > 1 else 0


def _passes(schedule: Schedule, ticks: list[tuple[Slot, ...]], slots: dict[Kept, int], kinds: str) -> PassRow:
    """Returns the passes of these kinds, with zeros if a rank has none."""
    rows = np.zeros((len(ticks), len(schedule.ranks), len(PassRow._fields)), np.int32)
    arrives: SlotKind = "input" if kinds == "F" else "gradient"
    read: tuple[SlotKind, ...] = (arrives, "saved", "product")
    for tick, of_tick in enumerate(ticks):
        for rank, slot in enumerate(of_tick):
            for part in slot:
                if part.kind in kinds:
                    direction, stage, micro_batch = place = _place(schedule, rank, part)
                    own = (slots.get((kind, *place), 0) for kind in read)
                    number = direction * schedule.micro_batches + micro_batch
                    rows[tick, rank] = True, part.chunk, number, stage == 0, *own
    row = PassRow(*np.moveaxis(rows, 2, 0))
    return row._replace(exists=row.exists > 0, is_first=row.is_first > 0)


def _uniform_spans(ticks: list[tuple[Slot, ...]], losses: Ints) -> tuple[TickSpan, ...]:
    """Returns the spans of uniform ticks: forward passes, both, backward passes, and W with backward passes."""
    found = [{kind for slot in of_tick for kind in _kinds(slot)} for of_tick in ticks]
    last_forward = max(tick for tick, kinds in enumerate(found) if "F" in kinds)
    first_backward = min(tick for tick, kinds in enumerate(found) if kinds & {"B", "b"})
    apart = tuple(
        sorted({_kinds(slot) for of_tick, kinds in zip(ticks, found, strict=True) if "W" in kinds for slot in of_tick})
    )

    def kinds_of(tick: int) -> tuple[Kinds, ...]:
        if "W" in found[tick]:
            return apart
        forward: Kinds = ("F",) if tick <= last_forward else ()
        backward: Kinds = () if tick < first_backward else ("b",) if "b" in found[tick] else ("B",)
        return (forward + backward,)

    spans = []
    for kinds, of_span in groupby(range(len(ticks)), kinds_of):
        begins, *others = of_span
        ends = begins + len(others) + 1
        spans.append(TickSpan(begins, ends, kinds, bool((losses[begins:ends] >= 0).any())))
    return tuple(spans)


def _with_masked(ticks: list[tuple[Slot, ...]], passes: list[PassRow], sizes: Mapping[SlotKind, int]) -> dict[SlotKind, int]:
    """Assigns extra slots to masked passes, in place; returns the sizes including them."""
    forward, backward, _ = passes
    for row in forward, backward:
        row.saved[~row.exists] = sizes["saved"]
    # From its first pass on, a rank's input slot is filled; the rank of stage 0 has none, and embeds tokens.
    forward.is_first[:, 0] |= ~forward.exists[:, 0]
    # Before a rank's first product, masked passes write into slot 0, which is overwritten later.
    divides = np.array([[any("b" in _kinds(slot) for slot in of_tick)] for of_tick in ticks])
    late = divides & ~backward.exists & (np.cumsum(backward.exists, 0) > 0)
    backward.product[late] = sizes["product"]
    return {**sizes, "saved": sizes["saved"] + 1, "product": sizes["product"] + int(late.any())}


def _place(schedule: Schedule, rank: int, part: Part) -> tuple[int, int, int]:
    """Returns direction, stage and micro-batch within the direction."""
    return schedule.directions[part.chunk], schedule.stages[rank][part.chunk], part.micro_batch


def _arrivals(
    schedule: Schedule, when: dict[Result, int], slots: dict[Kept, int], kind: str, unused: int
) -> tuple[tuple[int, ...], tuple[Ints, ...]]:
    """Returns each hop distance of this kind of result, and the receiving slot for every tick and rank."""
    num_ranks, num_ticks = len(schedule.ranks), 1 + max(when.values())
    further = 1 if kind == "F" else -1
    read_from: SlotKind = "input" if kind == "F" else "gradient"
    columns: dict[int, Ints] = {}
    for result, tick in when.items():
        there = result.stage + further
        if result.kind == kind and 0 <= there < schedule.num_stages:
            owner = schedule.owners[result.direction, there]
            distance = (owner - schedule.owners[result.direction, result.stage]) % num_ranks
            column = columns.setdefault(distance, np.full((num_ticks, num_ranks), unused, np.int32))
            column[tick, owner] = slots[read_from, result.direction, there, result.micro_batch]
    return tuple(sorted(columns)), tuple(columns[distance] for distance in sorted(columns))


def _losses(
    schedule: Schedule, when: dict[Result, int], slots: dict[Kept, int], unused: int
) -> tuple[tuple[Ints, ...], tuple[Ints, ...], tuple[int, ...]]:
    """Returns, for each direction, `Table.losses`, `Row.losses` and `Table.last_ranks`."""
    num_ranks, num_ticks, last = len(schedule.ranks), 1 + max(when.values()), schedule.num_stages - 1
    directions = sorted(set(schedule.directions))
    losses = tuple(np.full(num_ticks, -1, np.int32) for _ in directions)
    of_losses = tuple(np.full((num_ticks, num_ranks), unused, np.int32) for _ in directions)
    last_ranks = tuple(schedule.owners[direction, last] for direction in directions)
    for direction in directions:
        for micro_batch in range(schedule.micro_batches):
            tick = when[Result("F", direction, last, micro_batch)] + 1
            losses[direction][tick] = direction * schedule.micro_batches + micro_batch
            of_losses[direction][tick, last_ranks[direction]] = slots["gradient", direction, last, micro_batch]
    return losses, of_losses, last_ranks


def _allocate(schedule: Schedule, when: Mapping[Result, int]) -> tuple[dict[Kept, int], dict[SlotKind, int]]:
    """Returns the slot of each array on its rank, and the numbers of slots.

    Arrays needed in the same tick never share a slot, and a rank has the minimum number of slots.
    """
    of: dict[Kept, int] = {}
    counts: dict[SlotKind, int] = {"input": 0, "gradient": 0, "saved": 0, "product": 0}
    for chunks in schedule.stages:
        held = [each for chunk, stage in enumerate(chunks) for each in _intervals(schedule, when, chunk, stage)]
        for kind in counts:
            of_kind = sorted(each for each in held if each[2][0] == kind)
            numbers = lowest_free_slots((begin, end) for begin, end, _ in of_kind)
            of |= zip((array for *_, array in of_kind), numbers, strict=True)
            counts[kind] = max([counts[kind], *(number + 1 for number in numbers)])
    return of, counts


def _intervals(schedule: Schedule, when: Mapping[Result, int], chunk: int, stage: int) -> Iterator[tuple[int, int, Kept]]:
    """Returns the first and last ticks in which a chunk's arrays hold their slots.

    An array that arrives between ticks k and k + 1 holds its slot from k to before its reader's tick.
    Arrivals after that tick may reuse the slot. An array written and read within ticks holds its slot in both.
    """
    direction, is_last = schedule.directions[chunk], stage == schedule.num_stages - 1
    for micro_batch in range(schedule.micro_batches):
        place = direction, stage, micro_batch
        f, b, w = (when[Result(kind, *place)] for kind in ("F", "b", "W"))
        if stage:
            yield when[Result("F", direction, stage - 1, micro_batch)], f - 1, ("input", *place)
        arrives = f if is_last else when[Result("b", direction, stage + 1, micro_batch)]
        yield arrives, b - 1, ("gradient", *place)
        yield f, b, ("saved", *place)
        if w > b:
            yield b, w, ("product", *place)
