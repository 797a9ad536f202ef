"""The gradient of q on Hopper.

    p = exp(scale * q k^T - lse)      ds = p * (dout v^T - delta)      dq = scale * ds k

m_block is a block of 128 queries, n_block a block of N keys. q and k have width d, v has width e.
N = 128 if d, e <= 128, else 64. A tile is one m_block of one head. Its loop runs over the visible n_blocks, from n_block_max
down to n_block_min.

roles      producer WG2 (24 registers)      TMA q, dout[m_block] -> q, dout; k[n_block] -> k[slot]; v[n_block] -> v[slot]
           consumers WG0, WG1 (240)         64 queries each: qk, dov, p, ds, dsk; TMA dq -> global memory
smem       q 256 d | dout 256 e | k S * 2 N d | v S * 2 N e | dq 256 * 64 | barriers, in bytes; S <= 4 stages
           d = e = 128, S = 2: q 32 | dout 32 | k 64 | v 64 | dq 16 = 208 KiB of 227
barriers   q.full: 2 copies (q, dout)               q.empty: 2 releases, after dov of a tile's last step
           k.full[s], v.full[s]: 1 copy each        k.empty[s]: 2 releases, after dsk; v.empty[s]: 2, after dov
time       producer     |q dout|k0|v0|k1|v1| ..
           consumer     |qk0|dov0 | p0   |ds0|dsk0|qk1|dov1 | p1   |ds1|dsk1| ..
invariants step i uses slot i mod S, counted across tiles; q and dout are filled once a tile; dov overlaps the exponentials of
           p; a slot of v is released before the same step's k; sums have a fixed order, so results are deterministic
cost       2 * B * H * P * (2 * d + e) FLOPs, P the pairs (query, key) of the visible blocks
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.attention.mosaic.masks import BlockSteps, Mask, TokenInterval, n_block_steps
from moe_jax.kernels.attention.mosaic.producer import load_n_blocks, store_by_columns, walk_tiles
from moe_jax.kernels.attention.mosaic.warpgroups import (
    LOG2_E,
    RESIDENT_BLOCK,
    StagedBlocks,
    TileScheduler,
    WorkTile,
    broadcast_columns,
    interpreter_staging,
    launch,
    load_rows,
    load_tile,
    most_stages,
    multiply_registers,
    operand,
    own_rows,
)
from moe_jax.kernels.attention.online_softmax import BackwardInputs
from moe_jax.kernels.hopper.launch import Named
from moe_jax.kernels.hopper.pipeline import CONSUMERS, WGMMA_ROWS, Pipeline

BLOCK_M = RESIDENT_BLOCK
"""Queries of a block."""

DQ_COLUMNS = 64
"""Columns of dq that pass through shared memory at a time."""


@partial(jax.jit, static_argnames=("scale", "out_dtype"))
def backward_queries(
    arrays: BackwardInputs,
    in_sight: TokenInterval,
    previous: Float[Array, "batch seq heads head_dim"] | None,
    scale: float,
    out_dtype: jnp.dtype,
) -> Float[Array, "batch seq heads head_dim"]:
    """Returns dq in `out_dtype` from the keys `in_sight` of each query, plus `previous`, the f32 dq from other keys.

    arrays.lse is in base 2: log2(e) times the natural one. Sizes are multiples as in `forward.forward`.
    """
    q, k = arrays.q, arrays.k
    batch, seq, heads, head_dim = q.shape
    keys, value_dim = k.shape[1], arrays.v.shape[3]
    n_blocks = _n_blocks(head_dim, value_dim)
    scheduler = TileScheduler(
        batch, heads, k.shape[2], seq // BLOCK_M, "last", bytes_per_kv_head=keys * (head_dim + value_dim) * q.dtype.itemsize
    )
    steps = n_block_steps(in_sight, keys, BLOCK_M, n_blocks.block)
    bounds = dict(first_key=in_sight.first, last_key=in_sight.last)
    inputs = Named(**bounds, n_block_steps=steps, **arrays._asdict(), previous=previous)
    scratch = Named(
        q=operand(BLOCK_M, head_dim, dtype=q.dtype),
        dout=operand(BLOCK_M, value_dim, dtype=q.dtype),
        k=operand(n_blocks.stages, n_blocks.block, head_dim, dtype=q.dtype),
        v=operand(n_blocks.stages, n_blocks.block, value_dim, dtype=q.dtype),
        dq=operand(CONSUMERS, WGMMA_ROWS, DQ_COLUMNS, dtype=q.dtype),
        staging=interpreter_staging(n_blocks.block, q.dtype),
        # For q and dout.
        q_pipe=Pipeline.allocate(stages=1, copies=2),
        k_pipe=Pipeline.allocate(n_blocks.stages, has_opaque_slots=True),
        v_pipe=Pipeline.allocate(n_blocks.stages, has_opaque_slots=True),
    )

    def kernel(inputs: Named, dq_ref, scratch: Named) -> None:
        block, pipes = _Block(inputs, dq_ref, scratch, scale), (scratch.k_pipe, scratch.v_pipe)
        walk_tiles(scheduler, block.load_tile, block.consume_tile, once_a_tile=scratch.q_pipe, once_a_step=pipes)

    return launch("flash_attention_backward_queries", kernel, inputs, jax.ShapeDtypeStruct(q.shape, out_dtype), scratch)


def _n_blocks(head_dim: int, value_dim: int) -> StagedBlocks:
    """Returns the blocks of keys that registers and shared memory hold."""
    width = head_dim + value_dim
    return most_stages(128 if max(head_dim, value_dim) <= 128 else 64, width, BLOCK_M * (width + DQ_COLUMNS))


@dataclass(frozen=True)
class _Block:
    """A thread block's work on each of its tiles."""

    inputs: Named
    dq: Any
    scratch: Named
    scale: float

    def load_tile(self, number, tile: WorkTile, first_step):
        """Producer: loads q and dout once per tile, and k and v per step; returns the next tile's first step."""
        inputs, scratch = self.inputs, self.scratch
        steps = BlockSteps.load(inputs.n_block_steps, tile)
        queries = pl.ds(tile.block * BLOCK_M, BLOCK_M)
        scratch.q_pipe.acquire(number)
        plgpu.copy_gmem_to_smem(inputs.q.at[tile.batch, queries, tile.head], scratch.q, scratch.q_pipe.full_barrier(0))
        plgpu.copy_gmem_to_smem(inputs.dout.at[tile.batch, queries, tile.head], scratch.dout, scratch.q_pipe.full_barrier(0))
        load_n_blocks(inputs, scratch, tile, steps, first_step)
        return first_step + steps.total

    def consume_tile(self, warpgroup, _, tile: WorkTile, first_step):
        """Consumer: computes dq of this warpgroup's 64 queries of a tile; returns the next tile's first step."""
        inputs, scratch = self.inputs, self.scratch
        steps = BlockSteps.load(inputs.n_block_steps, tile)
        first_row = tile.block * BLOCK_M + warpgroup * WGMMA_ROWS
        queries = pl.ds(first_row, WGMMA_ROWS)
        first_key = load_rows(inputs.first_key.at[tile.batch, queries])
        lse = load_rows(inputs.lse.at[tile.batch, tile.head, queries])
        delta = load_rows(inputs.delta.at[tile.batch, tile.head, queries])
        last_key = None if inputs.last_key is None else load_rows(inputs.last_key.at[tile.batch, queries])
        mask = Mask.of_interval(first_key, last_key, first_row)
        consumer = _Consumer(self, warpgroup, tile, steps, first_step, lse, delta)

        def accumulate(dq_accumulator):
            n_block = partial(consumer.n_block, dq_accumulator)
            pl.loop(0, steps.masked)(partial(n_block, mask=mask))
            pl.loop(steps.masked, steps.full)(partial(n_block, mask=Mask()))
            pl.loop(steps.full, steps.total)(partial(n_block, mask=mask))
            return dq_accumulator[...]

        scratch.q_pipe.wait(0)
        consumer.wait_for_k(0)
        dq = pl.run_scoped(accumulate, plgpu.ACC((WGMMA_ROWS, scratch.q.shape[1]), jnp.float32)) * self.scale
        consumer.store(dq, queries)
        return first_step + steps.total


@dataclass(frozen=True)
class _Consumer:
    """A warpgroup's part of one tile."""

    block: _Block
    warpgroup: Any
    tile: WorkTile
    steps: BlockSteps
    first_step: Any
    """The steps of all tiles before this one."""
    lse: Any
    """In base 2."""
    delta: Any

    def n_block(self, dq_accumulator, step, mask: Mask) -> None:
        """Adds one step's ds k to dq."""
        scratch = self.block.scratch
        slot = scratch.k_pipe.slot(self.first_step + step)
        rows = own_rows(self.warpgroup)
        has_next_k = scratch.k_pipe.stages > 1
        if not has_next_k:
            pl.when(step > 0)(lambda: self.wait_for_k(step))
        scratch.v_pipe.wait(slot)

        def multiply(s_accumulator, dp_accumulator):
            self.qk(s_accumulator, rows, slot)
            self.dov(dp_accumulator, rows, slot)
            s = plgpu.wgmma_accumulator_load(s_accumulator, wait_n=1)
            p = lax.optimization_barrier(self.probabilities(s, step, mask))
            # k of the next step is read in that step. The wait's branch here keeps ptxas from moving the exponentials after the
            # wait for dov, with which they should overlap. A pipeline of one stage holds no next block yet.
            if has_next_k:
                pl.when(step + 1 < self.steps.total)(lambda: self.wait_for_k(step + 1))
            dp = dp_accumulator[...]
            scratch.v_pipe.release(slot)
            pl.when(step == self.steps.total - 1)(lambda: scratch.q_pipe.release(0))
            return p * (dp - broadcast_columns(self.delta, s.shape))

        accumulator = plgpu.ACC((WGMMA_ROWS, scratch.k.shape[1]), jnp.float32)
        ds = pl.run_scoped(multiply, accumulator, accumulator)
        self.dsk(dq_accumulator, ds, slot)
        plgpu.wgmma_wait(0)
        scratch.k_pipe.release(slot)

    def wait_for_k(self, step) -> None:
        """Waits until k of a step has landed."""
        pipe = self.block.scratch.k_pipe
        pipe.wait(pipe.slot(self.first_step + step))

    def qk(self, s_accumulator, rows, slot) -> None:
        """Issues s = q k^T."""
        plgpu.wgmma(s_accumulator, self.block.scratch.q.at[rows], self.block.scratch.k.at[slot].transpose((1, 0)))

    def dov(self, dp_accumulator, rows, slot) -> None:
        """Issues dp = dout v^T."""
        plgpu.wgmma(dp_accumulator, self.block.scratch.dout.at[rows], self.block.scratch.v.at[slot].transpose((1, 0)))

    def dsk(self, dq_accumulator, ds, slot) -> None:
        """Issues dq += ds k."""
        scratch = self.block.scratch
        multiply_registers(dq_accumulator, ds.astype(scratch.q.dtype), scratch.k.at[slot], scratch.staging, self.warpgroup)

    def probabilities(self, s, step, mask: Mask) -> Any:
        """Returns p = exp(scale * s - lse), with 0 for masked pairs."""
        p = jnp.exp2(s * (self.block.scale * LOG2_E) - broadcast_columns(self.lse, s.shape))
        return mask.with_diagonal().apply(p, (self.steps.start - step) * s.shape[1], 0.0)

    def store(self, dq, queries) -> None:
        """Writes dq: through shared memory if it is 16 bits wide, else from registers."""
        batch, _, head, _ = self.tile
        scratch, previous, out_ref = self.block.scratch, self.block.inputs.previous, self.block.dq
        store_by_columns(
            dq,
            scratch.dq.at[self.warpgroup],
            lambda columns: out_ref.at[batch, queries, head, columns],
            None if previous is None else lambda columns: load_tile(previous.at[batch, queries, head, columns]),
        )
