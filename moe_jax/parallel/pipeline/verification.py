"""Rules that every pipeline schedule obeys: passes once and in order, hops to neighbours, no deadlock, bounded memory."""

from collections import Counter
from itertools import pairwise
from typing import Literal

from moe_jax.parallel.choices import UNIFORM
from moe_jax.parallel.pipeline.schedules import Part, Result, Schedule, Slot
from moe_jax.parallel.pipeline.simulator import memory_peaks, ticks_of
from moe_jax.parallel.pipeline.ticks import num_ticks, uniform_slot

KINDS_OF_RESULTS: tuple[Literal["F", "b", "W"], ...] = ("F", "b", "W")

SHAPES = {(), ("F",), ("B",), ("b",), ("W",), ("F", "B"), ("F", "b")}
"""The kinds of parts that one slot may have."""


def verify(schedule: Schedule) -> None:
    """Checks a schedule.

    1. A slot is idle, one part, (F, B) or (F, b). Its chunks and micro-batches exist, and every stage is on a rank.
    2. Each stage computes F, b and W of each micro-batch once; B is b and W.
    3. b comes after F, and W after b. An overlapped B has another micro-batch or chunk than its F.
    4. Each kind of pass of a chunk processes micro-batches in order, so that messages arrive in order of use. W of `uniform-w`
       sends none, and processes the first micro-batches last.
    5. Neighbouring stages are on neighbouring ranks of the ring, or on one rank.
    6. The ranks never deadlock.
    7. Chunk inputs in flight, and waiting passes W, are at most what the schedule states.
    8. The slots of `uniform` and `uniform-w` are the arithmetic of their ticks.

    Raises:
      ValueError: the message names the first broken rule, and where.
    """
    for rank, slots in enumerate(schedule.ranks):
        for k, slot in enumerate(slots):
            _check_slot(schedule, rank, k, slot)
    _check_stages(schedule)
    for rank in range(len(schedule.ranks)):
        _check_each_part_once(schedule, rank)
        _check_own_order(schedule, rank)
    _check_hops(schedule)
    ticks_of(schedule)
    for rank, slots in enumerate(schedule.ranks):
        _check_memory(schedule, rank, slots)
    if schedule.name in UNIFORM:
        _check_ticks(schedule)


def _check_slot(schedule: Schedule, rank: int, k: int, slot: Slot) -> None:
    if tuple(part.kind for part in slot) not in SHAPES:
        raise ValueError(f"a slot is idle, one part, (F, B) or (F, b); {_where(rank, k)} is {_text(*slot)}")
    for part in slot:
        if not 0 <= part.chunk < len(schedule.stages[rank]):
            raise ValueError(
                f"rank {rank} has chunks 0 to {len(schedule.stages[rank]) - 1}; {_where(rank, k)} is {_text(part)}"
            )
        if not 0 <= part.micro_batch < schedule.micro_batches:
            last = schedule.micro_batches - 1
            raise ValueError(f"micro-batches are 0 to {last}; {_where(rank, k)} is {_text(part)}")


def _check_stages(schedule: Schedule) -> None:
    found = Counter((schedule.directions[chunk], stage) for chunks in schedule.stages for chunk, stage in enumerate(chunks))
    for direction in sorted(set(schedule.directions)):
        for stage in range(schedule.num_stages):
            if found[direction, stage] != 1:
                times = found[direction, stage]
                raise ValueError(f"stage {stage} must be on one rank in direction {direction}; it is on {times}")


def _check_each_part_once(schedule: Schedule, rank: int) -> None:
    found = Counter(result for slot in schedule.ranks[rank] for part in slot for result in schedule.results(rank, part))
    for chunk, stage in enumerate(schedule.stages[rank]):
        for micro_batch in range(schedule.micro_batches):
            for kind in KINDS_OF_RESULTS:
                times = found[Result(kind, schedule.directions[chunk], stage, micro_batch)]
                if times != 1:
                    what = f"{kind} of chunk {chunk}, micro-batch {micro_batch}"
                    raise ValueError(f"each pass is computed once; rank {rank} computes {what} {times} times")


def _check_own_order(schedule: Schedule, rank: int) -> None:
    """Checks rules 3 and 4, which one rank's slots show."""
    done: set[tuple[str, int, int]] = set()
    for k, slot in enumerate(schedule.ranks[rank]):
        for part in slot:
            before = {"F": None, "B": "F", "b": "F", "W": "b"}[part.kind]
            if before and (before, part.chunk, part.micro_batch) not in done:
                missing = _text(Part("F" if before == "F" else "b", part.chunk, part.micro_batch))
                raise ValueError(f"{part.kind} comes after {before}; {_where(rank, k)} is {_text(part)}, before {missing}")
            for kind in "bW" if part.kind == "B" else part.kind:
                if (
                    (kind != "W" or schedule.name != "uniform-w")
                    and part.micro_batch
                    and (kind, part.chunk, part.micro_batch - 1) not in done
                ):
                    raise ValueError(
                        f"a chunk takes micro-batches in order; {_where(rank, k)} is {_text(part)}, "
                        f"before {kind} of micro-batch {part.micro_batch - 1}"
                    )
        # Parts of one slot start together, so none may depend on another.
        done.update((kind, part.chunk, part.micro_batch) for part in slot for kind in ("bW" if part.kind == "B" else part.kind))


def _check_hops(schedule: Schedule) -> None:
    num_ranks = len(schedule.ranks)
    for direction in sorted(set(schedule.directions)):
        owners = [schedule.owners[direction, stage] for stage in range(schedule.num_stages)]
        for stage, (here, there) in enumerate(pairwise(owners)):
            if (there - here) % num_ranks not in {0, 1, num_ranks - 1}:
                raise ValueError(
                    f"neighbouring stages must be on neighbouring ranks; stage {stage} is on rank {here}, "
                    f"stage {stage + 1} on rank {there}"
                )


def _check_memory(schedule: Schedule, rank: int, slots: tuple[Slot, ...]) -> None:
    in_flight, weights_queue = memory_peaks(slots)
    if in_flight > schedule.in_flight[rank]:
        raise ValueError(
            f"rank {rank} of {schedule.name} holds at most {schedule.in_flight[rank]} chunk inputs; these slots need "
            f"{in_flight}"
        )
    if weights_queue > schedule.weights_queue[rank]:
        raise ValueError(
            f"rank {rank} of {schedule.name} puts off at most {schedule.weights_queue[rank]} passes W; these slots put off "
            f"{weights_queue}"
        )


def _check_ticks(schedule: Schedule) -> None:
    sizes = (len(schedule.ranks), len(schedule.directions), schedule.micro_batches)
    for rank, slots in enumerate(schedule.ranks):
        if len(slots) != num_ticks(*sizes):
            raise ValueError(f"{schedule.name} has {num_ticks(*sizes)} ticks; rank {rank} has {len(slots)} slots")
        for tick, slot in enumerate(slots):
            wanted = uniform_slot(tick, rank, *sizes, divides=schedule.name == "uniform-w")
            if slot != wanted:
                found = f"{_where(rank, tick)} is {_text(*slot)}, not {_text(*wanted)}"
                raise ValueError(f"uniform ticks follow their arithmetic; {found}")


def _where(rank: int, k: int) -> str:
    return f"slot {k} of rank {rank}"


def _text(*parts: Part) -> str:
    """Returns "F of chunk 0, micro-batch 3", or "idle" without parts."""
    return " and ".join(f"{part.kind} of chunk {part.chunk}, micro-batch {part.micro_batch}" for part in parts) or "idle"
