"""The arithmetic of uniform ticks: which passes a rank computes in a tick, and in which slot it keeps their inputs.

Micro-batches go round the ring of ranks in groups of as many as there are ranks. In a tick every rank computes at most one
forward pass and one backward pass. With p ranks, v chunks and micro-batch i = g p + j:

    forward  of chunk c on rank r in tick           r +       g v p +       c p     + j
    backward of chunk c on rank r in tick  v p + (p - 1 - r) + g v p + (v - 1 - c) p + j

Ticks and ranks may be traced integers: the functions use + - * // % and comparisons alone.
"""

import heapq
from collections.abc import Iterable
from typing import Any, NamedTuple


class TickPass(NamedTuple):
    """A pass of one tick. Without `exists`, chunk and micro-batch mean nothing, and the micro-batch may be out of range."""

    chunk: Any
    micro_batch: Any
    exists: Any


def forward_at(tick: Any, rank: Any, ranks: int, chunks: int, micro_batches: int) -> TickPass:
    """Returns the forward pass of a rank in a tick."""
    return _nth_pass(tick - rank, ranks, chunks, micro_batches)


def backward_at(tick: Any, rank: Any, ranks: int, chunks: int, micro_batches: int) -> TickPass:
    """Returns the backward pass of a rank in a tick. Chunks come in the reverse order."""
    mirrored = _nth_pass(tick - chunks * ranks - (ranks - 1 - rank), ranks, chunks, micro_batches)
    return mirrored._replace(chunk=chunks - 1 - mirrored.chunk)


def weights_at(tick: Any, rank: Any, ranks: int, chunks: int, micro_batches: int) -> TickPass:
    """Returns the pass W that a rank computes in one of the last p - 1 ticks, if W is put off (`uniform-w`).

    Rank r has no backward pass in the last r ticks. There it computes W of its first r backward passes, which are in the ticks
    of `puts_off`.
    """
    n = weights_number(tick, rank, ranks, chunks, micro_batches)
    found = backward_at(n + first_backward(rank, ranks, chunks), rank, ranks, chunks, micro_batches)
    return found._replace(exists=found.exists & (n >= 0))


def weights_number(tick: Any, rank: Any, ranks: int, chunks: int, micro_batches: int) -> Any:
    """Returns which of the rank's first backward passes `weights_at` belongs to; negative: none."""
    return tick - num_ticks(ranks, chunks, micro_batches) + rank


def first_backward(rank: Any, ranks: int, chunks: int) -> Any:
    """Returns the tick of a rank's first backward pass."""
    return chunks * ranks + ranks - 1 - rank


def puts_off(tick: Any, ranks: int, chunks: int) -> Any:
    """Returns whether backward passes in this tick leave W for the last ticks: in the first p - 1 ticks with any."""
    return (tick >= chunks * ranks) & (tick < chunks * ranks + ranks - 1)


def _nth_pass(n: Any, ranks: int, chunks: int, micro_batches: int) -> TickPass:
    group, chunk, place = n // (chunks * ranks), n % (chunks * ranks) // ranks, n % ranks
    micro_batch = group * ranks + place
    return TickPass(chunk, micro_batch, (n >= 0) & (micro_batch < micro_batches))


def num_passes(ranks: int, chunks: int, micro_batches: int) -> int:
    """Returns the forward passes of a rank, with the holes of an incomplete last group: m' v, m' the next multiple of p."""
    return -(-micro_batches // ranks) * ranks * chunks


def num_ticks(ranks: int, chunks: int, micro_batches: int) -> int:
    """Returns m' v + p - 1 + v p. The first v p ticks have no backward pass, and the last v p ticks no forward pass."""
    return num_passes(ranks, chunks, micro_batches) + ranks - 1 + chunks * ranks


def pass_number(chunk: Any, micro_batch: Any, ranks: int, chunks: int) -> Any:
    """Returns the place of a forward pass in its rank's order, the index into `input_slots`."""
    return micro_batch // ranks * chunks * ranks + chunk * ranks + micro_batch % ranks


def input_slots(ranks: int, chunks: int, micro_batches: int) -> tuple[int, ...]:
    """Returns the slot that keeps the input of each forward pass of a rank, by `pass_number`. All ranks use one table.

    An input is kept from the tick of its forward pass up to and including the tick of its backward pass. Rank 0 keeps inputs
    longest, and the lowest free slot is taken. Long steps need `(chunks + 1) ranks` slots.
    """

    def interval(n: int) -> tuple[int, int]:
        return n, n + 2 * (chunks - n % (chunks * ranks) // ranks) * ranks - 1

    return tuple(lowest_free_slots(map(interval, range(num_passes(ranks, chunks, micro_batches)))))


def lowest_free_slots(intervals: Iterable[tuple[int, int]]) -> list[int]:
    """Returns the slot of each interval (first, last tick), in the order of their first ticks: the lowest that is free."""
    slots: list[int] = []
    free: list[int] = []
    held: list[tuple[int, int]] = []
    for begin, end in intervals:
        while held and held[0][0] < begin:
            heapq.heappush(free, heapq.heappop(held)[1])
        slots.append(heapq.heappop(free) if free else len(held))
        heapq.heappush(held, (end, slots[-1]))
    return slots
