"""Pipeline schedules as data: the order in which each rank computes its forward and backward passes.

A rank holds one or more chunks of the model's layers. A stage is a chunk's position in the model: stage 0 has the first layers.
Here are the types, the simplest schedule, 1F1B (Narayanan et al., arXiv 1806.03377), and two zero-bubble schedules. Their
gradients of weights (W) fill the time in which a rank would wait. ZB-H1 is from "Zero Bubble Pipeline Parallelism" (Qi et al.,
arXiv 2401.10241). ZB-V is from "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362). Nothing here imports JAX.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "b", "W"]


class Part(NamedTuple):
    """One pass of a chunk over a micro-batch: F (forward) or B (backward). B consists of b and W.

    Kind b computes the gradient of the chunk's inputs, and then W the gradients of its weights.
    """

    kind: Kind
    chunk: int
    micro_batch: int


Slot = tuple[Part, ...]
"""The passes that a rank computes as one unit: one part, an overlapped (F, B), or () for an idle tick."""


class Result(NamedTuple):
    """The result of a pass: outputs (F), gradients of inputs (b) or gradients of weights (W) of one stage and micro-batch."""

    kind: Literal["F", "b", "W"]
    direction: int
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: the passes of each rank in order, and the memory bounds that the schedule guarantees.

    Attributes:
      name: the name of the schedule in `moe-jax schedule`.
      ranks: the slots of each rank.
      stages: `stages[rank][chunk]`, the stage of a rank's chunk.
      directions: the stream of micro-batches that a chunk computes. DualPipe has two: stream 1 enters at the last rank.
      micro_batches: the micro-batches of one stream, numbered from 0.
      in_flight: the largest number of chunk inputs that each rank may hold. An input is held from its F to its W.
      weights_queue: the largest number of passes that each rank may hold between their b and their W.
    """

    name: str
    ranks: tuple[tuple[Slot, ...], ...]
    stages: tuple[tuple[int, ...], ...]
    directions: tuple[int, ...]
    micro_batches: int
    in_flight: tuple[int, ...]
    weights_queue: tuple[int, ...]

    @cached_property
    def num_stages(self) -> int:
        """The number of stages that the model is cut into."""
        return 1 + max(stage for chunks in self.stages for stage in chunks)

    @cached_property
    def owners(self) -> dict[tuple[int, int], int]:
        """Maps (direction, stage) to the rank that computes it."""
        return {
            (self.directions[chunk], stage): rank
            for rank, chunks in enumerate(self.stages)
            for chunk, stage in enumerate(chunks)
        }

    def results(self, rank: int, part: Part) -> list[Result]:
        """Returns the results that a part of `rank` produces. B produces the results of b and W."""
        kinds: tuple[Literal["F", "b", "W"], ...] = ("b", "W") if part.kind == "B" else (part.kind,)
        return [Result(kind, *self._place(rank, part)) for kind in kinds]

    def needs(self, rank: int, part: Part) -> list[Result]:
        """Returns the results that a part of `rank` waits for."""
        direction, stage, micro_batch = self._place(rank, part)
        if part.kind == "F":
            return [Result("F", direction, stage - 1, micro_batch)] if stage else []
        if part.kind == "W":
            return [Result("b", direction, stage, micro_batch)]
        needed = [Result("F", direction, stage, micro_batch)]
        if stage < self.num_stages - 1:
            needed.append(Result("b", direction, stage + 1, micro_batch))
        return needed

    def _place(self, rank: int, part: Part) -> tuple[int, int, int]:
        return self.directions[part.chunk], self.stages[rank][part.chunk], part.micro_batch


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Returns the 1F1B schedule: after `ranks - 1 - r` warm-up forward passes, rank r alternates one F and one B.

    Rank r holds `ranks - r` micro-batches.

    Raises:
      ValueError: a size is below 1.
    """
    require_positive(ranks=ranks, micro_batches=micro_batches)

    def slots(rank: int) -> Iterator[Slot]:
        ahead = min(ranks - 1 - rank, micro_batches)
        yield from (forward(0, i) for i in range(ahead))
        for i in range(micro_batches):
            if ahead + i < micro_batches:
                yield forward(0, ahead + i)
            yield backward(0, i)

    return Schedule(
        name="1f1b",
        ranks=tuple(tuple(slots(rank)) for rank in range(ranks)),
        stages=tuple((rank,) for rank in range(ranks)),
        directions=(0,),
        micro_batches=micro_batches,
        in_flight=tuple(min(ranks - rank, micro_batches) for rank in range(ranks)),
        weights_queue=(0,) * ranks,
    )


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """Returns the ZB-H1 schedule: 1F1B whose rank r postpones up to r + 1 passes W to fill its idle time at the end.

    Every rank holds up to `ranks` micro-batches. With fewer micro-batches than ranks it is legal, and its bubble is longer
    than the formula's.

    Raises:
      ValueError: a size is below 1.
    """
    require_positive(ranks=ranks, micro_batches=micro_batches)

    def slots(rank: int) -> Iterator[Slot]:
        ahead = min(ranks - 1 - rank, micro_batches)
        yield from (forward(0, i) for i in range(ahead))
        num_weights = 0
        for i in range(micro_batches):
            is_last_part = ahead + i >= micro_batches
            if not is_last_part:
                yield forward(0, ahead + i)
            yield (Part("b", 0, i),)
            if is_last_part or i + 1 - num_weights > rank:
                yield (Part("W", 0, num_weights),)
                num_weights += 1
        yield from ((Part("W", 0, i),) for i in range(num_weights, micro_batches))

    return Schedule(
        name="zb-h1",
        ranks=tuple(tuple(slots(rank)) for rank in range(ranks)),
        stages=tuple((rank,) for rank in range(ranks)),
        directions=(0,),
        micro_batches=micro_batches,
        in_flight=(min(ranks, micro_batches),) * ranks,
        weights_queue=tuple(min(rank + 1, micro_batches) for rank in range(ranks)),
    )


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """Returns the ZB-V schedule: rank r holds stages r and 2 ranks - 1 - r, so micro-batches go down the ranks and back up.

    With F = b = W no rank waits between its first and its last pass. A rank holds up to 2 `ranks` chunk inputs, which is
    1F1B's memory on rank 0. With fewer than 2 `ranks` - 1 micro-batches, it is a truncated longer step.

    Raises:
      ValueError: a size is below 1.
    """
    require_positive(ranks=ranks, micro_batches=micro_batches)
    enough = max(micro_batches, 2 * ranks - 1)

    def parts(rank: int) -> Iterator[Part]:
        forwards, inputs, weights = [0, 0], [0, 0], [0, 0]

        def next_of(kind: Kind, count: list[int], chunk: int) -> Part:
            count[chunk] += 1
            return Part(kind, chunk, count[chunk] - 1)

        for _ in range(2 * (ranks - rank) - 1):
            yield next_of("F", forwards, 0)
        for _ in range(rank):
            yield next_of("F", forwards, 1)
            yield next_of("F", forwards, 0)
        for _ in range(ranks - rank):
            yield next_of("F", forwards, 1)
            yield next_of("b", inputs, 1)
            yield next_of("W", weights, 1)
        while forwards[1] < enough:
            if forwards[0] < enough:
                yield next_of("F", forwards, 0)
            yield next_of("b", inputs, 0)
            yield next_of("W", weights, 0)
            yield next_of("F", forwards, 1)
            yield next_of("b", inputs, 1)
            yield next_of("W", weights, 1)
        for _ in range(rank):
            yield next_of("b", inputs, 0)
            yield next_of("b", inputs, 1)
        for _ in range(ranks - rank):
            yield next_of("b", inputs, 0)
            yield next_of("W", weights, 0)
        for chunk in (1, 0):
            while weights[chunk] < enough:
                yield next_of("W", weights, chunk)

    return Schedule(
        name="zb-v",
        ranks=tuple(tuple((part,) for part in parts(rank) if part.micro_batch < micro_batches) for rank in range(ranks)),
        stages=tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)),
        directions=(0, 0),
        micro_batches=micro_batches,
        in_flight=(min(2 * ranks, 2 * micro_batches),) * ranks,
        weights_queue=tuple(min(2 * rank + 1, 2 * micro_batches) for rank in range(ranks)),
    )


def forward(chunk: int, micro_batch: int) -> Slot:
    """Returns a slot of one forward pass."""
    return (Part("F", chunk, micro_batch),)


def backward(chunk: int, micro_batch: int) -> Slot:
    """Returns a slot of one whole backward pass."""
    return (Part("B", chunk, micro_batch),)


def require_positive(**sizes: int) -> None:
    """Raises a ValueError that names the first size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1; got {size}")
