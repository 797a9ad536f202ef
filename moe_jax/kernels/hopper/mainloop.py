"""The main loop of the matmul kernels: a producer fills a pipeline's slots, and two consumers multiply from them.

A thread block is persistent: block b computes tiles b, b + blocks, b + 2 * blocks, ... The pipeline continues across tiles: the
producer fetches the next tile's operands while the consumers store the last result. (CUTLASS's warp-specialized persistent
matmul; https://arxiv.org/abs/2407.08608 section 3 describes the technique for attention).

    roles     producer WG2 (40 registers)        for each step: acquire, start the copies of the step
              consumers WG0, WG1 (232 registers) for each step: wait, wgmma, release the previous step; then the epilogue
    cooperative (default)                        both consumers work on each tile: each on half the rows, or half the columns
              producer    |L0 L1 L2|L0'L1'L2'|
              consumer 0      |M0 M1 M2 store|M0'M1'M2' store|
              consumer 1      |M0 M1 M2 store|M0'M1'M2' store|
    ping-pong                                    the consumers alternate whole tiles: one multiplies while the other stores
              producer    |L0 L1 L2|L0'L1'L2'|L0"L1"L2"|
              consumer 0      |M0 M1 M2 store|   |M0"M1"M2" store|
              consumer 1               |M0'M1'M2' store|
    invariant slot = step mod stages, step counted over all tiles of the block; both roles see the same steps
              a consumer releases a slot after the wgmma that read it has completed: one step late if one may be in flight every
              arrival is waited for before the block exits (`Pipeline.drain`)
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

from moe_jax.kernels.hopper.launch import SWIZZLED_COLUMNS
from moe_jax.kernels.hopper.pipeline import CONSUMERS, MATMUL_REGISTERS, WGMMA_ROWS, Pipeline, run_roles

STEP = SWIZZLED_COLUMNS
"""Summands of one step."""

ROW_ALIGNMENT = STEP
"""An expert's rows start and end at multiples of a step, so that no step of a sum over rows mixes experts."""


@dataclass(frozen=True)
class TileShape:
    """Shape of a tile and its pipeline: rows x columns, summed in steps of 64 through `stages` slots.

    The two consumers share a tile: each computes half of its rows, or half of its columns if 64 rows are too few to halve.
    """

    rows: int
    columns: int
    stages: int
    ping_pong: bool = False
    """The consumers alternate whole tiles, so that one multiplies while the other stores. The tile tables call it
    "by_turns"."""

    @property
    def warpgroup_rows(self) -> int:
        """Number of rows that each consumer computes."""
        return self.rows // CONSUMERS if self.rows > WGMMA_ROWS and not self.ping_pong else self.rows

    @property
    def warpgroup_columns(self) -> int:
        """Number of columns that each consumer computes."""
        return self.columns if self.rows > WGMMA_ROWS or self.ping_pong else self.columns // CONSUMERS

    def first_row(self, warpgroup):
        """Returns the first row of a consumer's part within the tile."""
        return warpgroup * self.warpgroup_rows if self.warpgroup_rows < self.rows else 0

    def column_block(self, warpgroup):
        """Returns the index of a consumer's column block within the tile, in units of warpgroup_columns."""
        return warpgroup if self.warpgroup_columns < self.columns else 0

    @property
    def column_blocks(self) -> int:
        """The number of column blocks: 2 if the consumers split the columns, else 1."""
        return self.columns // self.warpgroup_columns

    def pipeline(self, copies: int) -> Pipeline:
        """Returns the scratch of the tile's pipeline, with `copies` TMA copies per slot."""
        return Pipeline.allocate(self.stages, copies, is_ping_pong=self.ping_pong)


class Step(NamedTuple):
    """One step along the contracted axis of a tile."""

    coord: Any
    """The tile, from `TileProgram.locate`."""
    k: jax.Array
    """Number of the step in its tile."""
    slot: jax.Array
    """The slot of the pipeline that holds the step's operands."""


@dataclass(frozen=True)
class TileProgram:
    """The callbacks in which matmul kernels differ. `coord` is the result of `locate` for a tile."""

    locate: Callable[[jax.Array], tuple[Any, Any]]
    """tile index -> (number of steps, coord)."""
    load: Callable[[Step, Any, Any], None]
    """Producer: (step, full barrier, kept) starts the copies of one step. `kept` is the result of `begin`."""
    multiply: Callable[[Any, Step, Any], None]
    """Consumer: (accumulator reference, step, warpgroup) issues the wgmma of one step."""
    epilogue: Callable[[Any, Any, Any], None]
    """Consumer: (accumulator [rows, columns] f32, coord, warpgroup) stores the result."""
    prologue: Callable[[Any, Any], None] = lambda coord, warpgroup: None
    """Consumer: (coord, warpgroup) runs before the tile's first step."""
    has_rows: Callable[[Any, Any], Any] = lambda coord, warpgroup: True
    """Consumer: (coord, warpgroup) -> False if no row of the warpgroup is used. It then leaves the tensor cores to the other
    consumer, and its accumulator is zero."""
    begin: Callable[[Any], Any] = lambda coord: None
    """Producer: coord -> values kept in registers while the tile loads (source rows of a gather)."""
    also_wait: Callable[[Any], None] = lambda step_of_all: None
    """Consumer: (step counted over all tiles) waits for copies that do not arrive at the full barrier."""
    wgmmas_in_flight: int = 1
    """Steps whose wgmma may still run when the next begins; 0 if wgmma reads registers, which the next step overwrites."""
    parts: int = 1
    """Number of parts of a tile's steps (`first_step`), at most one per step. Each is summed separately, then added to the sum
    of earlier parts, which needs as many registers as the accumulator."""


def run_tiles(num_tiles: jax.Array | int, program: TileProgram, shape: TileShape, pipe: Pipeline) -> None:
    """Runs the producer and consumers over a thread block's share of `num_tiles` tiles. Call it in every warpgroup."""

    def produce():
        @plgpu.nd_loop((num_tiles,), collective_axes="block", init_carry=jnp.int32(0))
        def total_steps(info, carry):
            num_steps, coord = program.locate(info.index[0])
            consumer = _active_consumer(info) if shape.ping_pong else 0
            kept = program.begin(coord)

            @pl.loop(0, num_steps)
            def _steps(k):
                pipe.acquire(carry + k)
                slot = pipe.slot(carry + k)
                program.load(Step(coord, k, slot), pipe.full_barrier(slot, consumer=consumer), kept)

            return carry + num_steps

        pipe.drain(total_steps)

    def consume(warpgroup):
        @plgpu.nd_loop((num_tiles,), collective_axes="block", init_carry=jnp.int32(0))
        def _tiles(info, carry):
            num_steps, coord = program.locate(info.index[0])
            has_rows = program.has_rows(coord, warpgroup)

            def sum_of(first, end):
                accumulator = plgpu.ACC((shape.warpgroup_rows, shape.warpgroup_columns), jnp.float32)
                steps = carry, first, jnp.where(has_rows, end, first), end
                accumulate = partial(_accumulate, coord=coord, warpgroup=warpgroup, steps=steps, program=program, pipe=pipe)
                return pl.run_scoped(accumulate, accumulator)

            def compute():
                program.prologue(coord, warpgroup)
                program.epilogue(_sum_of_parts(sum_of, num_steps, program.parts), coord, warpgroup)

            if shape.ping_pong:
                pl.when(_active_consumer(info) == warpgroup)(compute)
            else:
                compute()
            return carry + num_steps

        plgpu.wait_smem_to_gmem(0)

    run_roles(produce, consume, MATMUL_REGISTERS)


def first_step(part: jax.Array | int, steps: jax.Array | int, parts: int) -> jax.Array:
    """Returns the first step of split `part`; split sizes differ by at most one step. Split number `parts` is the end."""
    return lax.div(jnp.int32(part * steps), jnp.int32(parts))


def _sum_of_parts(sum_of: Callable[[Any, Any], Any], num_steps, parts: int):
    """Returns the sum of the parts, from the first to the last; `sum_of` is a function of the part's first step and its end."""
    if parts == 1:
        return sum_of(0, num_steps)

    def add(part, total):
        return total + sum_of(first_step(part, num_steps, parts), first_step(part + 1, num_steps, parts))

    return lax.fori_loop(1, parts, add, sum_of(0, first_step(1, num_steps, parts)))


def _accumulate(accumulator, coord, warpgroup, steps, program: TileProgram, pipe: Pipeline):
    """Returns a part's sum.

    Every slot is waited for and released, even slots that the warpgroup does not multiply. `steps`: the steps of earlier tiles,
    the part's first step, the end of this warpgroup's steps, and the part's end.
    """
    before, first, own_end, end = steps

    @pl.loop(first, own_end)
    def _steps(k):
        slot = pipe.slot(before + k)
        pipe.wait(slot, consumer=warpgroup)
        program.also_wait(before + k)
        program.multiply(accumulator, Step(coord, k, slot), warpgroup)
        # One wgmma may stay in flight. The previous one has read its slot.
        plgpu.wgmma_wait(program.wgmmas_in_flight)

        @pl.when(k > first)
        def _():
            pipe.release(pipe.slot(before + k - 1))

    total = accumulator[...]

    @pl.when(own_end > first)
    def _():
        pipe.release(pipe.slot(before + own_end - 1))

    @pl.loop(own_end, end)
    def _steps_without_rows(k):
        slot = pipe.slot(before + k)
        pipe.wait(slot, consumer=warpgroup)
        pipe.release(slot)

    return total


def _active_consumer(info):
    """Returns the consumer that computes this tile with ping-pong."""
    return lax.rem(info.local_index, jnp.int32(CONSUMERS))
