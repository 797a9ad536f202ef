"""A schedule as a table of lockstep ticks: each rank's passes in a tick, and the slots of memory that they read and write.

`ticks_of` puts each slot of a schedule into the first tick after all that it needs. A tick's outputs travel between that tick
and the next. Until they are read, arrays are in slots of memory:

| kind of slot | written | read by |
|---|---|---|
| input | behind the tick of F of the stage before | F |
| gradient | behind the tick of the next stage's backward pass; for the last stage by the loss, a tick after its F | B or b |
| saved | by F | B or b |
| product | by b | W |

Nothing here imports JAX.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from moe_jax.parallel.pipeline.schedules import Kind, Part, Result, Schedule, Slot
from moe_jax.parallel.pipeline.simulator import ticks_of
from moe_jax.parallel.pipeline.ticks import lowest_free_slots
from moe_jax.parallel.pipeline.verification import verify

Ints = np.ndarray
"""Integers [ticks, ranks], or one of them inside a program."""

Kinds = tuple[Kind, ...]


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


class ForwardRow(NamedTuple):
    """The forward pass of a rank in a tick; zeros without one."""

    chunk: Ints
    micro_batch: Ints
    is_first: Ints
    """1 for stage 0, whose input is the embedded tokens, and no slot."""
    input: Ints
    saved: Ints


class BackwardRow(NamedTuple):
    """The pass B or b of a rank in a tick; zeros without one."""

    chunk: Ints
    micro_batch: Ints
    is_first: Ints
    """1 for stage 0, whose gradient is that of the embedded tokens."""
    gradient: Ints
    saved: Ints
    product: Ints


class WeightsRow(NamedTuple):
    """The pass W of a rank in a tick; zeros without one."""

    chunk: Ints
    micro_batch: Ints
    product: Ints


class Row(NamedTuple):
    """All that a rank does in a tick."""

    kinds: Ints
    """The index into `Table.kinds`."""
    forward: ForwardRow
    backward: BackwardRow
    weights: WeightsRow
    losses: tuple[Ints, ...]
    """For each direction, the slot for the gradient of the last stage's output."""
    inputs: tuple[Ints, ...]
    """For each of `Table.forward_hops`, the slot for what arrives. A slot behind the last takes what is not needed."""
    gradients: tuple[Ints, ...]
    """The same for `Table.backward_hops`."""


@dataclass(frozen=True)
class Table:
    """A schedule in lockstep ticks.

    Micro-batches are numbered over both directions: those of direction 1 come behind those of direction 0.

    Attributes:
      num_ticks: of a step.
      kinds: the different kinds of slots, as ("F", "B"); the first is (), an idle tick.
      rows: the integers of each tick and rank.
      losses: for each direction, the micro-batch that left the last stage one tick before; -1: none. [ticks].
      last_ranks: for each direction, the rank of the last stage.
      forward_hops: the distances over which outputs travel, modulo the number of ranks; 0: to the same rank.
      backward_hops: the same of gradients.
      sizes: the numbers of slots.
    """

    num_ticks: int
    kinds: tuple[Kinds, ...]
    rows: Row
    losses: tuple[Ints, ...]
    last_ranks: tuple[int, ...]
    forward_hops: tuple[int, ...]
    backward_hops: tuple[int, ...]
    sizes: Sizes


def lockstep_table(schedule: Schedule) -> Table:
    """Returns the table of a schedule.

    Raises:
      ValueError: what `verify` raises. So nothing is started in which ranks could wait for each other.
    """
    verify(schedule)
    ticks = ticks_of(schedule)
    when = {
        result: tick
        for rank, slots in enumerate(ticks)
        for tick, slot in enumerate(slots)
        for part in slot
        for result in schedule.results(rank, part)
    }
    slots, sizes = _allocate(schedule, when)
    kinds = ((), *sorted({_kinds(slot) for row in ticks for slot in row} - {()}))
    forward_hops, inputs = _arrivals(schedule, when, slots, "F", sizes.inputs)
    backward_hops, gradients = _arrivals(schedule, when, slots, "b", sizes.gradients)
    losses, of_losses, last_ranks = _losses(schedule, when, slots, sizes.gradients)

    def columns(kinds: Kinds, *values: Callable[[int, Part], int]) -> list[Ints]:
        """Returns a column of value(rank, part) for the slots' parts of these kinds; 0 without such a part."""
        found = [np.zeros((len(ticks[0]), len(ticks)), np.int32) for _ in values]
        for rank, row in enumerate(ticks):
            for tick, slot in enumerate(row):
                for part in slot:
                    if part.kind in kinds:
                        for column, value in zip(found, values, strict=True):
                            column[tick, rank] = value(rank, part)
        return found

    def kept(kind: SlotKind) -> Callable[[int, Part], int]:
        return lambda rank, part: slots.get(Kept(kind, *_place(schedule, rank, part)), 0)

    def chunk(rank: int, part: Part) -> int:
        return part.chunk

    def micro_batch(rank: int, part: Part) -> int:
        return schedule.directions[part.chunk] * schedule.micro_batches + part.micro_batch

    def is_first(rank: int, part: Part) -> int:
        return schedule.stages[rank][part.chunk] == 0

    rows = Row(
        np.array([[kinds.index(_kinds(slot)) for slot in of_tick] for of_tick in zip(*ticks, strict=True)], np.int32),
        ForwardRow(*columns(("F",), chunk, micro_batch, is_first, kept("input"), kept("saved"))),
        BackwardRow(*columns(("B", "b"), chunk, micro_batch, is_first, kept("gradient"), kept("saved"), kept("product"))),
        WeightsRow(*columns(("W",), chunk, micro_batch, kept("product"))),
        of_losses,
        inputs,
        gradients,
    )
    return Table(len(ticks[0]), kinds, rows, losses, last_ranks, forward_hops, backward_hops, sizes)


def undivided(schedule: Schedule) -> Schedule:
    """Returns the schedule with a whole backward pass B in place of each b, and without W."""

    def whole(slot: Slot) -> Slot:
        return tuple(part._replace(kind="B") if part.kind == "b" else part for part in slot)

    ranks = tuple(tuple(whole(slot) for slot in slots if _kinds(slot) != ("W",)) for slots in schedule.ranks)
    return replace(schedule, ranks=ranks, weights_queue=(0,) * len(ranks))


def _kinds(slot: Slot) -> Kinds:
    return tuple(part.kind for part in slot)


def _place(schedule: Schedule, rank: int, part: Part) -> tuple[int, int, int]:
    """Returns direction, stage and micro-batch within the direction."""
    return schedule.directions[part.chunk], schedule.stages[rank][part.chunk], part.micro_batch


def _arrivals(
    schedule: Schedule, when: dict[Result, int], slots: dict[Kept, int], kind: str, unused: int
) -> tuple[tuple[int, ...], tuple[Ints, ...]]:
    """Returns the distances over which results of a kind travel, and for each the slots for what arrives."""
    num_ranks, num_ticks = len(schedule.ranks), 1 + max(when.values())
    further, read_from = (1, "input") if kind == "F" else (-1, "gradient")
    columns: dict[int, Ints] = {}
    for result, tick in when.items():
        there = result.stage + further
        if result.kind == kind and 0 <= there < schedule.num_stages:
            owner = schedule.owners[result.direction, there]
            distance = (owner - schedule.owners[result.direction, result.stage]) % num_ranks
            column = columns.setdefault(distance, np.full((num_ticks, num_ranks), unused, np.int32))
            array = Kept(read_from, result.direction, there, result.micro_batch)  # type: ignore[arg-type]
            column[tick, owner] = slots[array]
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
            of_losses[direction][tick, last_ranks[direction]] = slots[Kept("gradient", direction, last, micro_batch)]
    return losses, of_losses, last_ranks


def _allocate(schedule: Schedule, when: Mapping[Result, int]) -> tuple[dict[Kept, int], Sizes]:
    """Returns the slot of each array on its rank, and the numbers of slots.

    Arrays that are needed in the same tick never share a slot, and a rank has as many slots as it needs at once.
    """
    of: dict[Kept, int] = {}
    counts: dict[SlotKind, int] = {"input": 0, "gradient": 0, "saved": 0, "product": 0}
    for chunks in schedule.stages:
        held = [each for chunk, stage in enumerate(chunks) for each in _intervals(schedule, when, chunk, stage)]
        for kind in counts:
            of_kind = sorted(each for each in held if each[2].kind == kind)
            numbers = lowest_free_slots((begin, end) for begin, end, _ in of_kind)
            of |= zip((array for *_, array in of_kind), numbers, strict=True)
            counts[kind] = max([counts[kind], *(number + 1 for number in numbers)])
    return of, Sizes(*counts.values())


def _intervals(schedule: Schedule, when: Mapping[Result, int], chunk: int, stage: int) -> Iterator[tuple[int, int, Kept]]:
    """Returns the first and last ticks in which a chunk's arrays hold their slots.

    An array that arrives between ticks k and k + 1 holds its slot from k on, and not in the tick of its reader: what arrives
    behind that tick may take the place. What is written and read within ticks holds its slot in both.
    """
    direction, is_last = schedule.directions[chunk], stage == schedule.num_stages - 1
    for micro_batch in range(schedule.micro_batches):
        place = direction, stage, micro_batch
        f, b, w = (when[Result(kind, *place)] for kind in ("F", "b", "W"))
        if stage:
            yield when[Result("F", direction, stage - 1, micro_batch)], f - 1, Kept("input", *place)
        arrives = f if is_last else when[Result("b", direction, stage + 1, micro_batch)]
        yield arrives, b - 1, Kept("gradient", *place)
        yield f, b, Kept("saved", *place)
        if w > b:
            yield b, w, Kept("product", *place)
