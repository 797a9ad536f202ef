"""Parts of the attention kernels: the roles of a thread block, the loop over a tile's blocks of keys, and the store of rows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.attention.mosaic.masks import BlockSteps
from moe_jax.kernels.attention.mosaic.warpgroups import TileScheduler, WorkTile
from moe_jax.kernels.hopper.pipeline import ATTENTION_REGISTERS, Pipeline, run_roles


def walk_tiles(
    scheduler: TileScheduler,
    load_tile: Callable,
    consume_tile: Callable,
    *,
    once_a_tile: Pipeline,
    once_a_step: tuple[Pipeline, ...],
    turns: Any = None,
) -> None:
    """Runs the producer and the consumers of a thread block, each as a loop over the block's tiles.

    Args:
        load_tile: load_tile(number, tile, first_step) fills one slot of `once_a_tile`. In each step of the tile it fills one
            slot of each pipeline in `once_a_step`. It returns the first step of the next tile.
        consume_tile: consume_tile(warpgroup, number, tile, first_step) returns the same.
        turns: the barriers by which the consumers alternate; None: they do not.
    """

    def produce() -> None:
        steps, tiles = scheduler.for_each_tile(load_tile, jnp.int32(0))
        # Every arrival is waited for before the thread block exits.
        once_a_tile.drain(tiles)
        for pipeline in once_a_step:
            pipeline.drain(steps)

    def consume(warpgroup) -> None:
        if turns is not None:
            # The order continues across tiles: warpgroup 0 is first, and would be first again after the last tile.
            pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(turns.at[0]))
        scheduler.for_each_tile(partial(consume_tile, warpgroup), jnp.int32(0))
        if turns is not None:
            pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(turns.at[0]))
        plgpu.wait_smem_to_gmem(0)

    run_roles(produce, consume, ATTENTION_REGISTERS)


def load_n_blocks(inputs, scratch, tile: WorkTile, steps: BlockSteps, first_step) -> None:
    """Producer: loads k and v of a tile's key blocks, from last to first, each into its step's slot.

    `inputs` has the fields k and v, `scratch` the fields k, v, k_pipe and v_pipe. The tile's step 0 is step `first_step` of
    the pipelines.
    """
    block_n = scratch.k.shape[1]

    @pl.loop(0, steps.total)
    def _load_step(step):
        slot = scratch.k_pipe.slot(first_step + step)
        keys = pl.ds((steps.start - step) * block_n, block_n)
        scratch.k_pipe.acquire(first_step + step)
        k = inputs.k.at[tile.batch, keys, tile.kv_head]
        plgpu.copy_gmem_to_smem(k, scratch.k.at[slot], scratch.k_pipe.full_barrier(slot))
        scratch.v_pipe.acquire(first_step + step)
        v = inputs.v.at[tile.batch, keys, tile.kv_head]
        plgpu.copy_gmem_to_smem(v, scratch.v.at[slot], scratch.v_pipe.full_barrier(slot))


def store_by_columns(result, buffer, target: Callable, previous: Callable | None = None) -> None:
    """Writes a warpgroup's rows to global memory, via TMA through `buffer` if dtypes match, else from registers.

    `target(columns)` returns the reference to some columns, and `previous(columns)` the values to add.
    """
    for column in range(0, result.shape[1], buffer.shape[1]):
        columns = pl.ds(column, buffer.shape[1])
        part, out = result[:, column : column + buffer.shape[1]], target(columns)
        if previous is not None:
            part = part + previous(columns)
        if out.dtype != buffer.dtype:
            out[...] = part.astype(out.dtype)
            continue
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer[...] = part.astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, out)
