"""The forward pass on Hopper (FlashAttention-3, arXiv 2407.08608).

    out[i] = sum_j exp(scale * q[i] k[j] - lse[i]) v[j]      lse[i] = log sum_j exp(scale * q[i] k[j])

m_block is a block of 128 queries, n_block a block of N keys. q and k have width d, v has width e.
N = 128 if d <= 192 and e <= 128, else 64. A tile is one m_block of one head. Its loop runs over the visible n_blocks, from
n_block_max down to n_block_min.

roles      producer WG2 (24 registers)      TMA q[m_block] -> q; k[n_block] -> k[slot]; v[n_block] -> v[slot]
           consumers WG0, WG1 (240)         64 queries each: qk, softmax, pv; TMA out -> global memory
smem       q 256 d | k S * 2 N d | v S * 2 N e | out 256 C | barriers, in bytes; S <= 4 stages, C = e if d, e <= 128, else 64
           d = e = 128, S = 2: q 32 | k 64 | v 64 | out 32 = 192 KiB of 227
barriers   q.full: 1 copy, waited for by both consumers         q.empty: 2 releases, after qk of a tile's last step
           k.full[s], v.full[s]: 1 copy each                    k.empty[s]: 2 releases, after qk; v.empty[s]: 2, after pv
           warp_scheduler_barrier[w]: 1 arrival of consumer 1 - w, once it has issued its wgmmas; w then issues its own
time       producer     |q|k0|k1|v0|k2|v1| ..
           consumer 0   |qk0, softmax0|qk1 pv0 | softmax1      |qk2 pv1 | softmax2      | ..
           consumer 1   |    qk0, softmax0     |qk1 pv0 | softmax1      |qk2 pv1 | ..
invariants step i uses slot i mod S, counted across tiles; q is filled once a tile; pv of a step overlaps the softmax of the
           next; a slot of v is released one step after its k; every arrival is waited for before a thread block exits
cost       2 * B * H * P * (d + e) FLOPs, P the pairs (query, key) of the blocks in sight; q and out cross memory once, k and v
           once for each m_block, from L2 if cached
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.attention.mosaic.consumer import BLOCK_M, LOWEST, Consumer, RowScale, Scratch, n_blocks
from moe_jax.kernels.attention.mosaic.masks import BlockSteps, Mask, TokenInterval, n_block_steps
from moe_jax.kernels.attention.mosaic.producer import load_n_blocks, store_by_columns
from moe_jax.kernels.attention.mosaic.warpgroups import (
    LOG2_E,
    TileScheduler,
    WorkTile,
    broadcast_columns,
    launch,
    load_rows,
    load_tile,
)
from moe_jax.kernels.attention.online_softmax import PartialAttention
from moe_jax.kernels.hopper.launch import Named
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS


@partial(jax.jit, static_argnames=("scale", "out_dtype"))
def forward(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    in_sight: TokenInterval,
    previous: PartialAttention | None,
    scale: float,
    out_dtype: jnp.dtype,
) -> PartialAttention:
    """Returns out in `out_dtype` and lse in f32 over the visible keys (`in_sight`); without any, out is 0 and lse -inf.

    `previous`, f32, is the attention of the same queries over other keys; the result is then over both. The number of queries
    is a multiple of BLOCK_M, and the number of keys a multiple of 128.
    """
    batch, seq, heads, head_dim = q.shape
    keys, value_dim = k.shape[1], v.shape[3]
    scheduler = TileScheduler(
        batch, heads, k.shape[2], seq // BLOCK_M, "last", bytes_per_kv_head=keys * (head_dim + value_dim) * q.dtype.itemsize
    )
    steps = n_block_steps(in_sight, keys, BLOCK_M, n_blocks(head_dim, value_dim).block)
    bounds = dict(first_key=in_sight.first, last_key=in_sight.last)
    previous = None if previous is None else PartialAttention(*previous)
    inputs = Named(**bounds, n_block_steps=steps, q=q, k=k, v=v, previous=previous)
    out: Any = jax.ShapeDtypeStruct((*q.shape[:3], value_dim), out_dtype)
    lse: Any = jax.ShapeDtypeStruct((batch, heads, seq), jnp.float32)
    outputs = PartialAttention(out, lse)
    scratch = Scratch.of(q.dtype, head_dim, value_dim)

    def kernel(inputs: Named, outputs: PartialAttention, scratch: Scratch) -> None:
        block = _Block(inputs, outputs, scratch, scale * LOG2_E)
        scratch.run(scheduler, block.load_tile, block.consume_tile)

    return launch("flash_attention_forward", kernel, inputs, outputs, scratch)


@dataclass(frozen=True)
class _Block:
    """A thread block's work on each of its tiles."""

    inputs: Named
    outputs: PartialAttention
    scratch: Scratch
    scale_log2: float
    """The factor of scores in base 2."""

    def load_tile(self, number, tile: WorkTile, first_step):
        """Producer: loads q once per tile, and k and v per step; returns the next tile's first step."""
        inputs, scratch = self.inputs, self.scratch
        steps = BlockSteps.load(inputs.n_block_steps, tile)
        scratch.q_pipe.acquire(number)
        queries = pl.ds(tile.block * BLOCK_M, BLOCK_M)
        plgpu.copy_gmem_to_smem(inputs.q.at[tile.batch, queries, tile.head], scratch.q, scratch.q_pipe.full_barrier(0))
        load_n_blocks(inputs, scratch, tile, steps, first_step)
        return first_step + steps.total

    def consume_tile(self, warpgroup, _, tile: WorkTile, first_step):
        """Consumer: computes out of this warpgroup's 64 queries of a tile; returns the next tile's first step."""
        inputs = self.inputs
        steps = BlockSteps.load(inputs.n_block_steps, tile)
        first_row = tile.block * BLOCK_M + warpgroup * WGMMA_ROWS
        queries = pl.ds(first_row, WGMMA_ROWS)
        first_key = load_rows(inputs.first_key.at[tile.batch, queries])
        last_key = None if inputs.last_key is None else load_rows(inputs.last_key.at[tile.batch, queries])
        mask = Mask.of_interval(first_key, last_key, first_row)
        o, row_scale = Consumer(self.scratch, self.scale_log2, warpgroup, steps, first_step).run(mask)
        if inputs.previous is not None:
            row_scale = merge(row_scale, load_rows(inputs.previous.lse.at[tile.batch, tile.head, queries]))
        self._store(warpgroup, tile, queries, o, row_scale)
        return first_step + steps.total

    def _store(self, warpgroup, tile: WorkTile, queries, o, row_scale: RowScale) -> None:
        """Writes out and lse: out through shared memory if it is 16 bits wide, else from registers."""
        batch, _, head, _ = tile
        previous, outputs = self.inputs.previous, self.outputs

        def old(columns):
            out = load_tile(previous.out.at[batch, queries, head, columns])
            return out * broadcast_columns(row_scale.previous_scale, out.shape)

        store_by_columns(
            o * broadcast_columns(row_scale.scale, o.shape),
            self.scratch.out.at[warpgroup],
            lambda columns: outputs.out.at[batch, queries, head, columns],
            None if previous is None else old,
        )
        outputs.lse[batch, head, queries] = row_scale.lse_log2 * math.log(2)


def merge(new: RowScale, previous_lse) -> RowScale:
    """Returns the scales with which this part's o and the previous out add up, and the lse over both parts' keys."""
    previous_lse *= LOG2_E
    # Finite, so that differences are not NaN if neither part has a key.
    row_max = jnp.maximum(jnp.maximum(new.lse_log2, previous_lse), LOWEST)
    weight, previous_weight = jnp.exp2(new.lse_log2 - row_max), jnp.exp2(previous_lse - row_max)
    row_sum = weight + previous_weight
    lse = row_max + jnp.log2(row_sum)
    inverse = jnp.where(row_sum > 0, 1 / row_sum, 0.0)
    return RowScale(lse, new.scale * weight * inverse, previous_weight * inverse)
