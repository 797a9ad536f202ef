"""Ticks, slots and copies of the pipeline schedules other than `uniform`, for the model of cost.

Schedules from a table are priced in lockstep, as they run (`parallel.pipeline.executor`). The model knows no cost of a
branch. ZB-H1 was measured a third slower than its ticks (docs/performance.md, "Schedules from a table").
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

from moe_jax.cost.layer import ELEMENT
from moe_jax.cost.parameters import operand_elements
from moe_jax.cost.planned_step import PlannedStep
from moe_jax.parallel.choices import UNIFORM, PipeSchedule
from moe_jax.parallel.pipeline.limits import schedule_by_name, split_axes
from moe_jax.parallel.pipeline.schedules import Schedule
from moe_jax.parallel.pipeline.simulator import PassTimes, simulate
from moe_jax.parallel.pipeline.table import SlotKind, lockstep_table, undivided


class Ticks(NamedTuple):
    """The lockstep ticks of a schedule from a table."""

    number: int
    hops: int
    """Transfers between different ranks behind each tick."""
    pairs: float
    """Share of the forward passes that overlap with a backward pass."""
    slots: Mapping[SlotKind, int]


def ticks(step: PlannedStep) -> Ticks:
    """Returns the ticks and slots of a step whose schedule runs from a table."""
    return _of_table(*_key(step))


def lockstep_seconds(step: PlannedStep, forward: float, backward: float, weights: float, overlapped: float) -> float:
    """Returns the seconds of all ticks without hops, from those of a chunk's passes."""
    return simulate(_schedule(*_key(step)), PassTimes(forward, backward, weights, overlapped), lockstep=True).makespan


def stage_copies(step: PlannedStep) -> float:
    """Returns how many of a rank's layers come from another rank for a step, in shares of its own layers."""
    return {"dualpipe": 1.0, "zb-v": 0.5, "dualpipe-v": 0.5}.get(step.pipe_schedule, 0.0)


def product_bytes(step: PlannedStep) -> float:
    """Returns the bytes of the products that wait for W: operands of all matrices of a chunk, in each place."""
    places = step.mesh.pipe - 1 if step.pipe_schedule == "uniform-w" else 0
    if step.pipe_schedule not in UNIFORM:
        places = ticks(step).slots["product"]
    return places * step.layers_of_chunk * ELEMENT * step.tokens * operand_elements(step.config)


def _key(step: PlannedStep) -> tuple[PipeSchedule, int, int, int, bool]:
    axes = {"fsdp": step.mesh.fsdp, "expert": step.mesh.expert, "context": step.mesh.context}
    return step.pipe_schedule, step.mesh.pipe, step.pipe_chunks, step.gradient_accumulation, bool(split_axes(axes))


@functools.cache
def _schedule(name: PipeSchedule, ranks: int, chunks: int, micro_batches: int, split: bool) -> Schedule:
    found = schedule_by_name(name, ranks, chunks, micro_batches)
    return undivided(found) if split else found


@functools.cache
def _of_table(*key) -> Ticks:
    schedule = _schedule(*key)
    table = lockstep_table(schedule)
    passes = [slot for slots in schedule.ranks for slot in slots if any(part.kind == "F" for part in slot)]
    hops = sum(distance != 0 for distance in (*table.forward_hops, *table.backward_hops))
    return Ticks(table.spans[-1].ends, hops, sum(len(slot) == 2 for slot in passes) / len(passes), table.sizes)
