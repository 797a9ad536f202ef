"""The gradients of k and v on Hopper.

    p = exp(scale * q k^T - lse)      ds = p * (dout v^T - delta)      dk = scale * ds^T q      dv = p^T dout

n_block is a block of 128 keys, m_block a block of 64 queries; q and k have width d, v and dout width e. A tile is one n_block
of one key head. Its loop runs over the visible m_blocks, from m_block_min up to m_block_max, for each query head of the key
head. Scores are computed transposed, [keys, queries], so that p^T and ds^T are operands in registers. If d + e > 256, dk and dv
do not fit in the registers together, so separate launches compute dk and dv.

roles      producer WG2 (24 registers)      TMA k, v[n_block] -> k, v; q, lse, dout, delta[m_block] -> slot
           consumers WG0, WG1 (240)         64 keys each: kq, vdo, p, ds, pdo, dsq; TMA dk, dv -> global memory
smem       k 256 d | v 256 e | q S * 128 d | dout S * 128 e | lse, delta S * 256 each | barriers, in bytes; S <= 4 stages
           d = e = 128, S = 4: k 32 | v 32 | q 64 | dout 64 | lse, delta 2 = 194 KiB of 227
           16-bit dk and dv are stored through the buffers of k and v
barriers   kv.full: 2 copies (k, v)                  kv.empty: 2 releases, when dk and dv have been stored
           pipe.full[0][s]: 3 copies (q, lse, dout)  pipe.full[1][s]: 1 copy (delta)
           pipe.empty[s]: 2 releases, after dsq
time       producer     |k v|q0 lse0 dout0 delta0|q1 lse1 dout1 delta1| ..
           consumer     |kq0|vdo0 | p0   |ds0|pdo0 dsq0|kq1|vdo1 | p1   |ds1|pdo1 dsq1| ..
invariants step i uses slot i mod S, counted across heads and tiles; k and v are filled once a tile; vdo overlaps the
           exponentials of p; a consumer writes only rows of k and v that no other consumer read; sums have a fixed order, so
           results are deterministic
cost       4 * B * H * P * (d + e) FLOPs, P the pairs (query, key) of the visible blocks, and 2 * B * H * P * d more for two
           launches
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.attention.mosaic.masks import BlockSteps, Mask, TokenInterval, m_block_steps
from moe_jax.kernels.attention.mosaic.producer import walk_tiles
from moe_jax.kernels.attention.mosaic.warpgroups import (
    COLUMNS,
    LOG2_E,
    RESIDENT_BLOCK,
    StagedBlocks,
    TileScheduler,
    WorkTile,
    broadcast_rows,
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
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS, Pipeline

BLOCK_N = RESIDENT_BLOCK
"""Keys of a block."""

BLOCK_M = 64
"""Queries of a block."""

OPERANDS, DELTA = 0, 1
"""The two full barriers of a slot: one for q, lse and dout, one for delta."""


class KeyGradients(NamedTuple):
    """dk and dv; None for the one that a launch does not compute. In the kernel: references or accumulators."""

    dk: Any
    """[batch, keys, kv_heads, head_dim]"""
    dv: Any
    """[batch, keys, kv_heads, value_dim]"""


@partial(jax.jit, static_argnames=("scale", "out_dtype"))
def backward_keys(
    arrays: BackwardInputs, in_sight: TokenInterval, previous: KeyGradients | None, scale: float, out_dtype: jnp.dtype
) -> KeyGradients:
    """Returns dk and dv in `out_dtype` from the queries `in_sight` of each key, plus `previous`, f32 gradients from others.

    arrays.lse is in base 2: log2(e) times the natural one. The number of keys is a multiple of BLOCK_N, and the number of
    queries a multiple of BLOCK_M.
    """
    dk, dv = (jax.ShapeDtypeStruct(a.shape, out_dtype) for a in (arrays.k, arrays.v))
    previous = KeyGradients(*previous) if previous is not None else KeyGradients(None, None)
    if arrays.k.shape[3] + arrays.v.shape[3] <= 256:
        return _launch(arrays, in_sight, previous, scale, KeyGradients(dk, dv))
    first = _launch(arrays, in_sight, previous._replace(dv=None), scale, KeyGradients(dk, None))
    second = _launch(arrays, in_sight, previous._replace(dk=None), scale, KeyGradients(None, dv))
    return KeyGradients(first.dk, second.dv)


def _launch(
    arrays: BackwardInputs, in_sight: TokenInterval, previous: KeyGradients, scale: float, wanted: KeyGradients
) -> KeyGradients:
    q = arrays.q
    seq, heads, head_dim = q.shape[1:]
    batch, keys, kv_heads, value_dim = arrays.v.shape
    m_blocks = _m_blocks(head_dim, value_dim)
    # Too few tiles a head for sections: a thread block would get up to 1.9 times the mean.
    scheduler = TileScheduler(batch, kv_heads, kv_heads, keys // BLOCK_N, "first", bytes_per_kv_head=None)
    steps = m_block_steps(in_sight, seq, BLOCK_M, BLOCK_N)
    bounds = dict(last_query=in_sight.last, first_query=in_sight.first)
    inputs = Named(**bounds, m_block_steps=steps, **arrays._asdict(), previous=previous)
    scratch = Named(
        k=operand(BLOCK_N, head_dim, dtype=q.dtype),
        v=operand(BLOCK_N, value_dim, dtype=q.dtype),
        q=operand(m_blocks.stages, BLOCK_M, head_dim, dtype=q.dtype),
        dout=operand(m_blocks.stages, BLOCK_M, value_dim, dtype=q.dtype),
        lse=plgpu.SMEM((m_blocks.stages, BLOCK_M), jnp.float32),
        delta=plgpu.SMEM((m_blocks.stages, BLOCK_M), jnp.float32),
        staging=interpreter_staging(BLOCK_M, q.dtype),
        kv_pipe=Pipeline.allocate(stages=1, copies=2),
        # For q, lse, dout and delta.
        pipe=Pipeline.allocate(m_blocks.stages, copies=(3, 1), has_opaque_slots=True),
    )

    def kernel(inputs: Named, outputs: KeyGradients, scratch: Named) -> None:
        block, pipes = _Block(inputs, outputs, scratch, scale, heads // kv_heads), (scratch.pipe,)
        walk_tiles(scheduler, block.load_tile, block.consume_tile, once_a_tile=scratch.kv_pipe, once_a_step=pipes)

    return launch("flash_attention_backward_keys", kernel, inputs, wanted, scratch)


def _m_blocks(head_dim: int, value_dim: int) -> StagedBlocks:
    """Returns the blocks of queries that shared memory holds."""
    return most_stages(BLOCK_M, head_dim + value_dim, BLOCK_N * (head_dim + value_dim))


@dataclass(frozen=True)
class _Block:
    """A thread block's work on each of its tiles."""

    inputs: Named
    outputs: KeyGradients
    scratch: Named
    scale: float
    group: int
    """Query heads of a key head."""

    def load_tile(self, number, tile: WorkTile, first_step):
        """Producer: loads k and v once per tile, and q, lse, dout and delta per step; returns the next tile's first step."""
        inputs, scratch, pipe = self.inputs, self.scratch, self.scratch.pipe
        batch, n_block, kv_head, _ = tile
        m_block_min, _, _, total = BlockSteps.load(inputs.m_block_steps, tile)
        keys = pl.ds(n_block * BLOCK_N, BLOCK_N)
        scratch.kv_pipe.acquire(number)
        plgpu.copy_gmem_to_smem(inputs.k.at[batch, keys, kv_head], scratch.k, scratch.kv_pipe.full_barrier(0))
        plgpu.copy_gmem_to_smem(inputs.v.at[batch, keys, kv_head], scratch.v, scratch.kv_pipe.full_barrier(0))

        @pl.loop(0, self.group * total)
        def _load_step(step):
            slot = pipe.slot(first_step + step)
            head = kv_head * self.group + lax.div(step, total)
            queries = pl.ds((m_block_min + lax.rem(step, total)) * BLOCK_M, BLOCK_M)
            pipe.acquire(first_step + step)
            landed, delta_landed = (pipe.full_barrier(slot, group=group) for group in (OPERANDS, DELTA))
            plgpu.copy_gmem_to_smem(inputs.q.at[batch, queries, head], scratch.q.at[slot], landed)
            plgpu.copy_gmem_to_smem(inputs.lse.at[batch, head, queries], scratch.lse.at[slot], landed)
            plgpu.copy_gmem_to_smem(inputs.dout.at[batch, queries, head], scratch.dout.at[slot], landed)
            plgpu.copy_gmem_to_smem(inputs.delta.at[batch, head, queries], scratch.delta.at[slot], delta_landed)

        return first_step + self.group * total

    def consume_tile(self, warpgroup, _, tile: WorkTile, first_step):
        """Consumer: computes dk and dv of this warpgroup's 64 keys of a tile; returns the next tile's first step."""
        inputs, scratch, wanted = self.inputs, self.scratch, self.outputs
        steps = BlockSteps.load(inputs.m_block_steps, tile)
        first_row = tile.block * BLOCK_N + warpgroup * WGMMA_ROWS
        keys = pl.ds(first_row, WGMMA_ROWS)
        last_query = load_rows(inputs.last_query.at[tile.batch, keys])
        first_query = None if inputs.first_query is None else load_rows(inputs.first_query.at[tile.batch, keys])
        mask = Mask.of_interval(first_query, last_query, first_row)
        consumer = _Consumer(self, warpgroup, steps, first_step)

        def accumulate(accumulators: KeyGradients) -> KeyGradients:
            @pl.loop(0, self.group)
            def _head(head):
                m_block = partial(consumer.m_block, accumulators, head)
                pl.loop(0, steps.masked)(partial(m_block, mask=mask))
                pl.loop(steps.masked, steps.full)(partial(m_block, mask=Mask()))
                pl.loop(steps.full, steps.total)(partial(m_block, mask=mask))

            return jax.tree.map(lambda accumulator: accumulator[...], accumulators)

        scratch.kv_pipe.wait(0)
        accumulators = jax.tree.map(lambda out: plgpu.ACC((WGMMA_ROWS, out.shape[3]), jnp.float32), wanted)
        dk, dv = pl.run_scoped(accumulate, accumulators)
        if wanted.dk is not None:
            self._store(dk * self.scale, inputs.previous.dk, wanted.dk, scratch.k, warpgroup, tile, keys)
        if wanted.dv is not None:
            self._store(dv, inputs.previous.dv, wanted.dv, scratch.v, warpgroup, tile, keys)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch.kv_pipe.release(0)
        return first_step + self.group * steps.total

    def _store(self, gradient, previous, out_ref, buffer, warpgroup, tile: WorkTile, keys) -> None:
        """Writes a gradient: through `buffer` (k's or v's memory) if it is 16 bits wide, else from registers."""
        target = out_ref.at[tile.batch, keys, tile.head]
        if previous is not None:
            gradient += load_tile(previous.at[tile.batch, keys, tile.head])
        if out_ref.dtype != buffer.dtype:
            target[...] = gradient.astype(out_ref.dtype)
            return
        own_buffer = buffer.at[own_rows(warpgroup)]
        own_buffer[...] = gradient.astype(out_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own_buffer, target)


@dataclass(frozen=True)
class _Consumer:
    """A warpgroup's part of one tile."""

    block: _Block
    warpgroup: Any
    steps: BlockSteps
    first_step: Any
    """The steps of all tiles before this one."""

    def m_block(self, accumulators: KeyGradients, head, step, mask: Mask) -> None:
        """Adds ds^T q of one step to dk, and p^T dout to dv."""
        scratch, pipe = self.block.scratch, self.block.scratch.pipe
        slot = pipe.slot(self.first_step + head * self.steps.total + step)
        rows = own_rows(self.warpgroup)
        pipe.wait(slot, group=OPERANDS)
        accumulator = plgpu.ACC((WGMMA_ROWS, BLOCK_M), jnp.float32)

        def p_alone(s_accumulator):
            self.kq(s_accumulator, rows, slot)
            p = self.probabilities(s_accumulator[...], step, slot, mask)
            pipe.wait(slot, group=DELTA)
            return p, None

        def p_and_ds(s_accumulator, dp_accumulator):
            self.kq(s_accumulator, rows, slot)
            self.vdo(dp_accumulator, rows, slot)
            s = plgpu.wgmma_accumulator_load(s_accumulator, wait_n=1)
            p = lax.optimization_barrier(self.probabilities(s, step, slot, mask))
            # delta has its own barrier. The wait's branch here keeps ptxas from moving the exponentials after the wait for vdo,
            # with which they should overlap.
            pipe.wait(slot, group=DELTA)
            dp = dp_accumulator[...]
            delta = plgpu.load(scratch.delta.at[slot], layout=COLUMNS)
            return p, p * (dp - broadcast_rows(delta, s.shape))

        if accumulators.dk is None:
            factors = pl.run_scoped(p_alone, accumulator)
        else:
            factors = pl.run_scoped(p_and_ds, accumulator, accumulator)
        p, ds = jax.tree.map(lambda factor: factor.astype(scratch.q.dtype), factors)
        if accumulators.dv is not None:
            self.pdo(accumulators.dv, p, slot)
        if accumulators.dk is not None:
            self.dsq(accumulators.dk, ds, slot)
        plgpu.wgmma_wait(0)
        pipe.release(slot)

    def kq(self, s_accumulator, rows, slot) -> None:
        """Issues s^T = k q^T."""
        plgpu.wgmma(s_accumulator, self.block.scratch.k.at[rows], self.block.scratch.q.at[slot].transpose((1, 0)))

    def vdo(self, dp_accumulator, rows, slot) -> None:
        """Issues dp^T = v dout^T."""
        plgpu.wgmma(dp_accumulator, self.block.scratch.v.at[rows], self.block.scratch.dout.at[slot].transpose((1, 0)))

    def pdo(self, dv_accumulator, p, slot) -> None:
        """Issues dv += p^T dout."""
        multiply_registers(dv_accumulator, p, self.block.scratch.dout.at[slot], self.block.scratch.staging, self.warpgroup)

    def dsq(self, dk_accumulator, ds, slot) -> None:
        """Issues dk += ds^T q."""
        multiply_registers(dk_accumulator, ds, self.block.scratch.q.at[slot], self.block.scratch.staging, self.warpgroup)

    def probabilities(self, s, step, slot, mask: Mask) -> Any:
        """Returns p^T = exp(scale * s^T - lse), with 0 for masked pairs."""
        lse = plgpu.load(self.block.scratch.lse.at[slot], layout=COLUMNS)
        p = jnp.exp2(s * (self.block.scale * LOG2_E) - broadcast_rows(lse, s.shape))
        return mask.with_diagonal().apply(p, (self.steps.start + step) * BLOCK_M, 0.0)
