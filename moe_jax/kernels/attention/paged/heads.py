"""Attention to pages of keys and values on Hopper: a block reads a page by TMA each step, and multiplies with wgmma.

Kernels `paged_attention` and `paged_attention_split`:

item       (block of queries, key head[, split]): up to 64 rows, which are a block's queries times the G heads of a key head.
           Decoding has one query a block; chunks of prompts have 64/G. Splits are made where few items exist.
           Pages before the window of a block's first query are not read, and have no items
smem       q 64 d | k S x 64 d | v S x 64 e | out 64 e; S = 2 stages; d = e = 128: 16 + 32 + 32 + 16 KiB, two blocks a core
barriers   q; k[slot], v[slot]: 1 copy each. One warpgroup loads and computes: a slot is filled again once it was read
time       a block's copies run while the other block of its core computes
cost       a page of keys and values crosses memory once for each block of queries, from L2 where others read it too
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.attention.mosaic.forward import LOWEST, rescale_o
from moe_jax.kernels.attention.mosaic.warpgroups import (
    LOG2_E,
    ROWS,
    broadcast_columns,
    multiply_registers,
    operand,
    read_accumulator,
    start_accumulator,
)
from moe_jax.kernels.attention.paged.blocks import QueryBlocks, RowPages, Splits, pages_of_split
from moe_jax.kernels.attention.paged.page_size import PAGE_SIZE
from moe_jax.kernels.hopper.interpreter import is_interpreted
from moe_jax.kernels.hopper.launch import grid_size, launch, operand_transforms
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS

STAGES = 2


@partial(jax.jit, static_argnames=("scale", "group", "splits"))
def attend_blocks(
    q: Float[Array, "blocks kv_heads rows key_dim"],
    keys: Float[Array, "pages kv_heads 64 key_dim"],
    values: Float[Array, "pages kv_heads 64 value_dim"],
    blocks: QueryBlocks,
    row_pages: RowPages,
    *,
    scale: float,
    group: int,
    splits: Splits,
) -> tuple[Float[Array, "blocks splits kv_heads rows value_dim"], Float[Array, "blocks splits kv_heads _"] | None]:
    """Returns the attention of each block, whose rows are its queries times `group` heads, over each split, and its lse.

    A single split's result is in q's dtype, without lse. Splits without pages are not written, but for a block's first.
    """
    (num_blocks, kv_heads, rows, key_dim), value_dim, dtype = q.shape, values.shape[3], q.dtype
    out_dtype = dtype if splits.number == 1 else jnp.float32
    inputs = _Inputs(blocks.row, blocks.position, blocks.num_pages, *row_pages, q, keys, values)
    outputs = [jax.ShapeDtypeStruct((num_blocks, splits.number, kv_heads, rows, value_dim), out_dtype)]
    if splits.number > 1:
        outputs.append(jax.ShapeDtypeStruct((num_blocks, splits.number, kv_heads, WGMMA_ROWS), jnp.float32))
    out_columns = 128 // jnp.dtype(out_dtype).itemsize
    scratch = _Scratch(
        q=operand(WGMMA_ROWS, key_dim, dtype=dtype),
        k=operand(STAGES, PAGE_SIZE, key_dim, dtype=dtype),
        v=operand(STAGES, PAGE_SIZE, value_dim, dtype=dtype),
        out=plgpu.SMEM((WGMMA_ROWS, value_dim), out_dtype, transforms=operand_transforms(out_dtype, out_columns)),
        staging=operand(1, WGMMA_ROWS, PAGE_SIZE, dtype=dtype) if is_interpreted() else None,
        q_barrier=plgpu.Barrier(),
        k_barriers=plgpu.Barrier(num_barriers=STAGES),
        v_barriers=plgpu.Barrier(num_barriers=STAGES),
    )

    def body(inputs: _Inputs, out_ref, *rest) -> None:
        lse_ref, scratch = (None, rest[0]) if splits.number == 1 else rest
        own, stride = lax.axis_index("block"), grid_size()
        items = num_blocks * kv_heads * splits.number
        count = lax.div(items - own + stride - 1, jnp.int32(stride))
        window = None if inputs.window is None else inputs.window[0]

        def item(number, first_step):
            index = own + number * stride
            split, index = lax.rem(index, jnp.int32(splits.number)), lax.div(index, jnp.int32(splits.number))
            head, block = lax.rem(index, jnp.int32(kv_heads)), lax.div(index, jnp.int32(kv_heads))
            item = _Item(inputs, scratch, block, head, split, first_step, scale * LOG2_E, group, splits, window)
            return item.run(out_ref, lse_ref)

        lax.fori_loop(0, count, item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    name = "paged_attention" if splits.number == 1 else "paged_attention_split"
    out, *lse = launch(name, body, outputs, [scratch], warpgroups=1)(inputs)
    return out, lse[0] if lse else None


class _Inputs(NamedTuple):
    row: Any
    position: Any
    num_pages: Any
    page_table: Any
    window: Any
    """None if there is none."""
    q: Any
    k: Any
    v: Any


class _Scratch(NamedTuple):
    q: Any
    k: Any
    v: Any
    out: Any
    staging: Any
    """None on a GPU."""
    q_barrier: Any
    k_barriers: Any
    v_barriers: Any


class _State(NamedTuple):
    """The sums over the pages so far."""

    o: Any
    row_max: Any
    """In base 2."""
    row_sum: Any


class _Item(NamedTuple):
    """A thread block's work on one block of queries, one key head and one split."""

    inputs: _Inputs
    scratch: _Scratch
    block: Any
    head: Any
    split: Any
    first_step: Any
    """The steps of all items before this one: the slots go on from there."""
    scale_log2: float
    group: int
    splits: Splits
    window: Any

    def run(self, out_ref, lse_ref):
        """Computes and stores the item; returns the number of steps so far."""
        inputs = self.inputs
        row = self.block if inputs.row is None else inputs.row[self.block]
        position, num_pages = inputs.position[self.block], inputs.num_pages[self.block]
        first_page, end = pages_of_split(self.split, position, num_pages, self.window, self.splits)
        steps = jnp.maximum(end - first_page, 0)
        # Most splits of a short sequence have no pages, and nobody reads them.
        pl.when((steps > 0) | (self.split == 0))(lambda: self._attend(row, position, first_page, steps, out_ref, lse_ref))
        return self.first_step + steps

    def _attend(self, row, position, first_page, steps, out_ref, lse_ref) -> None:
        inputs, scratch = self.inputs, self.scratch
        rows = inputs.q.shape[2]
        plgpu.copy_gmem_to_smem(inputs.q.at[self.block, self.head], scratch.q.at[pl.ds(0, rows)], scratch.q_barrier)

        def load(step) -> None:
            page, slot = inputs.page_table[row, first_page + step], self.slot(step)
            plgpu.copy_gmem_to_smem(inputs.k.at[page, self.head], scratch.k.at[slot], scratch.k_barriers.at[slot])
            plgpu.copy_gmem_to_smem(inputs.v.at[page, self.head], scratch.v.at[slot], scratch.v_barriers.at[slot])

        for step in range(STAGES):
            pl.when(step < steps)(partial(load, jnp.int32(step)))
        plgpu.barrier_wait(scratch.q_barrier)

        def add_page(step, state: _State) -> _State:
            state = self.add_page(step, state, position - (first_page + step) * PAGE_SIZE)
            pl.when(step + STAGES < steps)(lambda: load(step + STAGES))
            return state

        value_dim = scratch.v.shape[2]
        start = _State(
            plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, value_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full(WGMMA_ROWS, LOWEST, jnp.float32), ROWS),
            plgpu.layout_cast(jnp.zeros(WGMMA_ROWS, jnp.float32), ROWS),
        )
        state = lax.fori_loop(0, steps, add_page, start)
        inverse = jnp.where(state.row_sum > 0, 1 / state.row_sum, 0.0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch.out[...] = rescale_o(state.o, inverse).astype(scratch.out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.out.at[pl.ds(0, rows)], out_ref.at[self.block, self.split, self.head])
        if lse_ref is not None:
            lse_ref[self.block, self.split, self.head] = state.row_max + jnp.log2(state.row_sum)

    def slot(self, step):
        return lax.rem(self.first_step + step, jnp.int32(STAGES))

    def add_page(self, step, state: _State, last_key) -> _State:
        """Adds a page's keys; the first query sees the keys up to `last_key` of this page, the next one a key more."""
        scratch, slot = self.scratch, self.slot(step)
        plgpu.barrier_wait(scratch.k_barriers.at[slot])

        def multiply(s_accumulator, o_accumulator) -> _State:
            plgpu.wgmma(s_accumulator, scratch.q, scratch.k.at[slot].transpose((1, 0)))
            s = s_accumulator[...]
            row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
            column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
            last_key_of_row = last_key + lax.div(row, jnp.int32(self.group))
            seen = column <= last_key_of_row
            if self.window is not None:
                seen &= column > last_key_of_row - self.window
            s = jnp.where(seen, s, -jnp.inf)
            row_max = jnp.maximum(state.row_max, s.max(axis=1) * self.scale_log2)
            p = jnp.exp2(s * self.scale_log2 - broadcast_columns(row_max, (WGMMA_ROWS, PAGE_SIZE)))
            rescale = jnp.exp2(state.row_max - row_max)
            row_sum = state.row_sum * rescale + p.sum(axis=1)
            o = rescale_o(state.o, rescale)
            plgpu.barrier_wait(scratch.v_barriers.at[slot])
            start_accumulator(o_accumulator, o)
            multiply_registers(o_accumulator, p.astype(scratch.q.dtype), scratch.v.at[slot], scratch.staging, 0)
            return _State(read_accumulator(o_accumulator, o), row_max, row_sum)

        s_accumulator = plgpu.ACC((WGMMA_ROWS, PAGE_SIZE), jnp.float32)
        return pl.run_scoped(multiply, s_accumulator, plgpu.ACC(state.o.shape, jnp.float32))
