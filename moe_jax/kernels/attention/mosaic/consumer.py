"""A consumer's part of attention's forward pass: 64 queries of a tile over the tile's blocks of keys (`mosaic.forward`).

It works with any producer that loads q once per tile, then k and v once per step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.attention.mosaic.masks import BlockSteps, Mask
from moe_jax.kernels.attention.mosaic.producer import walk_tiles
from moe_jax.kernels.attention.mosaic.warpgroups import (
    RESIDENT_BLOCK,
    ROWS,
    StagedBlocks,
    TileScheduler,
    broadcast_columns,
    interpreter_staging,
    most_stages,
    multiply_registers,
    operand,
    own_rows,
    read_accumulator,
    start_accumulator,
)
from moe_jax.kernels.hopper.pipeline import CONSUMERS, WGMMA_ROWS, Pipeline

BLOCK_M = RESIDENT_BLOCK
"""Queries of a block."""

LOWEST = -1e30
"""A row maximum below every score, finite so that differences are not NaN."""


class Scratch(NamedTuple):
    """Shared memory and barriers of a thread block in attention's forward kernels."""

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

    @classmethod
    def of(cls, dtype: jnp.dtype, head_dim: int, value_dim: int, *, q_copies: int = 1, copies: int = 1) -> "Scratch":
        """Returns the scratch to allocate. `q_copies` and `copies` count TMA copies for q per tile, and for k or v per step."""
        block, stages = n_blocks(head_dim, value_dim)
        return cls(
            q=operand(BLOCK_M, head_dim, dtype=dtype),
            k=operand(stages, block, head_dim, dtype=dtype),
            v=operand(stages, block, value_dim, dtype=dtype),
            out=operand(CONSUMERS, WGMMA_ROWS, _out_columns(head_dim, value_dim), dtype=dtype),
            staging=interpreter_staging(block, dtype),
            q_pipe=Pipeline.allocate(1, q_copies),
            k_pipe=Pipeline.allocate(stages, copies, has_opaque_slots=True),
            v_pipe=Pipeline.allocate(stages, copies, has_opaque_slots=True),
            warp_scheduler_barrier=plgpu.Barrier(num_barriers=CONSUMERS),
        )

    def run(self, scheduler: TileScheduler, load_tile: Callable, consume_tile: Callable) -> None:
        """Runs the producer and consumer roles over this thread block's tiles (`producer.walk_tiles`)."""
        pipes: dict[str, Any] = dict(once_a_tile=self.q_pipe, once_a_step=(self.k_pipe, self.v_pipe))
        walk_tiles(scheduler, load_tile, consume_tile, **pipes, turns=self.warp_scheduler_barrier)


def n_blocks(head_dim: int, value_dim: int) -> StagedBlocks:
    """Returns the size and number of stages of key blocks that fit in registers and shared memory."""
    resident = BLOCK_M * (head_dim + _out_columns(head_dim, value_dim))
    return most_stages(128 if head_dim <= 192 and value_dim <= 128 else 64, head_dim + value_dim, resident)


def _out_columns(head_dim: int, value_dim: int) -> int:
    """Returns the columns of out that are stored through shared memory at a time: few if q and v leave little room."""
    return value_dim if max(head_dim, value_dim) <= 128 else 64


class State(NamedTuple):
    """The consumer's loop carry after a step: `o` includes p v of all blocks except the newest."""

    o: Any
    row_max: Any
    """In base 2: log2(e) * scale times the largest score."""
    row_sum: Any
    p: Any
    """The last block's exp2(score - row_max), in q's dtype."""


@dataclass(frozen=True)
class Consumer:
    """One warpgroup's computation of a tile: 64 queries over all visible blocks of keys."""

    scratch: Scratch
    scale_log2: float
    """The factor of scores in base 2."""
    warpgroup: Any
    steps: BlockSteps
    first_step: Any
    """The steps of all tiles before this one."""

    def run(self, mask: Mask) -> tuple[Any, "RowScale"]:
        """Loops over the tile's blocks; returns unnormalized o and each row's scale. Only boundary blocks apply the mask."""
        state = self.first_half_block(mask)
        # If N = BLOCK_M, the diagonal of causal attention is only in step 0.
        if mask.kind != "causal" or self.scratch.k.shape[1] < BLOCK_M:
            state = lax.fori_loop(1, self.steps.masked, partial(self.n_block, mask=mask), state)
        state = lax.fori_loop(self.steps.masked, self.steps.full, partial(self.n_block, mask=Mask()), state)
        state = lax.fori_loop(self.steps.full, self.steps.total, partial(self.n_block, mask=mask), state)
        return self.last_half_block(state), finalize(state, is_causal=mask.kind == "causal")

    def first_half_block(self, mask: Mask) -> State:
        """Computes p of the first block; there is no earlier p v to add."""
        scratch = self.scratch
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
        # Finite: a query may see no key of the first blocks, and -inf - -inf is NaN.
        lowest = plgpu.layout_cast(jnp.full(WGMMA_ROWS, LOWEST, jnp.float32), ROWS)
        row_max, p, _ = self.softmax(s, 0, lowest, mask)
        scratch.v_pipe.wait(slot)
        value_dim = scratch.v.shape[2]
        o = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, value_dim), jnp.float32), plgpu.Layout.WGMMA)
        return State(o, row_max, p.sum(axis=1), p.astype(scratch.q.dtype))

    def n_block(self, step, state: State, mask: Mask) -> State:
        """Computes p of one block, while p v of the previous block runs on the tensor cores."""
        scratch = self.scratch
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
            # v of this step is read in the next. The wait's branch here keeps ptxas from moving the exponentials after the wait
            # for pv, with which they should overlap.
            scratch.v_pipe.wait(slot)
            return State(read_accumulator(o_accumulator, state.o), row_max, row_sum, p), rescale

        new, rescale = pl.run_scoped(multiply, self._s_accumulator(), plgpu.ACC(state.o.shape, jnp.float32))
        scratch.v_pipe.release(previous_slot)
        # Cast p only here: pv reads the previous p from these registers until it completes.
        p = lax.optimization_barrier(new.p).astype(scratch.q.dtype)
        return new._replace(o=rescale_o(new.o, rescale), p=p)

    def last_half_block(self, state: State) -> Any:
        """Returns o after adding the last block's p v."""
        scratch = self.scratch
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
        plgpu.wgmma(s_accumulator, q, self.scratch.k.at[slot].transpose((1, 0)))

    def pv(self, o_accumulator, p, slot) -> None:
        """Issues o += p v."""
        multiply_registers(o_accumulator, p, self.scratch.v.at[slot], self.scratch.staging, self.warpgroup)

    def softmax(self, s, step, row_max, mask: Mask) -> tuple[Any, Any, Any]:
        """Online softmax step: returns the new row maximum, p = exp2(score - row_max) in f32, and the rescale factor of o."""
        scale = self.scale_log2
        first_key = (self.steps.start - step) * s.shape[1]
        s = mask.with_diagonal().apply(s, first_key, -jnp.inf)
        new_max = jnp.maximum(row_max, s.max(axis=1) * scale)
        p = jnp.exp2(s * scale - broadcast_columns(new_max, s.shape))
        return new_max, p, jnp.exp2(row_max - new_max)

    def warp_scheduler_barrier_sync(self) -> None:
        """Waits until the other consumer has issued its matmuls, so that its softmax overlaps this consumer's matmuls."""
        plgpu.barrier_wait(self.scratch.warp_scheduler_barrier.at[self.warpgroup])

    def warp_scheduler_barrier_arrive(self) -> None:
        """Signals that this consumer has issued its matmuls, so the other may issue its own."""
        plgpu.barrier_arrive(self.scratch.warp_scheduler_barrier.at[1 - self.warpgroup])

    def _s_accumulator(self):
        return plgpu.ACC((WGMMA_ROWS, self.scratch.k.shape[1]), jnp.float32)


class RowScale(NamedTuple):
    """Per-row factors that normalize o at the end of a tile, and the logsumexp."""

    lse_log2: Any
    """The logsumexp in base 2."""
    scale: Any
    """The factor of o."""
    previous_scale: Any = None
    """The factor of the previous out."""


def rescale_o(o, rescale):
    """Multiplies each row of o by `rescale`, after the row maximum changed."""
    return o * broadcast_columns(rescale, o.shape)


def finalize(state: State, *, is_causal: bool) -> RowScale:
    """Returns each row's 1 / sum of p and its logsumexp; in causal attention each query sees itself, so no sum is 0."""
    lse = state.row_max + jnp.log2(state.row_sum)
    inverse = 1 / state.row_sum if is_causal else jnp.where(state.row_sum > 0, 1 / state.row_sum, 0.0)
    return RowScale(lse, inverse)
