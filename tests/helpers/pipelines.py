"""Pipeline schedules for tests: all of them by name, and the times of a stage."""

from dataclasses import replace

from hypothesis import strategies as st

from moe_jax.parallel import pipeline
from moe_jax.parallel.choices import CHOOSES_CHUNKS
from moe_jax.parallel.pipeline import PassTimes, Schedule

MAKE = {
    "1f1b": lambda ranks, chunks, micro_batches: pipeline.one_f_one_b(ranks, micro_batches),
    "interleaved": pipeline.interleaved,
    "uniform": pipeline.uniform,
    "uniform-w": pipeline.uniform_w,
    "zb-h1": lambda ranks, chunks, micro_batches: pipeline.zb_h1(ranks, micro_batches),
    "zb-v": lambda ranks, chunks, micro_batches: pipeline.zb_v(ranks, micro_batches),
    "dualpipe": lambda ranks, chunks, micro_batches: pipeline.dualpipe(ranks, micro_batches),
    "dualpipe-v": lambda ranks, chunks, micro_batches: pipeline.dualpipe_v(ranks, micro_batches),
}
"""{name: function of (ranks, chunks, micro_batches)}."""

UNIT = PassTimes(forward=1, backward=2, weights=1, overlapped=3)
"""The times for which formulas are exact."""


def of_stage(schedule: Schedule, of_rank: PassTimes) -> PassTimes:
    """Returns the times of a stage from the times of a rank's share of the layers."""
    return of_rank.divided(schedule.num_stages / len(schedule.ranks))


def is_legal(name: str, ranks: int, chunks: int, micro_batches: int) -> bool:
    """Returns whether a schedule takes these sizes."""
    if name in CHOOSES_CHUNKS:
        return ranks > 1 or chunks == 1
    if name == "dualpipe" and (ranks % 2 or micro_batches % 2):
        return False
    return not name.startswith("dualpipe") or micro_batches >= 2 * ranks


@st.composite
def schedules(draw, names=tuple(MAKE)) -> Schedule:
    """Any schedule of up to 8 ranks, 6 chunks and 40 micro-batches."""
    name = draw(st.sampled_from(names))
    sizes = st.tuples(st.integers(1, 8), st.integers(1, 6), st.integers(1, 40))
    return MAKE[name](*draw(sizes.filter(lambda found: is_legal(name, *found))))


def with_swapped(schedule: Schedule, rank: int, first: int, second: int) -> Schedule:
    """Returns the schedule with two slots of a rank in each other's place."""
    slots = list(schedule.ranks[rank])
    slots[first], slots[second] = slots[second], slots[first]
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(slots), *schedule.ranks[rank + 1 :]))


def text(slot) -> str:
    """`F0.3` for the forward pass of chunk 0 and micro-batch 3, `F0.3&B1.1` for an overlapped pair."""
    return "&".join(f"{part.kind}{part.chunk}.{part.micro_batch}" for part in slot)


def listing(slots) -> str:
    """The slots of a rank in a line."""
    return " ".join(map(text, slots))
