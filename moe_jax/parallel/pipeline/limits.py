"""Checks which meshes a pipeline schedule can run on, from plain values, for settings, plans and `Parallelism`."""

from collections.abc import Mapping
from typing import get_args

from moe_jax.layers.matrices import SPLIT
from moe_jax.parallel.choices import CHOOSES_CHUNKS, PipeSchedule
from moe_jax.parallel.pipeline.dual_pipe import dualpipe, dualpipe_v
from moe_jax.parallel.pipeline.schedules import Schedule, one_f_one_b, zb_h1, zb_v
from moe_jax.parallel.pipeline.ticks import interleaved, uniform, uniform_w

NEEDS_W: Mapping[PipeSchedule, str] = {
    "uniform-w": "'uniform'",
    "zb-h1": "'1f1b', 'interleaved', 'dualpipe' or 'dualpipe-v'",
    "zb-v": "'1f1b', 'interleaved', 'dualpipe' or 'dualpipe-v'",
}
"""The schedules that need separate b and W, and the alternatives if matrices are split."""


def ranks_problem(name: str, ranks: int, chunks: int) -> str:
    """Returns why a schedule cannot run with these ranks and chunks; an empty string if it can."""
    if name not in get_args(PipeSchedule):
        return f"pipe_schedule={name!r} must be one of {', '.join(get_args(PipeSchedule))}"
    if name != "uniform" and ranks == 1:
        return f"pipe_schedule={name!r} needs several devices along the mesh axis pipe"
    wanted = chunks if name in CHOOSES_CHUNKS else 2 if name in ("zb-v", "dualpipe-v") else 1
    if chunks != wanted:
        return f"pipe_schedule={name!r} needs pipe_chunks={wanted}; got {chunks}"
    if name == "dualpipe" and ranks % 2:
        return f"pipe_schedule='dualpipe' needs an even number of ranks, for it starts at both ends; got {ranks}"
    return ""


def split_problem(name: PipeSchedule, axes: Mapping[str, int]) -> str:
    """Returns why a schedule cannot run if these mesh axes split matrices within a rank; an empty string if it can."""
    split = split_axes(axes)
    if not split or name not in NEEDS_W:
        return ""
    return (
        f"pipe_schedule={name!r} divides the backward pass, for which each rank must hold whole matrices; "
        f"{', '.join(split)} of this mesh split them: take {NEEDS_W[name]}"
    )


def schedule_problem(name: PipeSchedule, axes: Mapping[str, int], chunks: int, micro_batches: int) -> str:
    """Returns why a schedule cannot run on this mesh with these micro-batches; an empty string if it can."""
    ranks = axes.get("pipe", 1)
    problem = ranks_problem(name, ranks, chunks)
    if problem or name == "uniform":
        return problem
    if problem := split_problem(name, axes):
        return problem
    try:
        schedule_by_name(name, ranks, chunks, micro_batches)
    except ValueError as error:
        return f"pipe_schedule={name!r}: {error}"
    return ""


def split_axes(axes: Mapping[str, int]) -> list[str]:
    """Returns the mesh axes with several devices that split matrices within a pipeline rank."""
    return [axis for axis in SPLIT if axes.get(axis, 1) > 1]


def schedule_by_name(name: PipeSchedule, ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """Builds the named schedule; `chunks` is ignored by schedules with a fixed number of chunks.

    Raises:
      ValueError: sizes that the schedule refuses.
    """
    with_chunks = {"interleaved": interleaved, "uniform": uniform, "uniform-w": uniform_w}
    if name in with_chunks:
        return with_chunks[name](ranks, chunks, micro_batches)
    make = {"1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-v": zb_v, "dualpipe": dualpipe, "dualpipe-v": dualpipe_v}
    return make[name](ranks, micro_batches)
