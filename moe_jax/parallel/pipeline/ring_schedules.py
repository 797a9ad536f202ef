"""Schedules whose micro-batches go round the ring of ranks once a chunk: interleaved 1F1B, and the same in uniform ticks."""

from collections.abc import Iterator
from dataclasses import replace

from moe_jax.parallel.pipeline.schedules import Kind, Part, Schedule, Slot, one_f_one_b, require_positive
from moe_jax.parallel.pipeline.ticks import TickPass, backward_at, forward_at, num_ticks, puts_off, weights_at


def interleaved(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """Returns interleaved 1F1B (Narayanan et al., arXiv 2104.04473): each rank holds `chunks` chunks of layers.

    Chunk c of rank r is stage c * ranks + r. A rank computes the passes of `uniform` in their order, and in each tick the
    backward pass first. Rank r therefore holds up to `(chunks + 1) ranks - 2 r - 1` chunk inputs. With one chunk the order is
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

    `moe_jax.parallel.pipeline.ticks` has the arithmetic. All ranks can run one program, because every tick computes the same
    on all of them and masks what does not exist. Rank r holds up to `(chunks + 1) ranks - 2 r` chunk inputs.

    Raises:
      ValueError: a size is below 1, or there are several chunks on one rank.
    """
    _require_ring(ranks, chunks, micro_batches)
    sizes = (ranks, chunks, micro_batches)
    return Schedule(
        name="uniform",
        ranks=tuple(tuple(uniform_slot(tick, rank, *sizes) for tick in range(num_ticks(*sizes))) for rank in range(ranks)),
        stages=_stages(ranks, chunks),
        directions=(0,) * chunks,
        micro_batches=micro_batches,
        in_flight=tuple(min((chunks + 1) * ranks - 2 * rank, chunks * micro_batches) for rank in range(ranks)),
        weights_queue=(0,) * ranks,
    )


def uniform_w(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """Returns `uniform` with W put off: the first p - 1 ticks with backward passes compute b alone, the last p - 1 ticks W.

    Rank r puts off its first r backward passes and has nothing else to do in the last r ticks. The first of these ticks are
    shorter by W, and the last are as long as before. Rank r holds r more chunk inputs.

    Raises:
      ValueError: as `uniform`.
    """
    plain, sizes = uniform(ranks, chunks, micro_batches), (ranks, chunks, micro_batches)
    return replace(
        plain,
        name="uniform-w",
        ranks=tuple(tuple(uniform_w_slot(tick, rank, *sizes) for tick in range(num_ticks(*sizes))) for rank in range(ranks)),
        in_flight=tuple(held + rank for rank, held in enumerate(plain.in_flight)),
        weights_queue=tuple(range(ranks)),
    )


def uniform_w_slot(tick: int, rank: int, ranks: int, chunks: int, micro_batches: int) -> Slot:
    """Returns what a rank computes in a tick of `uniform_w`."""
    sizes = (ranks, chunks, micro_batches)
    kind: Kind = "b" if puts_off(tick, ranks, chunks) else "B"
    parts = *_part("F", forward_at(tick, rank, *sizes)), *_part(kind, backward_at(tick, rank, *sizes))
    return (*parts, *_part("W", weights_at(tick, rank, *sizes)))


def uniform_slot(tick: int, rank: int, ranks: int, chunks: int, micro_batches: int) -> Slot:
    """Returns what a rank computes in a tick of `uniform`."""
    sizes = (ranks, chunks, micro_batches)
    return (*_part("F", forward_at(tick, rank, *sizes)), *_part("B", backward_at(tick, rank, *sizes)))


def _part(kind: Kind, found: TickPass) -> tuple[Part, ...]:
    return (Part(kind, found.chunk, found.micro_batch),) if found.exists else ()


def _stages(ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(chunk * ranks + rank for chunk in range(chunks)) for rank in range(ranks))


def _require_ring(ranks: int, chunks: int, micro_batches: int) -> None:
    require_positive(ranks=ranks, chunks=chunks, micro_batches=micro_batches)
    if ranks == 1 and chunks > 1:
        raise ValueError(f"chunks must be 1 with one rank, whose neighbour is itself; got {chunks}")
