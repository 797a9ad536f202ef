"""The producer of the attention kernels: its loop over tiles, and the loop over a tile's blocks of keys."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.attention.mosaic.masks import BlockSteps
from moe_jax.kernels.attention.mosaic.warpgroups import TileScheduler, WorkTile
from moe_jax.kernels.hopper.pipeline import Pipeline


def load_tiles(
    scheduler: TileScheduler, load_tile: Callable, *, once_a_tile: Pipeline, once_a_step: tuple[Pipeline, ...]
) -> None:
    """Loads this thread block's tiles, then waits until the consumers have released every slot.

    `load_tile(number, tile, first_step)` fills one slot of `once_a_tile`. In each step of the tile it fills one slot of each
    pipeline in `once_a_step`. It returns the first step of the next tile.
    """
    steps, tiles = scheduler.for_each_tile(load_tile, jnp.int32(0))
    once_a_tile.drain(tiles)
    for pipeline in once_a_step:
        pipeline.drain(steps)


def load_n_blocks(inputs, scratch, tile: WorkTile, steps: BlockSteps, first_step) -> None:
    """Loads k and v of a tile's n_blocks, from n_block_max down, each into the slot of its step.

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
