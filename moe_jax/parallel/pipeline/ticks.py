"""Interleaved 1F1B and uniform ticks: their schedules, and the arithmetic of ticks.

Micro-batches circle the ring of ranks in groups of the number of ranks. In a tick every rank computes at most one forward pass
and one backward pass. With p ranks, v chunks and micro-batch i = g p + j:

    forward  of chunk c on rank r in tick           r +       g v p +       c p     + j
    backward of chunk c on rank r in tick  v p + (p - 1 - r) + g v p + (v - 1 - c) p + j
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace

from moe_jax.parallel.pipeline.schedules import Kind, Part, Schedule, Slot, one_f_one_b, require_positive

Place = tuple[int, int]
"""The chunk and the micro-batch of a pass."""


def forward_at(tick: int, rank: int, ranks: int, chunks: int, micro_batches: int) -> Place | None:
    """Returns the forward pass that a rank runs in a tick of `uniform`; None if it has none."""
    return _nth_pass(tick - rank, ranks, chunks, micro_batches)


def backward_at(tick: int, rank: int, ranks: int, chunks: int, micro_batches: int) -> Place | None:
    """Returns the backward pass that a rank runs in a tick of `uniform`; None if it has none. Chunks are in reverse order."""
    mirrored = _nth_pass(tick - chunks * ranks - (ranks - 1 - rank), ranks, chunks, micro_batches)
    return mirrored and (chunks - 1 - mirrored[0], mirrored[1])


def weights_at(tick: int, rank: int, ranks: int, chunks: int, micro_batches: int) -> Place | None:
    """Returns the pass W that a rank computes in one of the last p - 1 ticks, if W is postponed (`uniform-w`).

    Rank r has no backward pass in the last r ticks. There it computes W of its first r backward passes, which are in the ticks
    of `puts_off`.
    """
    n = tick - num_ticks(ranks, chunks, micro_batches) + rank
    return backward_at(n + chunks * ranks + ranks - 1 - rank, rank, ranks, chunks, micro_batches)


def puts_off(tick: int, ranks: int, chunks: int) -> bool:
    """Returns True if `uniform-w` postpones W of this tick's backward passes: in the first p - 1 ticks that have any."""
    return chunks * ranks <= tick < chunks * ranks + ranks - 1


def _nth_pass(n: int, ranks: int, chunks: int, micro_batches: int) -> Place | None:
    group, chunk, place = n // (chunks * ranks), n % (chunks * ranks) // ranks, n % ranks
    micro_batch = group * ranks + place
    return (chunk, micro_batch) if n >= 0 and micro_batch < micro_batches else None


def num_ticks(ranks: int, chunks: int, micro_batches: int) -> int:
    """Returns m' v + p - 1 + v p, with m' the next multiple of p: an incomplete last group has holes.

    The first v p ticks have no backward pass, and the last v p ticks no forward pass.
    """
    return -(-micro_batches // ranks) * ranks * chunks + ranks - 1 + chunks * ranks


def lowest_free_slots(intervals: Iterable[tuple[int, int]]) -> list[int]:
    """Assigns a slot to each interval (first, last tick): the lowest that is free, in order of first ticks."""
    slots: list[int] = []
    free: list[int] = []
    held: list[tuple[int, int]] = []
    for begin, end in intervals:
        while held and held[0][0] < begin:
            heapq.heappush(free, heapq.heappop(held)[1])
        slots.append(heapq.heappop(free) if free else len(held))
        heapq.heappush(held, (end, slots[-1]))
    return slots


def interleaved(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """Returns the interleaved 1F1B schedule (Narayanan et al., arXiv 2104.04473) with `chunks` chunks per rank.

    Chunk c of rank r is stage c * ranks + r. A rank computes the passes of `uniform` in order, and in each tick the backward
    pass first. Rank r therefore holds up to `(chunks + 1) ranks - 2 r - 1` chunk inputs. With one chunk the order is
    `one_f_one_b`. Any number of micro-batches is legal; a multiple of `ranks` has the least idle time.

    Raises:
      ValueError: a size is below 1, or there are several chunks on one rank.
    """
    _require_ring(ranks, chunks, micro_batches)
    if chunks == 1:
        return replace(one_f_one_b(ranks, micro_batches), name="interleaved")
    sizes = (ranks, chunks, micro_batches)

    def slots(rank: int) -> Iterator[Slot]:
        for tick in range(num_ticks(*sizes)):
            for part in (*_part("B", backward_at(tick, rank, *sizes)), *_part("F", forward_at(tick, rank, *sizes))):
                yield (part,)

    bounds = ((chunks + 1) * ranks - 2 * rank - 1 for rank in range(ranks))
    return Schedule(
        name="interleaved",
        ranks=tuple(tuple(slots(rank)) for rank in range(ranks)),
        stages=_stages(ranks, chunks),
        directions=(0,) * chunks,
        micro_batches=micro_batches,
        in_flight=tuple(min(bound, chunks * micro_batches) for bound in bounds),
        weights_queue=(0,) * ranks,
    )


def uniform(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """Returns interleaved 1F1B in ticks: slot k of each rank is tick k, with at most one forward and one backward pass.

    All ranks can run one program, because every tick computes the same passes on all of them and masks missing ones. Rank r
    holds up to `(chunks + 1) ranks - 2 r` chunk inputs.

    Raises:
      ValueError: a size is below 1, or there are several chunks on one rank.
    """
    _require_ring(ranks, chunks, micro_batches)
    return Schedule(
        name="uniform",
        ranks=_slots_of_uniform(ranks, chunks, micro_batches),
        stages=_stages(ranks, chunks),
        directions=(0,) * chunks,
        micro_batches=micro_batches,
        in_flight=tuple(min((chunks + 1) * ranks - 2 * rank, chunks * micro_batches) for rank in range(ranks)),
        weights_queue=(0,) * ranks,
    )


def uniform_w(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """Returns `uniform` with W postponed: the first p - 1 ticks with backward passes compute only b, the last p - 1 ticks W.

    Rank r postpones W of its first r backward passes to the last r ticks, where it would be idle. The first of these ticks are
    shorter by W, and the last do not get longer. Rank r holds r more chunk inputs.

    Raises:
      ValueError: as `uniform`.
    """
    plain = uniform(ranks, chunks, micro_batches)
    return replace(
        plain,
        name="uniform-w",
        ranks=_slots_of_uniform(ranks, chunks, micro_batches, divides=True),
        in_flight=tuple(held + rank for rank, held in enumerate(plain.in_flight)),
        weights_queue=tuple(range(ranks)),
    )


def uniform_slot(tick: int, rank: int, ranks: int, chunks: int, micro_batches: int, *, divides: bool = False) -> Slot:
    """Returns a rank's slot in a tick of `uniform`, or of `uniform_w` with `divides`."""
    sizes = (ranks, chunks, micro_batches)
    kind: Kind = "b" if divides and puts_off(tick, ranks, chunks) else "B"
    weights = _part("W", weights_at(tick, rank, *sizes)) if divides else ()
    return (*_part("F", forward_at(tick, rank, *sizes)), *_part(kind, backward_at(tick, rank, *sizes)), *weights)


def _slots_of_uniform(*sizes: int, divides: bool = False) -> tuple[tuple[Slot, ...], ...]:
    ticks = range(num_ticks(*sizes))
    return tuple(tuple(uniform_slot(tick, rank, *sizes, divides=divides) for tick in ticks) for rank in range(sizes[0]))


def _part(kind: Kind, place: Place | None) -> tuple[Part, ...]:
    return (Part(kind, *place),) if place else ()


def _stages(ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(chunk * ranks + rank for chunk in range(chunks)) for rank in range(ranks))


def _require_ring(ranks: int, chunks: int, micro_batches: int) -> None:
    require_positive(ranks=ranks, chunks=chunks, micro_batches=micro_batches)
    if ranks == 1 and chunks > 1:
        raise ValueError(f"chunks must be 1 with one rank, whose neighbour is itself; got {chunks}")
