"""The forward pass on Hopper (FlashAttention-3, arXiv 2407.08608).

    out[i] = sum_j exp(scale * q[i] k[j] - lse[i]) v[j]      lse[i] = log sum_j exp(scale * q[i] k[j])

m_block is a block of 128 queries, n_block a block of N keys. q and k have width d, v has width e.
N = 128 if d <= 192 and e <= 128, else 64. A tile is one m_block of one head. Its loop takes the n_blocks in sight, from
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
invariants step i uses slot i mod S, counted across tiles; q is filled once a tile; pv of a step runs beside the softmax of the
           next; a slot of v is released one step after its k; every arrival is waited for before a thread block exits
cost       2 * B * H * P * (d + e) FLOPs, P the pairs (query, key) of the blocks in sight; q and out cross memory once, k and v
           once for each m_block, from L2 where it holds them
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.attention.mosaic.masks import BlockSteps, Mask, TokenInterval, n_block_steps
from moe_jax.kernels.attention.mosaic.producer import load_n_blocks, load_tiles
from moe_jax.kernels.attention.mosaic.warpgroups import (
    LOG2_E,
    RESIDENT_BLOCK,
    ROWS,
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
    read_accumulator,
    start_accumulator,
)
from moe_jax.kernels.attention.online_softmax import PartialAttention
from moe_jax.kernels.hopper.pipeline import ATTENTION_REGISTERS, CONSUMERS, WGMMA_ROWS, Pipeline, run_roles

BLOCK_M = RESIDENT_BLOCK
"""Queries of a block."""

LOWEST = -1e30
"""A row maximum below every score, finite so that differences are numbers."""


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
    """Returns out in `out_dtype` and lse in f32, over the keys `in_sight` of each query; none in sight: out 0 and lse -inf.

    `previous`, f32, is the attention of the same queries over other keys; the result is then over both. The number of queries
    is a multiple of BLOCK_M, and the number of keys a multiple of 128.
    """
    batch, seq, heads, head_dim = q.shape
    keys, value_dim = k.shape[1], v.shape[3]
    out_columns = _out_columns(head_dim, value_dim)
    n_blocks = _n_blocks(head_dim, value_dim)
    scheduler = TileScheduler(
        batch, heads, k.shape[2], seq // BLOCK_M, "last", bytes_per_kv_head=keys * (head_dim + value_dim) * q.dtype.itemsize
    )
    steps = n_block_steps(in_sight, keys, BLOCK_M, n_blocks.block)
    inputs = _Inputs(*in_sight, steps, q, k, v, None if previous is None else PartialAttention(*previous))
    outputs = _Outputs(
        out=jax.ShapeDtypeStruct((*q.shape[:3], value_dim), out_dtype),
        lse=jax.ShapeDtypeStruct((batch, heads, seq), jnp.float32),
    )
    scratch = _Scratch(
        q=operand(BLOCK_M, head_dim, dtype=q.dtype),
        k=operand(n_blocks.stages, n_blocks.block, head_dim, dtype=q.dtype),
        v=operand(n_blocks.stages, n_blocks.block, value_dim, dtype=q.dtype),
        out=operand(CONSUMERS, WGMMA_ROWS, out_columns, dtype=q.dtype),
        staging=interpreter_staging(n_blocks.block, q.dtype),
        q_pipe=Pipeline.allocate(stages=1),
        k_pipe=Pipeline.allocate(n_blocks.stages, has_opaque_slots=True),
        v_pipe=Pipeline.allocate(n_blocks.stages, has_opaque_slots=True),
        warp_scheduler_barrier=plgpu.Barrier(num_barriers=CONSUMERS),
    )

    def kernel(inputs: _Inputs, outputs: _Outputs, scratch: _Scratch) -> None:
        block = _Block(inputs, outputs, scratch, scheduler, scale * LOG2_E)
        run_roles(block.produce, block.consume, ATTENTION_REGISTERS)

    return PartialAttention(*launch("flash_attention_forward", kernel, inputs, outputs, scratch))


def _n_blocks(head_dim: int, value_dim: int) -> StagedBlocks:
    """Returns the blocks of keys that registers and shared memory hold."""
    resident = BLOCK_M * (head_dim + _out_columns(head_dim, value_dim))
    return most_stages(128 if head_dim <= 192 and value_dim <= 128 else 64, head_dim + value_dim, resident)


def _out_columns(head_dim: int, value_dim: int) -> int:
    """Returns the columns of out that leave through shared memory at a time: few where q and v leave little room."""
    return value_dim if max(head_dim, value_dim) <= 128 else 64


class _Inputs(NamedTuple):
    first_key: Any
    last_key: Any
    """None in causal attention."""
    n_block_steps: Any
    q: Any
    k: Any
    v: Any
    previous: Any


class _Outputs(NamedTuple):
    out: Any
    lse: Any


class _Scratch(NamedTuple):
    q: Any
    k: Any
    v: Any
    out: Any
    staging: Any
    """None on a GPU."""
    q_pipe: Pipeline
    k_pipe: Pipeline
    v_pipe: Pipeline
    warp_scheduler_barrier: Any


@dataclass(frozen=True)
class _Block:
    """A thread block's two roles, each a loop over the block's tiles."""

    inputs: _Inputs
    outputs: _Outputs
    scratch: _Scratch
    scheduler: TileScheduler
    scale_log2: float
    """The factor of scores in base 2."""

    def produce(self) -> None:
        """Loads q once a tile and k and v once a step."""
        scratch = self.scratch
        load_tiles(self.scheduler, self._load_tile, once_a_tile=scratch.q_pipe, once_a_step=(scratch.k_pipe, scratch.v_pipe))

    def consume(self, warpgroup) -> None:
        """Computes this warpgroup's 64 queries of each tile."""
        barrier = self.scratch.warp_scheduler_barrier
        # The order goes on across tiles: warpgroup 0 is first, and would be first after the last tile.
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(barrier.at[0]))
        self.scheduler.for_each_tile(partial(self._consume_tile, warpgroup), jnp.int32(0))
        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(barrier.at[0]))
        plgpu.wait_smem_to_gmem(0)

    def _load_tile(self, number, tile: WorkTile, first_step):
        """Returns the number of steps so far."""
        inputs, scratch = self.inputs, self.scratch
        steps = BlockSteps.load(inputs.n_block_steps, tile)
        scratch.q_pipe.acquire(number)
        queries = pl.ds(tile.block * BLOCK_M, BLOCK_M)
        plgpu.copy_gmem_to_smem(inputs.q.at[tile.batch, queries, tile.head], scratch.q, scratch.q_pipe.full_barrier(0))
        load_n_blocks(inputs, scratch, tile, steps, first_step)
        return first_step + steps.total

    def _consume_tile(self, warpgroup, _, tile: WorkTile, first_step):
        """Returns the number of steps so far."""
        inputs = self.inputs
        steps = BlockSteps.load(inputs.n_block_steps, tile)
        first_row = tile.block * BLOCK_M + warpgroup * WGMMA_ROWS
        queries = pl.ds(first_row, WGMMA_ROWS)
        first_key = load_rows(inputs.first_key.at[tile.batch, queries])
        last_key = None if inputs.last_key is None else load_rows(inputs.last_key.at[tile.batch, queries])
        mask = Mask.of_interval(first_key, last_key, first_row)
        consumer = _Consumer(self, warpgroup, tile, steps, first_step)

        state = consumer.first_half_block(mask)
        # Where N = BLOCK_M, the diagonal of causal attention lies in step 0 alone.
        if mask.kind != "causal" or self.scratch.k.shape[1] < BLOCK_M:
            state = lax.fori_loop(1, steps.masked, partial(consumer.n_block, mask=mask), state)
        state = lax.fori_loop(steps.masked, steps.full, partial(consumer.n_block, mask=Mask()), state)
        state = lax.fori_loop(steps.full, steps.total, partial(consumer.n_block, mask=mask), state)
        o = consumer.last_half_block(state)

        row_scale = finalize(state, is_causal=mask.kind == "causal")
        if inputs.previous is not None:
            row_scale = merge(row_scale, load_rows(inputs.previous.lse.at[tile.batch, tile.head, queries]))
        consumer.store(o, row_scale, queries)
        return first_step + steps.total


class _State(NamedTuple):
    """The carry of a tile's loop, after a step: all but the last block's p v is in `o`."""

    o: Any
    row_max: Any
    """In base 2: log2(e) * scale times the largest score."""
    row_sum: Any
    p: Any
    """The last block's exp2(score - row_max), in q's dtype."""


@dataclass(frozen=True)
class _Consumer:
    """A warpgroup's part of one tile."""

    block: _Block
    warpgroup: Any
    tile: WorkTile
    steps: BlockSteps
    first_step: Any
    """The steps of all tiles before this one."""

    def first_half_block(self, mask: Mask) -> _State:
        """Computes p of the first step; o is still zero."""
        scratch = self.block.scratch
        slot = scratch.k_pipe.slot(self.first_step)
        scratch.q_pipe.wait(0)
        scratch.k_pipe.wait(slot)
        q = scratch.q.at[own_rows(self.warpgroup)]

        def multiply(s_accumulator):
            self.qk(s_accumulator, q, slot)
            return s_accumulator[...]

        s = pl.run_scoped(multiply, self._s_accumulator())
        scratch.k_pipe.release(slot)
        pl.when(self.steps.total == 1)(lambda: scratch.q_pipe.release(0))
        # Finite: a query may see no key of the first blocks, and -inf - -inf is no number.
        lowest = plgpu.layout_cast(jnp.full(WGMMA_ROWS, LOWEST, jnp.float32), ROWS)
        row_max, p, _ = self.softmax(s, 0, lowest, mask)
        scratch.v_pipe.wait(slot)
        value_dim = scratch.v.shape[2]
        o = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, value_dim), jnp.float32), plgpu.Layout.WGMMA)
        return _State(o, row_max, p.sum(axis=1), p.astype(scratch.q.dtype))

    def n_block(self, step, state: _State, mask: Mask) -> _State:
        """Computes p of one step, and beside its softmax p v of the step before."""
        scratch = self.block.scratch
        slot = scratch.k_pipe.slot(self.first_step + step)
        previous_slot = scratch.v_pipe.slot(self.first_step + step - 1)
        scratch.k_pipe.wait(slot)
        self.warp_scheduler_barrier_sync()
        q = scratch.q.at[own_rows(self.warpgroup)]

        def multiply(s_accumulator, o_accumulator):
            start_accumulator(o_accumulator, state.o)
            self.qk(s_accumulator, q, slot)
            self.pv(o_accumulator, state.p, previous_slot)
            self.warp_scheduler_barrier_arrive()

            s = plgpu.wgmma_accumulator_load(s_accumulator, wait_n=1)
            scratch.k_pipe.release(slot)
            pl.when(step == self.steps.total - 1)(lambda: scratch.q_pipe.release(0))
            row_max, p, rescale = self.softmax(s, step, state.row_max, mask)
            row_sum = state.row_sum * rescale + p.sum(axis=1)
            row_max, row_sum, p, rescale = lax.optimization_barrier((row_max, row_sum, p, rescale))
            # v of this step is read in the next. The wait's branch here keeps ptxas from moving the exponentials behind the
            # wait for pv, beside which they are to run.
            scratch.v_pipe.wait(slot)
            return _State(read_accumulator(o_accumulator, state.o), row_max, row_sum, p), rescale

        new, rescale = pl.run_scoped(multiply, self._s_accumulator(), plgpu.ACC(state.o.shape, jnp.float32))
        scratch.v_pipe.release(previous_slot)
        # Cast p only here: pv reads the previous p from these registers until it completes.
        p = lax.optimization_barrier(new.p).astype(scratch.q.dtype)
        return new._replace(o=rescale_o(new.o, rescale), p=p)

    def last_half_block(self, state: _State) -> Any:
        """Returns o with the last step's p v."""
        scratch = self.block.scratch
        slot = scratch.v_pipe.slot(self.first_step + self.steps.total - 1)

        def multiply(o_accumulator):
            start_accumulator(o_accumulator, state.o)
            self.pv(o_accumulator, state.p, slot)
            return read_accumulator(o_accumulator, state.o)

        o = pl.run_scoped(multiply, plgpu.ACC(state.o.shape, jnp.float32))
        scratch.v_pipe.release(slot)
        return o

    def qk(self, s_accumulator, q, slot) -> None:
        """Issues s = q k^T."""
        plgpu.wgmma(s_accumulator, q, self.block.scratch.k.at[slot].transpose((1, 0)))

    def pv(self, o_accumulator, p, slot) -> None:
        """Issues o += p v."""
        multiply_registers(o_accumulator, p, self.block.scratch.v.at[slot], self.block.scratch.staging, self.warpgroup)

    def softmax(self, s, step, row_max, mask: Mask) -> "_Softmax":
        """Returns p of one step's scores, given the row maximum of the steps before."""
        scale = self.block.scale_log2
        first_key = (self.steps.start - step) * s.shape[1]
        s = mask.with_diagonal().apply(s, first_key, -jnp.inf)
        new_max = jnp.maximum(row_max, s.max(axis=1) * scale)
        p = jnp.exp2(s * scale - broadcast_columns(new_max, s.shape))
        return _Softmax(new_max, p, jnp.exp2(row_max - new_max))

    def warp_scheduler_barrier_sync(self) -> None:
        """Waits until the other consumer has issued its wgmmas: its softmax then runs beside this one's matmuls."""
        plgpu.barrier_wait(self.block.scratch.warp_scheduler_barrier.at[self.warpgroup])

    def warp_scheduler_barrier_arrive(self) -> None:
        """Lets the other consumer issue its wgmmas."""
        plgpu.barrier_arrive(self.block.scratch.warp_scheduler_barrier.at[1 - self.warpgroup])

    def store(self, o, row_scale: "_RowScale", queries) -> None:
        """Writes out and lse: out through shared memory if it is 16 bits wide, else from registers."""
        batch, _, head, _ = self.tile
        previous, outputs, scratch = self.block.inputs.previous, self.block.outputs, self.block.scratch
        out_dtype, out_columns = outputs.out.dtype, scratch.out.shape[2]
        o *= broadcast_columns(row_scale.scale, o.shape)
        for column in range(0, o.shape[1], out_columns):
            columns, part = pl.ds(column, out_columns), o[:, column : column + out_columns]
            target = outputs.out.at[batch, queries, head, columns]
            if previous is not None:
                old = load_tile(previous.out.at[batch, queries, head, columns])
                part = part + old * broadcast_columns(row_scale.previous_scale, old.shape)
            if out_dtype != scratch.out.dtype:
                target[...] = part.astype(out_dtype)
                continue
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            scratch.out[self.warpgroup] = part.astype(out_dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scratch.out.at[self.warpgroup], target)
        outputs.lse[batch, head, queries] = row_scale.lse_log2 * math.log(2)

    def _s_accumulator(self):
        return plgpu.ACC((WGMMA_ROWS, self.block.scratch.k.shape[1]), jnp.float32)


class _Softmax(NamedTuple):
    row_max: Any
    p: Any
    """exp2(score - row_max), f32."""
    rescale: Any
    """The factor of sums that were formed with the row_max before."""


class _RowScale(NamedTuple):
    """The factors of each row at the end of a tile."""

    lse_log2: Any
    """The logsumexp in base 2."""
    scale: Any
    """The factor of o."""
    previous_scale: Any = None
    """The factor of the previous out."""


def rescale_o(o, rescale):
    """Returns o for a new row_max."""
    return o * broadcast_columns(rescale, o.shape)


def finalize(state: _State, *, is_causal: bool) -> _RowScale:
    """Divides by the row's sum; in causal attention each query sees itself, so the sum is not 0."""
    lse = state.row_max + jnp.log2(state.row_sum)
    inverse = 1 / state.row_sum if is_causal else jnp.where(state.row_sum > 0, 1 / state.row_sum, 0.0)
    return _RowScale(lse, inverse)


def merge(new: _RowScale, previous_lse) -> _RowScale:
    """Returns the factors of both parts' sum (`attention.online_softmax`), whose lse is over the keys of both."""
    previous_lse *= LOG2_E
    # Finite, so that differences are numbers where neither part has a key.
    row_max = jnp.maximum(jnp.maximum(new.lse_log2, previous_lse), LOWEST)
    weight, previous_weight = jnp.exp2(new.lse_log2 - row_max), jnp.exp2(previous_lse - row_max)
    row_sum = weight + previous_weight
    lse = row_max + jnp.log2(row_sum)
    inverse = jnp.where(row_sum > 0, 1 / row_sum, 0.0)
    return _RowScale(lse, new.scale * weight * inverse, previous_weight * inverse)
