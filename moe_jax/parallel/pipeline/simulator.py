"""Simulates when each rank computes each pass, for given times of the passes: the bubble, and the memory in use."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from moe_jax.parallel.pipeline.schedules import Part, Result, Schedule, Slot

OfStages = float | Sequence[float]
"""One time for every stage, or a time for each stage."""


@dataclass(frozen=True)
class PassTimes:
    """Durations of the passes of one stage over one micro-batch, in any unit: a number, or one per stage.

    A rank of v chunks has stages of 1/v of its layers, so compare schedules with `divided`.

    Attributes:
      forward: F.
      backward: B, the whole backward pass.
      weights: W, the part of B that computes gradients of weights. The time of gradients of inputs is b = B - W.
      overlapped: an overlapped F and B, at least the longer of both. None: F + B. For two stages with different times the
        longer one counts.
    """

    forward: OfStages = 1.0
    backward: OfStages = 2.0
    weights: OfStages = 1.0
    overlapped: OfStages | None = None

    def divided(self, by: float) -> "PassTimes":
        """Returns the durations divided by `by`, for stages with that fraction of the layers."""

        def part(times: OfStages) -> OfStages:
            return times / by if isinstance(times, int | float) else tuple(time / by for time in times)

        overlapped = None if self.overlapped is None else part(self.overlapped)
        return replace(
            self, forward=part(self.forward), backward=part(self.backward), weights=part(self.weights), overlapped=overlapped
        )

    def of_slot(self, slot: Slot, stages: Sequence[int]) -> float:
        """Returns the duration of a slot on a rank whose chunks are `stages`."""
        if len(slot) == 2:
            first, second = (stages[part.chunk] for part in slot)
            put_off = _of(self.weights, second) if slot[1].kind == "b" else 0.0
            return self.both(first, second) - put_off
        return sum(self._of_part(part, stages[part.chunk]) for part in slot)

    def both(self, forward_stage: int, backward_stage: int) -> float:
        """Returns the duration of F of one stage overlapped with B of another."""
        if self.overlapped is None:
            return _of(self.forward, forward_stage) + _of(self.backward, backward_stage)
        return max(_of(self.overlapped, forward_stage), _of(self.overlapped, backward_stage))

    def require_valid(self, num_stages: int) -> None:
        """Checks that the durations are valid for `num_stages` stages.

        Raises:
          ValueError: a time is negative or not finite, or there are not `num_stages` times. Or W is longer than B, or an
            overlapped F and B is shorter than one of them.
        """
        for name in ("forward", "backward", "weights", "overlapped"):
            times = getattr(self, name)
            if isinstance(times, Sequence) and len(times) != num_stages:
                raise ValueError(f"{name} must be one time or {num_stages}, one for each stage; got {len(times)}")
            for stage in range(num_stages if times is not None else 0):
                if not 0 <= _of(times, stage) < math.inf:
                    raise ValueError(f"{name} must be a finite time of at least 0; got {_of(times, stage)}")
        for stage in range(num_stages):
            forward, whole, weights = (_of(times, stage) for times in (self.forward, self.backward, self.weights))
            if weights > whole:
                raise ValueError(f"weights is a part of backward={whole}, so it must be at most that; got {weights}")
            # The margin is for computed times, such as F + B minus a hidden part: rounding may change the last bit.
            if self.overlapped is not None and _of(self.overlapped, stage) < (1 - 1e-9) * max(forward, whole):
                raise ValueError(
                    f"overlapped must be at least the longer of forward={forward} and backward={whole}, for it contains both; "
                    f"got {_of(self.overlapped, stage)}"
                )

    def _of_part(self, part: Part, stage: int) -> float:
        weights, whole = _of(self.weights, stage), _of(self.backward, stage)
        return {"F": _of(self.forward, stage), "B": whole, "b": whole - weights, "W": weights}[part.kind]


class TimedSlot(NamedTuple):
    """A slot with the times at which a rank starts and finishes it."""

    slot: Slot
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step: the timed slots of each rank, without idle ones.

    `peak_in_flight` and `peak_weights_queue` are the largest numbers of chunk inputs and of waiting passes W of each rank.
    """

    schedule: Schedule
    times: PassTimes
    ranks: tuple[tuple[TimedSlot, ...], ...]
    peak_in_flight: tuple[int, ...]
    peak_weights_queue: tuple[int, ...]
    makespan: float

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """The idle time of each rank over the whole step."""
        return tuple(self.makespan - sum(slot.end - slot.start for slot in slots) for slots in self.ranks)

    @cached_property
    def waiting(self) -> tuple[float, ...]:
        """The idle time of each rank between its first and its last slot."""
        return tuple(
            slots[-1].end - slots[0].start - sum(slot.end - slot.start for slot in slots) if slots else 0.0
            for slots in self.ranks
        )

    @property
    def bubble(self) -> float:
        """The longest idle time of any rank."""
        return max(self.idle)

    @property
    def efficiency(self) -> float:
        """The least work of a rank divided by the time of the step, averaged over ranks.

        The least work is the shorter of F + B and F&B for each micro-batch and chunk, whether the schedule overlaps or not. So
        schedules that run passes in turn are comparable with schedules that overlap. If F&B is shorter than F + B, they lose
        more than their bubble.
        """
        if not self.makespan:
            return 1.0
        share = 0.0
        for rank, slots in enumerate(self.ranks):
            for part in (part for timed in slots for part in timed.slot if part.kind == "F"):
                stage = self.schedule.stages[rank][part.chunk]
                apart = _of(self.times.forward, stage) + _of(self.times.backward, stage)
                # Shares of the step: the sum of all ranks' times may be too large for a float.
                share += min(apart, self.times.both(stage, stage)) / self.makespan
        return share / len(self.ranks)


def simulate(
    schedule: Schedule, times: PassTimes, *, hop: float = 0.0, lockstep: bool = False, masked: bool = False
) -> Timeline:
    """Returns when each rank computes each slot of a schedule, as a `Timeline`.

    Each rank computes its slots in order, each as soon as its inputs have arrived. In lockstep all ranks run in ticks: a tick
    ends with its longest slot, and results travel between ticks.

    Args:
      schedule: the schedule; deadlocks are detected.
      times: the times of the passes of a stage.
      hop: the time for a result to travel to another rank. In lockstep each tick includes it once.
      lockstep: True: in ticks, like one program for all ranks that selects the pass by a branch (`lax.switch`).
      masked: with `lockstep`, a tick computes every kind of pass that any rank needs, like a program without branches.

    Raises:
      ValueError: slots wait for each other, or `PassTimes.require_valid` refuses the times. Or `hop` is negative or not
        finite, or the time of the step is too large for a float.
    """
    times.require_valid(schedule.num_stages)
    if not 0 <= hop < math.inf:
        raise ValueError(f"hop must be a finite time of at least 0; got {hop}")
    if masked and not lockstep:
        raise ValueError("masked=True needs lockstep=True: without ticks there is nothing to mask")
    ranks, makespan = _in_ticks(schedule, times, hop, masked) if lockstep else _asynchronously(schedule, times, hop)
    if not makespan < math.inf:
        raise ValueError("the time of the step is too large for a float; give the times in a larger unit")
    in_flight, weights_queue = zip(*map(memory_peaks, schedule.ranks), strict=True)
    return Timeline(
        schedule,
        times,
        tuple(tuple(timed for timed in slots if timed.slot) for slots in ranks),
        in_flight,
        weights_queue,
        makespan,
    )


def memory_peaks(slots: Sequence[Slot]) -> tuple[int, int]:
    """Returns the peak numbers of kept chunk inputs and of postponed passes W, for one rank's slots.

    A chunk's input is held from the beginning of its F to the end of its W.
    """
    in_flight = most_in_flight = queue = longest_queue = 0
    for slot in slots:
        in_flight += sum(part.kind == "F" for part in slot)
        queue += sum(part.kind == "b" for part in slot)
        most_in_flight, longest_queue = max(most_in_flight, in_flight), max(longest_queue, queue)
        in_flight -= sum(part.kind in ("B", "W") for part in slot)
        queue -= sum(part.kind == "W" for part in slot)
    return most_in_flight, longest_queue


def ticks_of(schedule: Schedule) -> list[list[Slot]]:
    """Returns the slots of each rank, one for each tick: a slot is in the first tick after all its inputs.

    Raises:
      ValueError: slots wait for each other.
    """
    table: list[list[Slot]] = [[] for _ in schedule.ranks]
    tick_of: dict[Result, int] = {}
    position = [0] * len(schedule.ranks)
    tick = 0
    while any(position[rank] < len(slots) for rank, slots in enumerate(schedule.ranks)):
        ready = [
            rank
            for rank, slots in enumerate(schedule.ranks)
            if position[rank] < len(slots)
            and all(tick_of.get(needed, tick) < tick for needed in _needs(schedule, rank, slots[position[rank]]))
        ]
        if not ready:
            raise ValueError(_deadlock(schedule, position, tick_of.keys()))
        for rank in range(len(schedule.ranks)):
            table[rank].append(schedule.ranks[rank][position[rank]] if rank in ready else ())
        for rank in ready:
            slot = schedule.ranks[rank][position[rank]]
            tick_of.update((result, tick) for part in slot for result in schedule.results(rank, part))
            position[rank] += 1
        tick += 1
    return table


def _asynchronously(schedule: Schedule, times: PassTimes, hop: float) -> tuple[list[list[TimedSlot]], float]:
    done: dict[Result, float] = {}
    ranks: list[list[TimedSlot]] = [[] for _ in schedule.ranks]
    now = [0.0] * len(schedule.ranks)
    progressed = True
    while progressed:
        progressed = False
        for rank, slots in enumerate(schedule.ranks):
            while len(ranks[rank]) < len(slots):
                slot = slots[len(ranks[rank])]
                needed = _needs(schedule, rank, slot)
                if any(result not in done for result in needed):
                    break
                travel = [0.0 if schedule.owners[result[1:3]] == rank else hop for result in needed]
                start = max([now[rank], *(done[result] + time for result, time in zip(needed, travel, strict=True))])
                now[rank] = start + times.of_slot(slot, schedule.stages[rank])
                done.update((result, now[rank]) for part in slot for result in schedule.results(rank, part))
                ranks[rank].append(TimedSlot(slot, start, now[rank]))
                progressed = True
    if any(len(timed) < len(slots) for timed, slots in zip(ranks, schedule.ranks, strict=True)):
        raise ValueError(_deadlock(schedule, [len(timed) for timed in ranks], done.keys()))
    return ranks, max(now)


def _in_ticks(schedule: Schedule, times: PassTimes, hop: float, masked: bool) -> tuple[list[list[TimedSlot]], float]:
    table = ticks_of(schedule)
    ranks: list[list[TimedSlot]] = [[] for _ in table]
    now = 0.0
    num_ticks = max(map(len, table), default=0)
    for tick in range(num_ticks):
        slots = [row[tick] for row in table]
        lengths = [times.of_slot(slot, schedule.stages[rank]) for rank, slot in enumerate(slots)]
        for rank, slot in enumerate(slots):
            ranks[rank].append(TimedSlot(slot, now, now + lengths[rank]))
        length = _masked_tick(schedule, times, slots) if masked else max(lengths)
        now += length + (hop if tick < num_ticks - 1 else 0.0)
    return ranks, now


def _masked_tick(schedule: Schedule, times: PassTimes, slots: Sequence[Slot]) -> float:
    """Returns the time of a tick in which each rank computes every kind of pass that any rank needs, in the longest stage."""
    stages = range(schedule.num_stages)
    kinds = {kind for slot in slots for part in slot for kind in ("bW" if part.kind == "B" else part.kind)}
    if kinds == {"F", "b", "W"}:
        return max(times.both(stage, stage) for stage in stages)
    weights, whole = ([_of(found, stage) for stage in stages] for found in (times.weights, times.backward))
    inputs = max(all_of - part for all_of, part in zip(whole, weights, strict=True))
    longest = {"F": max(_of(times.forward, stage) for stage in stages), "b": inputs, "W": max(weights)}
    return max(whole) if kinds == {"b", "W"} else sum(longest[kind] for kind in kinds)


def _needs(schedule: Schedule, rank: int, slot: Slot) -> list[Result]:
    return [needed for part in slot for needed in schedule.needs(rank, part)]


def _deadlock(schedule: Schedule, position: Sequence[int], done) -> str:
    """Returns the error for a deadlocked step, naming the first slot that waits."""
    for rank, slots in enumerate(schedule.ranks):
        if position[rank] < len(slots):
            missing = next(result for result in _needs(schedule, rank, slots[position[rank]]) if result not in done)
            break
    return (
        f"the ranks wait for each other: slot {position[rank]} of rank {rank} needs {missing.kind} of stage {missing.stage}, "
        f"micro-batch {missing.micro_batch}, which never comes"
    )


def _of(times: OfStages, stage: int) -> float:
    return times if isinstance(times, int | float) else times[stage]


def bubble_formula(schedule: Schedule, times: PassTimes) -> float:
    """Returns the bubble of a schedule over p ranks, for times F, B, W and F&B (overlapped) of one stage.

    | schedule | bubble | exact for |
    |---|---|---|
    | 1f1b | (p - 1) (F + B) | all times |
    | interleaved, uniform | (p - 1) (F + B) | micro-batches a multiple of p; otherwise it is longer |
    | uniform-w | (p - 1) (F + B - W) | the same |
    | zb-h1 | (p - 1) (F + B - 2 W) | W <= F and W <= B - W, at least p micro-batches; otherwise it may be longer |
    | zb-v | (p - 1) F | F = B - W = W, at least 2 p - 1 micro-batches; otherwise it may be longer |
    | dualpipe | (p / 2 - 1) (F&B + B - 3 W) | F = B - W = W and F&B = 3 F; an upper bound for W <= F <= B - W |
    | dualpipe-v | (p - 1) (F&B + B - 3 W) | the same |

    With v chunks per rank, F of a stage is 1/v of F of a rank: so interleaving divides the bubble by v. Ranks of zb-v start in
    turn and never wait between their first and last pass. They idle for (p - 1) F before and after.

    Raises:
      ValueError: the schedule has no formula, or a time differs from stage to stage.
    """
    pair = (times.forward, times.backward, times.weights, times.overlapped)
    if not all(time is None or isinstance(time, int | float) for time in pair):
        raise ValueError("formulas of the bubble need one time for every stage")
    f, b, w = (float(time) for time in (times.forward, times.backward, times.weights))  # type: ignore[arg-type]
    both, p = times.both(0, 0), len(schedule.ranks)
    formulas = {
        "1f1b": (p - 1) * (f + b),
        "interleaved": (p - 1) * (f + b),
        "uniform": (p - 1) * (f + b),
        "uniform-w": (p - 1) * (f + b - w),
        "zb-h1": (p - 1) * (f + b - 2 * w),
        "zb-v": (p - 1) * f,
        "dualpipe": (p / 2 - 1) * (both + b - 3 * w),
        "dualpipe-v": (p - 1) * (both + b - 3 * w),
    }
    if schedule.name not in formulas:
        raise ValueError(f"no formula for a schedule named {schedule.name!r}; there are: {', '.join(formulas)}")
    return formulas[schedule.name]
