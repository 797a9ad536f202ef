"""Checks which meshes a pipeline schedule can run on, from plain values, for settings, plans and `Parallelism`."""

from collections.abc import Mapping
from typing import get_args

from moe_jax.layers.matrices import SPLIT
from moe_jax.parallel.choices import CHOOSES_CHUNKS, PipeSchedule
from moe_jax.parallel.expert.settings import NEEDS_ONE_CALL, ExpertParallel
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


def split_problem(name: PipeSchedule, axes: Mapping[str, int], expert: ExpertParallel | None, *, frozen: bool = False) -> str:
    """Returns why a schedule cannot run because matrices are frozen, or split on a mesh of these axes; empty if it can."""
    if name not in NEEDS_W or divides_backward(axes, expert, frozen=frozen):
        return ""
    if frozen:
        return f"pipe_schedule={name!r} postpones gradients of weights, and frozen weights have none: use {NEEDS_W[name]}"
    split = split_axes(axes)
    cure = f", or let experts compute in one call ({NEEDS_ONE_CALL})" if split == ["expert"] else ""
    return (
        f"pipe_schedule={name!r} divides the backward pass, for which each rank must hold whole matrices; "
        f"{', '.join(split)} of this mesh split them: use {NEEDS_W[name]}{cure}"
    )


def divides_backward(axes: Mapping[str, int], expert: ExpertParallel | None, *, frozen: bool = False) -> bool:
    """Returns True if b and W can be apart: matrices have gradients, and each device has them whole.

    Experts may be split if a device computes its own in one call.
    """
    split = split_axes(axes)
    is_one_call = split == ["expert"] and expert is not None and expert.is_one_call(axes["expert"])
    return not frozen and (not split or is_one_call)


def schedule_problem(
    name: PipeSchedule,
    axes: Mapping[str, int],
    chunks: int,
    micro_batches: int,
    expert: ExpertParallel | None,
    *,
    frozen: bool = False,
) -> str:
    """Returns why a schedule cannot order a step on a mesh of these axes; empty if it can.

    Args:
      expert: how tokens travel to experts, if these are on several devices.
      frozen: adapters are trained on frozen weights.
    """
    ranks = axes.get("pipe", 1)
    problem = ranks_problem(name, ranks, chunks)
    if problem or name == "uniform":
        return problem
    if problem := split_problem(name, axes, expert, frozen=frozen):
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
