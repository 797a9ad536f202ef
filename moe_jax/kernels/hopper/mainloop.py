"""The skeleton of both matmul kernels: one warpgroup loads tiles through a ring in shared memory, two multiply.

A block is persistent: block b takes tiles b, b + cores, b + 2 * cores, ... The ring runs on across tiles, so the loader
fetches the next tile's operands while the multipliers store the last one's result. (The warp-specialized persistent matmul of
CUTLASS on Hopper: https://arxiv.org/abs/2407.08608 section 3 describes the technique for attention.)
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.hopper.launch import SWIZZLED_COLUMNS
from moe_jax.kernels.hopper.pipeline import MATMUL_REGISTERS, Pipeline, run_roles

STEP = SWIZZLED_COLUMNS
"""Summands of one step of the ring."""

ROW_ALIGNMENT = STEP
"""An expert's rows start and end at multiples of a step, so that no step of a sum over rows mixes experts."""

CONSUMERS = 2
"""Warpgroups that multiply; each holds an accumulator of its own."""

WGMMA_ROWS = 64
"""Rows of one wgmma, and of what an epilogue works on at a time."""

LOADER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""Registers a thread: together with 128 threads a warpgroup they fill the 65536 of a core."""


@dataclass(frozen=True)
class Tile:
    """Shape of a tile and of its ring: rows x columns, summed in steps of 64 through `stages` slots.

    The two multiplying warpgroups halve its rows, or its columns if 64 rows are too few to halve.
    """

    rows: int
    columns: int
    stages: int
    by_turns: bool = False
    """They halve nothing and take tiles in turn, so that one multiplies while the other stores (CUTLASS's ping-pong)."""

    @property
    def own_rows(self) -> int:
        """Rows of one warpgroup."""
        return self.rows // CONSUMERS if self.rows > WGMMA_ROWS and not self.by_turns else self.rows

    @property
    def own_columns(self) -> int:
        """Columns of one warpgroup."""
        return self.columns if self.rows > WGMMA_ROWS or self.by_turns else self.columns // CONSUMERS

    def first_row(self, warpgroup):
        """Where in the tile a warpgroup's rows begin."""
        return warpgroup * self.own_rows if self.own_rows < self.rows else 0

    def column_part(self, warpgroup):
        """Which part of the tile's columns, in units of own_columns, is a warpgroup's."""
        return warpgroup if self.own_columns < self.columns else 0

    @property
    def column_parts(self) -> int:
        """1, or 2 where the warpgroups halve the columns."""
        return self.columns // self.own_columns


def ring_barriers(tile: Tile, copies: int) -> Pipeline:
    """Returns the pipeline of a tile's ring, of which `copies` TMA copies fill a slot."""
    return Pipeline.allocate(tile.stages, copies, is_ping_pong=tile.by_turns)


def run_tiles(
    num_tiles: jax.Array | int,
    describe: Callable,
    load: Callable,
    multiply: Callable,
    finish: Callable,
    *,
    tile_shape: Tile,
    pipe: Pipeline,
    prepare: Callable = lambda tile, warpgroup: None,
    multiplies: Callable = lambda tile, warpgroup: True,
    begin: Callable = lambda tile: (),
    also_wait: Callable = lambda step: None,
    in_flight: int = 1,
) -> None:
    """Runs in every warpgroup of a block, inside the scope of the ring's buffers and barriers.

    Args:
        describe: tile index -> (number of steps, what the other callbacks want to know of the tile).
        load: (tile, step, slot, barrier, *what `begin` gave): starts the copies of one step into a slot of the ring.
        multiply: (accumulator reference, tile, step, slot, warpgroup): issues the wgmma of one step.
        finish: (accumulator [rows, columns] f32, tile, warpgroup): stores the result.
        prepare: (tile, warpgroup): runs in a multiplying warpgroup before the tile's first step.
        multiplies: (tile, warpgroup) -> whether the warpgroup has rows in the tile. One that has none leaves the tensor cores
            to the other; its accumulator is zero.
        begin: tile -> what the loading warpgroup keeps in registers while it loads the tile.
        also_wait: (number of the step among those of all tiles): waits for copies that do not arrive at `full`.
        in_flight: steps whose wgmma may go on when the next begins; 0 where wgmma reads registers, which that overwrites.
    """
    by_turns = tile_shape.by_turns

    def whose(info):
        """Which warpgroup's turn it is."""
        return lax.rem(info.local_index, jnp.int32(CONSUMERS))

    def produce():
        @plgpu.nd_loop((num_tiles,), collective_axes="block", init_carry=jnp.int32(0))
        def total_steps(info, carry):
            num_steps, tile = describe(info.index[0])
            consumer = whose(info) if by_turns else 0
            begun = begin(tile)

            @pl.loop(0, num_steps)
            def _steps(k):
                pipe.acquire(carry + k)
                slot = pipe.slot(carry + k)
                load(tile, k, slot, pipe.full_barrier(slot, consumer=consumer), *begun)

            return carry + num_steps

        pipe.drain(total_steps)

    def consume(warpgroup):
        @plgpu.nd_loop((num_tiles,), collective_axes="block", init_carry=jnp.int32(0))
        def _tiles(info, carry):
            num_steps, tile = describe(info.index[0])
            own_steps = jnp.where(multiplies(tile, warpgroup), num_steps, 0)

            def accumulate(reference):
                @pl.loop(0, own_steps)
                def _steps(k):
                    slot = pipe.slot(carry + k)
                    pipe.wait(slot, consumer=warpgroup)
                    also_wait(carry + k)
                    multiply(reference, tile, k, slot, warpgroup)
                    # One wgmma stays in flight; the one before it has read its slot.
                    plgpu.wgmma_wait(in_flight)

                    @pl.when(k > 0)
                    def _():
                        pipe.release(pipe.slot(carry + k - 1))

                total = reference[...]

                @pl.when(own_steps > 0)
                def _():
                    pipe.release(pipe.slot(carry + own_steps - 1))

                @pl.loop(own_steps, num_steps)
                def _others_steps(k):
                    slot = pipe.slot(carry + k)
                    pipe.wait(slot, consumer=warpgroup)
                    pipe.release(slot)

                return total

            def compute():
                prepare(tile, warpgroup)
                accumulator = plgpu.ACC((tile_shape.own_rows, tile_shape.own_columns), jnp.float32)
                finish(pl.run_scoped(accumulate, accumulator), tile, warpgroup)

            if by_turns:
                pl.when(whose(info) == warpgroup)(compute)
            else:
                compute()
            return carry + num_steps

        plgpu.wait_smem_to_gmem(0)

    run_roles(produce, consume, MATMUL_REGISTERS)
