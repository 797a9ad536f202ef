"""The main loop of FP8 matmuls: every 128 summands the tensor core's sums are scaled and added to f32 sums.

The tensor core keeps about 14 bits of a sum of FP8 products. So it sums 128 of them, starting from zero. These 128 have one
scale per row and one per 128 columns:

    total += (row's scale * matrix's scale) * sum of the step

    roles     producer and consumers of hopper/mainloop.py, persistent blocks, one ring of slots for all tiles of a block
              consumers: for each step wait, then for each block of 64 x 128 of the warpgroup: wgmma, wait for it, promote
    time      one consumer promotes while the other's wgmma runs
              producer    |L0    L1    L2
              consumer 0      |M0 p M0 p M1 p M1 p
              consumer 1          |M0 p M0 p M1 p M1 p
    registers 64 sums of a block, 64 totals of each block: 192 with two blocks. With more registers than a kernel needs, ptxas
              starts the second block's wgmma before the first is promoted, and spills in the loop (`Epilogue.registers`)
    scales    travel with the operands. Loads from memory would stall the warpgroup for their whole latency, even if the number
              is used a step later: ptxas immediately moves values that are equal in all threads to a uniform register
              TMA copies at least 16 bytes, which begin at a multiple of 16 bytes of a row. A copy that begins elsewhere stops
              the kernel with "illegal instruction". So a slot gets four scales of the matrix (PIECE) that include its steps'
              scales, and a consumer selects these
    invariant a slot is released when the last block's wgmma has read it, before that block is promoted
              a tile's coordinates are read while the previous tile is computed
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.experts.fp8.quantise import GROUP
from moe_jax.kernels.hopper.interpreter import finish_reading
from moe_jax.kernels.hopper.mainloop import TileShape
from moe_jax.kernels.hopper.pipeline import CONSUMERS, WGMMA_ROWS, Pipeline, Registers, run_roles

STEP = GROUP
"""Summands of a step: one row of the 128-byte swizzle, with one scale."""


@dataclass(frozen=True)
class Fp8TileShape(TileShape):
    """A tile whose slots hold several steps, to load longer pieces of the matrix's rows at a time."""

    steps_of_slot: int = 1
    block_columns: int = GROUP
    """Columns that are multiplied and promoted at a time."""


BLOCK = (WGMMA_ROWS, GROUP)
"""Rows and columns that are multiplied and promoted at a time, in most tiles."""


class Place(NamedTuple):
    """The position of a 64 x 128 block within a warpgroup's part of a tile."""

    row: int
    column: int


def places(shape: Fp8TileShape) -> list[Place]:
    """Returns the blocks of a warpgroup's part of a tile, row by row."""
    rows, columns = range(0, shape.warpgroup_rows, WGMMA_ROWS), range(0, shape.warpgroup_columns, shape.block_columns)
    return [Place(row, column) for row in rows for column in columns]


class SlotStep(NamedTuple):
    """One step of a tile's sum, within the pipeline slot that holds its operands."""

    number: Any
    """Number of the slot in its tile."""
    slot: Any
    step: int
    """Number of the step in its slot."""


@dataclass(frozen=True)
class PromotedProgram:
    """The callbacks in which FP8 matmul kernels differ. `coord` is the result of `locate` for a tile."""

    locate: Callable[[jax.Array], Any]
    """tile index -> coord."""
    load: Callable[[Any, Any, Any, Any], None]
    """Producer: (coord, number of the slot in the tile, slot, full barrier) starts the copies of the steps of one slot."""
    multiply: Callable[[Any, SlotStep, Place, Any], None]
    """Consumer: (accumulator reference, step, block, warpgroup) issues the wgmma of one block and step."""
    factor: Callable[[SlotStep, Place, Any], Any]
    """Consumer: (step, block, warpgroup) -> [64] f32, in registers, or one number for all rows."""
    prologue: Callable[[Any, Any], None]
    """Consumer: (coord, warpgroup) runs before the tile's first step."""
    epilogue: Callable[[dict[Place, Any], Any, Any], None]
    """Consumer: (sums of the blocks, coord, warpgroup) stores the result."""
    has_rows: Callable[[Any, Any], Any]
    """Consumer: (coord, warpgroup) -> False if no row of the warpgroup is used. It then leaves the tensor cores to the other
    consumer, and its sums are zero."""


def run_tiles(
    num_tiles: jax.Array, num_slots: int, program: PromotedProgram, shape: Fp8TileShape, slots: Pipeline, registers: Registers
) -> None:
    """Runs the producer and consumers over a thread block's share of `num_tiles` tiles. Call it in every warpgroup.

    Args:
        num_slots: slots that a tile fills in turn.
    """

    def locate(index):
        return program.locate(jnp.clip(index, 0, jnp.maximum(num_tiles - 1, 0)))

    first = lax.axis_index("block")

    def produce():
        @plgpu.nd_loop((num_tiles,), collective_axes="block", init_carry=(jnp.int32(0), locate(first)))
        def result(info, carry):
            before, coord = carry
            following = locate(info.index[0] + lax.axis_size("block"))
            consumer = _active_consumer(info) if shape.ping_pong else 0

            @pl.loop(0, num_slots)
            def _slots(k):
                slots.acquire(before + k)
                slot = slots.slot(before + k)
                program.load(coord, k, slot, slots.full_barrier(slot, consumer=consumer))

            return before + num_slots, following

        slots.drain(result[0])

    def consume(warpgroup):
        @plgpu.nd_loop((num_tiles,), collective_axes="block", init_carry=(jnp.int32(0), locate(first)))
        def _tiles(info, carry):
            before, coord = carry
            following = locate(info.index[0] + lax.axis_size("block"))

            def compute():
                program.prologue(coord, warpgroup)
                sums = _sums(coord, warpgroup, before, num_slots, program, shape, slots)
                program.epilogue(sums, coord, warpgroup)

            if shape.ping_pong:
                pl.when(_active_consumer(info) == warpgroup)(compute)
            else:
                compute()
            return before + num_slots, following

        plgpu.wait_smem_to_gmem(0)

    run_roles(produce, consume, registers)


def _sums(
    coord, warpgroup, before, num_slots, program: PromotedProgram, shape: Fp8TileShape, slots: Pipeline
) -> dict[Place, Any]:
    """Returns the sums of a warpgroup's blocks, each [64, columns of a block] f32. Every slot is waited for and released."""
    blocks = places(shape)
    own_slots = jnp.where(program.has_rows(coord, warpgroup), num_slots, 0)
    last, block = shape.steps_of_slot - 1, (WGMMA_ROWS, shape.block_columns)

    def step(k, totals):
        slot = slots.slot(before + k)
        slots.wait(slot, consumer=warpgroup)
        for i in range(shape.steps_of_slot):
            own = SlotStep(k, slot, i)
            factors = {place: program.factor(own, place, warpgroup) for place in blocks}
            new = {}
            for place in blocks:
                sums = pl.run_scoped(partial(_multiply, program, own, place, warpgroup), plgpu.ACC(block, jnp.float32))
                if (i, place) == (last, blocks[-1]):
                    finish_reading()
                    slots.release(slot)
                factor = factors[place]
                new[place] = totals[place] + (lax.broadcast_in_dim(factor, block, [0]) if factor.ndim else factor) * sums
            totals = new
        return totals

    zeros = plgpu.layout_cast(jnp.zeros(block, jnp.float32), plgpu.Layout.WGMMA)
    totals = lax.fori_loop(0, own_slots, step, {place: zeros for place in blocks})

    @pl.loop(own_slots, num_slots)
    def _slots_without_rows(k):
        slot = slots.slot(before + k)
        slots.wait(slot, consumer=warpgroup)
        slots.release(slot)

    return totals


def _multiply(program: PromotedProgram, step: SlotStep, place: Place, warpgroup, accumulator):
    program.multiply(accumulator, step, place, warpgroup)
    plgpu.wgmma_wait(0)
    return accumulator[...]


def _active_consumer(info):
    """Returns the consumer that computes this tile with ping-pong."""
    return lax.rem(info.local_index, jnp.int32(CONSUMERS))


PIECE = 4
"""Scales that are copied together: the steps of a slot divide them."""

LINES = 8
"""Pieces per row in shared memory: TMA copies to multiples of 128 bytes."""


def in_pieces(scales: Float[Array, "experts n k"]) -> Float[Array, "experts n k4"]:
    """Zero-pads each row of scales to a multiple of PIECE, so that TMA can copy it; unchanged if already aligned.

    All layers that read one stack share the result, since XLA computes equal expressions once.
    """
    return jnp.pad(scales, ((0, 0), (0, 0), (0, -scales.shape[2] % PIECE)))


def piece_of(number, steps_of_slot: int) -> pl.Slice:
    """Returns the index of the piece of scales that slot `number` of a tile needs."""
    assert PIECE % steps_of_slot == 0
    return pl.ds(pl.multiple_of(number * steps_of_slot // PIECE * PIECE, PIECE), PIECE)


def place_in_piece(step: SlotStep, steps_of_slot: int):
    """Returns the index of a step's scale within the piece of its slot."""
    return lax.rem(step.number * steps_of_slot + step.step, jnp.int32(PIECE))
