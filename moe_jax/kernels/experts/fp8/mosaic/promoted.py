"""The sums of a tile of FP8 operands: every 128 summands the tensor core's sums are scaled and added to f32 sums.

The tensor core keeps about 14 bits of a sum of FP8 products. So it sums 128 of them, from zero. The scales of these 128 are one
number for a row and one for 128 columns:

    total += (row's scale * matrix's scale) * sum of the step

    roles     consumers: for each step wait, then for each block of 64 x 128 of the warpgroup: wgmma, wait for it, promote
              one consumer promotes while the other's wgmma runs
    registers 64 sums of a block, 64 totals of each block: 192 with two blocks
    scales    of rows: 4 bytes a row in the slot, copied by TMA with the operands
              of matrices: read from memory one step ahead, mostly from the L1 cache, where 8 steps lie side by side
    invariant a slot is released when the last block's wgmma has read it, before that block is promoted
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.experts.fp8.quantise import GROUP
from moe_jax.kernels.hopper.interpreter import finish_reading
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
    scales_of_rows: Callable[[Any, int, Any], Any],
    scales_of_columns: Callable[[Any, int, Any, Any], Any],
) -> dict[Place, Any]:
    """Returns the sums of a warpgroup's blocks, each [64, 128] f32: `TileProgram.accumulate`.

    Args:
        scales_of_rows: (slot, first row of a block, warpgroup) -> [64] f32, in registers.
        scales_of_columns: (coord, first column of a block, warpgroup, number of the step) -> a number.
    """
    blocks = places(shape)
    first_rows, first_columns = ({place[axis]: None for place in blocks} for axis in (0, 1))

    def columns_of(k):
        return {column: scales_of_columns(coord, column, warpgroup, k) for column in first_columns}

    def step(k, carry):
        totals, columns = carry
        following = columns_of(jnp.minimum(k + 1, steps.total - 1))
        slot = pipe.slot(steps.before + k)
        pipe.wait(slot, consumer=warpgroup)
        rows = {row: scales_of_rows(slot, row, warpgroup) for row in first_rows}
        new = {}
        for place in blocks:
            sums = pl.run_scoped(partial(_multiply, program, slot, place, warpgroup), plgpu.ACC(BLOCK, jnp.float32))
            if place == blocks[-1]:
                finish_reading()
                pipe.release(slot)
            new[place] = totals[place] + lax.broadcast_in_dim(rows[place.row] * columns[place.column], BLOCK, [0]) * sums
        return new, following

    zeros = plgpu.layout_cast(jnp.zeros(BLOCK, jnp.float32), plgpu.Layout.WGMMA)
    first = {place: zeros for place in blocks}, columns_of(jnp.int32(0))
    totals, _ = lax.fori_loop(0, steps.multiplied, step, first)
    release_others(steps, pipe, warpgroup)
    return totals


def _multiply(program: TileProgram, slot, place: Place, warpgroup, accumulator):
    program.multiply(accumulator, slot, place, warpgroup)
    plgpu.wgmma_wait(0)
    return accumulator[...]
