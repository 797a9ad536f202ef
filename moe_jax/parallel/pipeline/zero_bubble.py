"""Zero-bubble schedules: the gradients of weights (W) fill the time in which a rank would wait.

ZB-H1 is of Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241. ZB-V is of Qi et al., "Pipeline Parallelism with
Controllable Memory", arXiv 2405.15362.
"""

from collections.abc import Iterator

from moe_jax.parallel.pipeline.schedules import Kind, Part, Schedule, Slot, forward, require_positive


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """Returns ZB-H1: 1F1B whose rank r puts off up to r + 1 passes W, which it computes while it would wait at the end.

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
    """Returns ZB-V: rank r holds stages r and 2 ranks - 1 - r, so that a micro-batch goes down the ranks and up again.

    With F = b = W no rank waits between its first and its last pass. A rank holds up to 2 `ranks` chunk inputs, which is
    1F1B's memory on rank 0. A step of fewer than 2 `ranks` - 1 micro-batches is a longer step without the others.

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
