"""The sums of a tile of FP8 operands: every 128 summands the tensor core's sums are scaled and added to f32 sums.

The tensor core keeps about 14 bits of a sum of FP8 products. So it sums 128 of them, from zero. The scales of these 128 are one
number for a row and one for 128 columns:

    total += (row's scale * matrix's scale) * sum of the step

    roles     consumers: for each step wait, then for each block of 64 x 128 of the warpgroup: wgmma, wait for it, promote
              one consumer promotes while the other's wgmma runs
    registers 64 sums of a block, 64 totals of each block: 192 with two blocks
    invariant scales of a step are read one step ahead, from memory, by the threads that multiply with them
              a slot is released when the last block's wgmma has read it, before that block is promoted
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.experts.fp8.quantise import GROUP
from moe_jax.kernels.hopper.mainloop import TileProgram, TileShape, TileSteps, release_others
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS, Pipeline

STEP = GROUP
"""Summands of a step: one row of the 128-byte swizzle, and what a scale stands for."""

BLOCK = (WGMMA_ROWS, GROUP)
"""Rows and columns that are multiplied and promoted at a time."""


class Place(NamedTuple):
    """The place of a block of 64 x 128 in the rows and columns of a warpgroup."""

    row: int
    column: int


class StepScales(NamedTuple):
    """The scales of one step."""

    rows: dict[int, Any]
    """For the first row of each block: [64] f32, in registers."""
    columns: dict[int, Any]
    """For the first column of each block: a number."""


def places(shape: TileShape) -> list[Place]:
    """Returns the blocks of a warpgroup, row by row."""
    rows, columns = range(0, shape.warpgroup_rows, WGMMA_ROWS), range(0, shape.warpgroup_columns, GROUP)
    return [Place(row, column) for row in rows for column in columns]


def accumulate(
    coord,
    warpgroup,
    steps: TileSteps,
    program: TileProgram,
    pipe: Pipeline,
    shape: TileShape,
    *,
    read_scales: Callable[[Any, Any, Any], StepScales],
) -> dict[Place, Any]:
    """Returns the sums of a warpgroup's blocks, each [64, 128] f32: `TileProgram.accumulate`.

    Args:
        read_scales: (coord, warpgroup, number of the step in the tile) -> its scales.
    """
    blocks = places(shape)

    def step(k, carry):
        totals, scales = carry
        following = read_scales(coord, warpgroup, jnp.minimum(k + 1, steps.total - 1))
        slot = pipe.slot(steps.before + k)
        pipe.wait(slot, consumer=warpgroup)
        new = {}
        for place in blocks:
            sums = pl.run_scoped(partial(_multiply, program, slot, place, warpgroup), plgpu.ACC(BLOCK, jnp.float32))
            if place == blocks[-1]:
                pipe.release(slot)
            new[place] = totals[place] + _of_rows(scales, place) * sums
        return new, following

    zeros = plgpu.layout_cast(jnp.zeros(BLOCK, jnp.float32), plgpu.Layout.WGMMA)
    first = read_scales(coord, warpgroup, jnp.int32(0))
    totals, _ = lax.fori_loop(0, steps.multiplied, step, ({place: zeros for place in blocks}, first))
    release_others(steps, pipe, warpgroup)
    return totals


def _multiply(program: TileProgram, slot, place: Place, warpgroup, accumulator):
    program.multiply(accumulator, slot, place, warpgroup)
    plgpu.wgmma_wait(0)
    return accumulator[...]


def _of_rows(scales: StepScales, place: Place):
    return lax.broadcast_in_dim(scales.rows[place.row] * scales.columns[place.column], BLOCK, [0])
