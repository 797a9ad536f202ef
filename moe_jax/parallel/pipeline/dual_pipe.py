"""DualPipe and DualPipeV: forward passes of some micro-batches overlapped with backward passes of others.

DualPipe is from the DeepSeek-V3 report, arXiv 2412.19437. The order of passes follows DeepSeek's code
(github.com/deepseek-ai/DualPipe), in its eight phases.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from moe_jax.parallel.pipeline.schedules import Part, Schedule, Slot, require_positive


class Phases(NamedTuple):
    """The number of times that a rank repeats each of DualPipe's eight phases.

    Chunk "own" computes the micro-batches that enter at the rank's nearer end, chunk "other" the rest.
    """

    own_forward: int
    both_forward: int
    other_b_w_forward: int
    overlapped: int
    backward_then_overlapped: int
    both_backward: int
    weights_then_own_b: int
    weights: int


def dualpipe(ranks: int, micro_batches: int) -> Schedule:
    """Returns the DualPipe schedule: half of the micro-batches enter at rank 0, half at the last rank.

    Rank r holds stage r (chunk 0) and stage ranks - 1 - r (chunk 1), so every stage is on two ranks. A rank holds up to `ranks`
    + 1 chunk inputs. At distance h from the nearer end, it postpones up to h + 1 passes W. `micro_batches` counts both halves;
    parts number the micro-batches of each half from 0.

    Raises:
      ValueError: `ranks` or `micro_batches` is odd or below 1, or micro_batches < 2 ranks.
    """
    require_positive(ranks=ranks, micro_batches=micro_batches)
    for name, number in {"ranks": ranks, "micro_batches": micro_batches}.items():
        if number % 2:
            raise ValueError(f"{name} must be even, for DualPipe starts at both ends; got {number}")
    _require_two_per_rank("DualPipe", ranks, micro_batches)
    half = ranks // 2
    return Schedule(
        name="dualpipe",
        ranks=tuple(
            _slots(dualpipe_phases(ranks, micro_batches, rank), own=int(rank >= half), is_middle=rank in (half - 1, half))
            for rank in range(ranks)
        ),
        stages=tuple((rank, ranks - 1 - rank) for rank in range(ranks)),
        directions=(0, 1),
        micro_batches=micro_batches // 2,
        in_flight=(ranks + 1,) * ranks,
        weights_queue=tuple(min(rank, ranks - 1 - rank) + 1 for rank in range(ranks)),
    )


def dualpipe_v(ranks: int, micro_batches: int) -> Schedule:
    """Returns the DualPipeV schedule: half of DualPipe, folded so that micro-batches go down the ranks and back up.

    Rank r holds stages r and 2 ranks - 1 - r, so every stage is on one rank. A rank holds up to 2 `ranks` + 1 chunk inputs, and
    postpones up to r + 1 passes W.

    Raises:
      ValueError: a size is below 1, or micro_batches < 2 ranks.
    """
    require_positive(ranks=ranks, micro_batches=micro_batches)
    _require_two_per_rank("DualPipeV", ranks, micro_batches)
    return Schedule(
        name="dualpipe-v",
        ranks=tuple(_slots(_phases(ranks, rank, micro_batches), own=0, is_middle=rank == ranks - 1) for rank in range(ranks)),
        stages=tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)),
        directions=(0, 0),
        micro_batches=micro_batches,
        in_flight=(2 * ranks + 1,) * ranks,
        weights_queue=tuple(rank + 1 for rank in range(ranks)),
    )


def dualpipe_phases(ranks: int, micro_batches: int, rank: int) -> Phases:
    """Returns how often a rank of `dualpipe` repeats each phase."""
    return _phases(ranks // 2, min(rank, ranks - 1 - rank), micro_batches // 2)


def _phases(half: int, distance: int, micro_batches: int) -> Phases:
    """Returns the phases at `distance` from an end, for `half` ranks up to the middle and `micro_batches` per stream."""
    to_middle = half - distance - 1
    return Phases(
        own_forward=2 * to_middle,
        both_forward=distance + 1,
        other_b_w_forward=to_middle,
        overlapped=micro_batches - 2 * half + distance + 1,
        backward_then_overlapped=to_middle,
        both_backward=distance + 1,
        weights_then_own_b=to_middle,
        weights=distance + 1,
    )


def _slots(phases: Phases, own: int, is_middle: bool) -> tuple[Slot, ...]:
    """Returns the slots of a rank. Passes W come in the order of their passes b."""
    other = 1 - own
    forwards, backwards = [0, 0], [0, 0]
    waiting: deque[Part] = deque()

    def f(chunk: int) -> Slot:
        forwards[chunk] += 1
        return (Part("F", chunk, forwards[chunk] - 1),)

    def b(chunk: int) -> Slot:
        backwards[chunk] += 1
        waiting.append(Part("W", chunk, backwards[chunk] - 1))
        return (waiting[-1]._replace(kind="b"),)

    def whole(chunk: int) -> Slot:
        backwards[chunk] += 1
        return (Part("B", chunk, backwards[chunk] - 1),)

    def w() -> Slot:
        return (waiting.popleft(),)

    def all_slots() -> Iterator[Slot]:
        for _ in range(phases.own_forward):
            yield f(own)
        for _ in range(phases.both_forward):
            yield f(own)
            yield f(other)
        for _ in range(phases.other_b_w_forward):
            yield b(other)
            yield w()
            yield f(other)
        for i in range(phases.overlapped):
            if is_middle and i == 0:
                # Overlapped, B would begin together with F, although its gradients could arrive while F is computed.
                yield f(own)
                yield whole(other)
            else:
                yield f(own) + whole(other)
            yield f(other) + whole(own)
        for _ in range(phases.backward_then_overlapped):
            yield whole(other)
            yield f(other) + whole(own)
        # From the middle of this phase on, W is postponed so that the neighbours get their gradients earlier.
        num_whole = phases.both_backward
        for i in range(2 * phases.both_backward):
            chunk = other if i % 2 == 0 else own
            yield whole(chunk) if i < num_whole else b(chunk)
        for _ in range(phases.weights_then_own_b):
            yield w()
            yield b(own)
        for _ in range(phases.weights):
            yield w()

    return tuple(all_slots())


def _require_two_per_rank(name: str, ranks: int, micro_batches: int) -> None:
    if micro_batches < 2 * ranks:
        raise ValueError(f"micro_batches must be at least 2 * ranks = {2 * ranks} for {name}; got {micro_batches}")
