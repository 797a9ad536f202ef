"""Attention to pages of keys and values on Hopper: a thread block loads a page by TMA in each step, and multiplies with wgmma.

Kernels `paged_attention` and `paged_attention_split`:

item       (block of queries, key head[, split]): up to 64 rows, which are a block's queries times the G heads of a key head.
           Decoding has one query a block; chunks of prompts have 64/G. Keys are split if there are few items. Pages before the
           window of a block's first query are not read, and have no items
smem       q 64 d | k S x 64 d | v S x 64 e | out 64 e; S = 2 stages; d = e = 128: 16 + 32 + 32 + 16 KiB, two blocks a core.
           Pages in FP8: S x 64 (d + 1) and S x 64 (e + 1) bytes, and one k and one v in bf16, to which a page is widened
barriers   q; k[slot], v[slot]: 1 copy each; in FP8 2, codes and exponents. One warpgroup loads and computes: a slot is
           refilled once it was read
time       a block's copies run while the other block of its core computes
cost       a page of keys and values crosses memory once for each block of queries, from L2 if others read it too. A page in
           FP8 has 16.1 KiB instead of 32, and 16384 numbers to widen: v while q k^T runs, the next k while p v runs
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.attention.mosaic.consumer import rescale_o
from moe_jax.kernels.attention.mosaic.warpgroups import (
    LOG2_E,
    broadcast_columns,
    multiply_registers,
    operand,
    read_accumulator,
    start_accumulator,
)
from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.kernels.attention.paged.blocks import QueryBlocks, RowPages, Splits
from moe_jax.kernels.attention.paged.fp8 import F8, FP8Pages, Pages, power_of_two
from moe_jax.kernels.attention.paged.items import Before, Item, ItemOrder, RowSums, Scoring, block_pages, no_keys
from moe_jax.kernels.hopper.interpreter import is_interpreted
from moe_jax.kernels.hopper.launch import BLOCKS_PER_CORE, Named, launch, operand_transforms, store
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS

STAGES = 2


@partial(jax.jit, static_argnames=("scale", "group", "splits"))
def attend_blocks(
    q: Float[Array, "_ kv_heads rows key_dim"],
    keys: Pages,
    values: Pages,
    blocks: QueryBlocks,
    row_pages: RowPages,
    *,
    scale: float,
    group: int,
    splits: Splits,
) -> tuple[Float[Array, "blocks splits kv_heads rows value_dim"], Float[Array, "blocks splits kv_heads _"] | None]:
    """Returns attention and lse of each query block over each split of its keys; rows are queries times `group` heads.

    A single split's result is in q's dtype, without lse. Splits without pages are not written, except a block's first. q may
    have more blocks than `blocks`; these are not read.
    """
    (_, kv_heads, rows, key_dim), value_dim, dtype = q.shape, values.shape[3], q.dtype
    num_blocks = len(blocks.position)
    out_dtype = dtype if splits.number == 1 else jnp.float32
    inputs = Named(of_blocks=block_pages(blocks, row_pages), q=q, k=keys, v=values)
    outputs = [jax.ShapeDtypeStruct((num_blocks, splits.number, kv_heads, rows, value_dim), out_dtype)]
    if splits.number > 1:
        outputs.append(jax.ShapeDtypeStruct((num_blocks, splits.number, kv_heads, WGMMA_ROWS), jnp.float32))
    out_columns = 128 // jnp.dtype(out_dtype).itemsize
    in_fp8 = isinstance(keys, FP8Pages)
    # Two blocks fit on a core. With pages in FP8, 64 x 128 results in f32 would leave room for one.
    out_width = value_dim // 2 if in_fp8 and splits.number > 1 else value_dim
    scratch = Named(
        q=operand(WGMMA_ROWS, key_dim, dtype=dtype),
        k=operand(1 if in_fp8 else STAGES, PAGE_SIZE, key_dim, dtype=dtype),
        v=operand(1 if in_fp8 else STAGES, PAGE_SIZE, value_dim, dtype=dtype),
        out=plgpu.SMEM((WGMMA_ROWS, out_width), out_dtype, transforms=operand_transforms(out_dtype, out_columns)),
        staging=operand(1, WGMMA_ROWS, PAGE_SIZE, dtype=dtype) if is_interpreted() else None,
        k_in_fp8=_slots_in_fp8(key_dim) if in_fp8 else None,
        v_in_fp8=_slots_in_fp8(value_dim) if in_fp8 else None,
        q_barrier=plgpu.Barrier(),
        k_barriers=plgpu.Barrier(num_arrivals=2 if in_fp8 else 1, num_barriers=STAGES),
        v_barriers=plgpu.Barrier(num_arrivals=2 if in_fp8 else 1, num_barriers=STAGES),
    )

    order = ItemOrder(kv_heads, splits, BLOCKS_PER_CORE, splits_last=False)

    def body(inputs: Named, out_ref, *rest) -> None:
        lse_ref, scratch = (None, rest[0]) if splits.number == 1 else rest
        of_blocks = inputs.of_blocks
        scoring = Scoring(scale * LOG2_E, group, of_blocks.read_window())

        def attend(item: Item, before: Before) -> None:
            _Attention(inputs, scratch, item, before.steps, scoring).run(out_ref, lse_ref)

        order.for_each_item(of_blocks, attend)
        plgpu.wait_smem_to_gmem(0)

    name = "paged_attention" if splits.number == 1 else "paged_attention_split"
    out, *lse = launch(name, body, outputs, [scratch], warpgroups=1)(inputs)
    return out, lse[0] if lse else None


class _Attention(NamedTuple):
    """A thread block's work on one item."""

    inputs: Named
    scratch: Named
    item: Item
    first_step: Any
    """The steps of all items before this one: the slots continue from there."""
    scoring: Scoring

    def run(self, out_ref, lse_ref) -> None:
        """Computes one item and stores its result."""
        inputs, scratch, (block, head, split, *_) = self.inputs, self.scratch, self.item
        rows, steps = inputs.q.shape[2], self.item.steps
        plgpu.copy_gmem_to_smem(inputs.q.at[block, head], scratch.q.at[pl.ds(0, rows)], scratch.q_barrier)

        for step in range(STAGES):
            pl.when(step < steps)(partial(self.load, jnp.int32(step)))
        plgpu.barrier_wait(scratch.q_barrier)
        if scratch.k_in_fp8 is not None:
            pl.when(steps > 0)(partial(self.widen_keys, jnp.int32(0)))

        o = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, scratch.v.shape[2]), jnp.float32), plgpu.Layout.WGMMA)
        state = o, no_keys()
        full: Any = 0
        if scratch.k_in_fp8 is not None and self.scoring.window is None:
            # Widening and the mask compete for the same instruction slots, and most pages are before all queries.
            full = jnp.clip(lax.div(self.item.last_key(0) + 1, jnp.int32(PAGE_SIZE)), 0, steps)
            state = lax.fori_loop(0, full, partial(self.add_page, is_full=True), state)
        o, sums = lax.fori_loop(full, steps, self.add_page, state)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out, target, width = rescale_o(o, sums.inverse()), out_ref.at[block, split, head], scratch.out.shape[1]
        for start in range(0, out.shape[1], width):
            if start:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            part = out if width == out.shape[1] else out[:, start : start + width]
            scratch.out[...] = part.astype(scratch.out.dtype)
            plgpu.commit_smem()
            columns = target if width == out.shape[1] else target.at[:, pl.ds(start, width)]
            plgpu.copy_smem_to_gmem(scratch.out.at[pl.ds(0, rows)], columns)
        if lse_ref is not None:
            lse_ref[block, split, head] = sums.lse()

    def slot(self, step):
        return lax.rem(self.first_step + step, jnp.int32(STAGES))

    def load(self, step) -> None:
        """Starts the copies of a step's page."""
        inputs, scratch, head = self.inputs, self.scratch, self.item.head
        page, slot = self.item.page(inputs.of_blocks.page_table, step), self.slot(step)
        for pages, whole, in_fp8, barriers in (
            (inputs.k, scratch.k, scratch.k_in_fp8, scratch.k_barriers),
            (inputs.v, scratch.v, scratch.v_in_fp8, scratch.v_barriers),
        ):
            for source, target in [(pages, whole)] if in_fp8 is None else zip(pages, in_fp8, strict=True):
                place = target.at[slot] if target.shape[1] == PAGE_SIZE else target.at[slot, pl.ds(0, PAGE_SIZE)]
                plgpu.copy_gmem_to_smem(source.at[page, head], place, barriers.at[slot])

    def add_page(self, step, state: tuple[Any, RowSums], *, is_full: bool = False) -> tuple[Any, RowSums]:
        """Adds a page of keys and values, all of them seen if `is_full`, and starts to load the next one of its slot."""
        (o, sums), scratch, slot = state, self.scratch, self.slot(step)
        in_fp8, steps = scratch.k_in_fp8 is not None, self.item.steps
        whole = 0 if in_fp8 else slot
        if in_fp8:
            # The step before, or `run`, has widened the keys.
            plgpu.commit_smem()
        else:
            plgpu.barrier_wait(scratch.k_barriers.at[slot])

        def load_next() -> None:
            pl.when(step + STAGES < steps)(lambda: self.load(step + STAGES))

        def multiply(s_accumulator, o_accumulator) -> tuple[Any, RowSums]:
            plgpu.wgmma(s_accumulator, scratch.q, scratch.k.at[whole].transpose((1, 0)))
            if in_fp8:
                plgpu.barrier_wait(scratch.v_barriers.at[slot])
                _widen(scratch.v_in_fp8, slot, scratch.v)
            s = s_accumulator[...]
            if in_fp8:
                # Also holds back the stores of the next keys until the products of all warps have read these.
                plgpu.commit_smem()
                load_next()
            p, rescale, new_sums = self.scoring.weigh(s, sums, None if is_full else self.item.last_key(step))
            rescaled = rescale_o(o, rescale)
            if not in_fp8:
                plgpu.barrier_wait(scratch.v_barriers.at[slot])
            start_accumulator(o_accumulator, rescaled)
            multiply_registers(o_accumulator, p.astype(scratch.q.dtype), scratch.v.at[whole], scratch.staging, 0)
            if in_fp8:
                pl.when(step + 1 < steps)(lambda: self.widen_keys(step + 1))
            return read_accumulator(o_accumulator, rescaled), new_sums

        s_accumulator = plgpu.ACC((WGMMA_ROWS, PAGE_SIZE), jnp.float32)
        added = pl.run_scoped(multiply, s_accumulator, plgpu.ACC(o.shape, jnp.float32))
        if not in_fp8:
            load_next()
        return added

    def widen_keys(self, step) -> None:
        scratch, slot = self.scratch, self.slot(step)
        plgpu.barrier_wait(scratch.k_barriers.at[slot])
        _widen(scratch.k_in_fp8, slot, scratch.k)


def _slots_in_fp8(width: int) -> FP8Pages:
    # TMA stops the kernel at an address that is no multiple of 128: a page's 64 exponents have twice their room.
    slots: Any = plgpu.SMEM((STAGES, PAGE_SIZE, width), F8), plgpu.SMEM((STAGES, 2 * PAGE_SIZE), jnp.uint8)
    return FP8Pages(*slots)


def _widen(in_fp8: Any, slot: Any, whole: Any) -> None:
    """Writes a page as numbers of `whole`'s dtype; `plgpu.commit_smem` makes them visible to a matmul."""
    width = whole.shape[2]
    lanes = width // 8
    rows = 32 // lanes
    # A thread has 8 adjacent codes: it loads 8 bytes and stores 16.
    tiling = plgpu.Tiling(((4 * rows, width), (rows, width), (8,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
    codes = plgpu.load(in_fp8.codes.at[slot], layout=layout, optimized=False)
    exponents = plgpu.load(in_fp8.exponents.at[slot, pl.ds(0, PAGE_SIZE)], layout=layout.reduce(1), optimized=False)
    powers = power_of_two(exponents.astype(jnp.int32)).astype(whole.dtype)
    factors = broadcast_columns(powers, (PAGE_SIZE, width))
    store(whole.at[0], codes.astype(jnp.float32).astype(whole.dtype) * factors, optimized=True)
