"""Attention to pages of keys and values on Hopper: a thread block loads a page by TMA in each step, and multiplies with wgmma.

Kernels `paged_attention` and `paged_attention_split`:

item       (block of queries, key head[, split]): up to 64 rows, which are a block's queries times the G heads of a key head.
           Decoding has one query a block; chunks of prompts have 64/G. Keys are split if there are few items. Pages before the
           window of a block's first query are not read, and have no items
smem       q 64 d | k S x 64 d | v S x 64 e | out 64 e; S = 2 stages; d = e = 128: 16 + 32 + 32 + 16 KiB, two blocks a core
barriers   q; k[slot], v[slot]: 1 copy each. One warpgroup loads and computes: a slot is refilled once it was read
time       a block's copies run while the other block of its core computes
cost       a page of keys and values crosses memory once for each block of queries, from L2 if others read it too
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
from moe_jax.kernels.attention.mosaic.warpgroups import LOG2_E, multiply_registers, operand, read_accumulator, start_accumulator
from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.kernels.attention.paged.blocks import QueryBlocks, RowPages, Splits
from moe_jax.kernels.attention.paged.items import Before, Item, ItemOrder, RowSums, Scoring, block_pages, no_keys
from moe_jax.kernels.hopper.interpreter import is_interpreted
from moe_jax.kernels.hopper.launch import BLOCKS_PER_CORE, Named, launch, operand_transforms
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS

STAGES = 2


@partial(jax.jit, static_argnames=("scale", "group", "splits"))
def attend_blocks(
    q: Float[Array, "_ kv_heads rows key_dim"],
    keys: Float[Array, "pages kv_heads 64 key_dim"],
    values: Float[Array, "pages kv_heads 64 value_dim"],
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
    scratch = Named(
        q=operand(WGMMA_ROWS, key_dim, dtype=dtype),
        k=operand(STAGES, PAGE_SIZE, key_dim, dtype=dtype),
        v=operand(STAGES, PAGE_SIZE, value_dim, dtype=dtype),
        out=plgpu.SMEM((WGMMA_ROWS, value_dim), out_dtype, transforms=operand_transforms(out_dtype, out_columns)),
        staging=operand(1, WGMMA_ROWS, PAGE_SIZE, dtype=dtype) if is_interpreted() else None,
        q_barrier=plgpu.Barrier(),
        k_barriers=plgpu.Barrier(num_barriers=STAGES),
        v_barriers=plgpu.Barrier(num_barriers=STAGES),
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

        def load(step) -> None:
            page, slot = self.item.page(inputs.of_blocks.page_table, step), self.slot(step)
            plgpu.copy_gmem_to_smem(inputs.k.at[page, head], scratch.k.at[slot], scratch.k_barriers.at[slot])
            plgpu.copy_gmem_to_smem(inputs.v.at[page, head], scratch.v.at[slot], scratch.v_barriers.at[slot])

        for step in range(STAGES):
            pl.when(step < steps)(partial(load, jnp.int32(step)))
        plgpu.barrier_wait(scratch.q_barrier)

        def add_page(step, state: tuple[Any, RowSums]) -> tuple[Any, RowSums]:
            state = self.add_page(step, *state)
            pl.when(step + STAGES < steps)(lambda: load(step + STAGES))
            return state

        o = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, scratch.v.shape[2]), jnp.float32), plgpu.Layout.WGMMA)
        o, sums = lax.fori_loop(0, steps, add_page, (o, no_keys()))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch.out[...] = rescale_o(o, sums.inverse()).astype(scratch.out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.out.at[pl.ds(0, rows)], out_ref.at[block, split, head])
        if lse_ref is not None:
            lse_ref[block, split, head] = sums.lse()

    def slot(self, step):
        return lax.rem(self.first_step + step, jnp.int32(STAGES))

    def add_page(self, step, o: Any, sums: RowSums) -> tuple[Any, RowSums]:
        scratch, slot = self.scratch, self.slot(step)
        plgpu.barrier_wait(scratch.k_barriers.at[slot])

        def multiply(s_accumulator, o_accumulator) -> tuple[Any, RowSums]:
            plgpu.wgmma(s_accumulator, scratch.q, scratch.k.at[slot].transpose((1, 0)))
            p, rescale, new_sums = self.scoring.weigh(s_accumulator[...], sums, self.item.last_key(step))
            rescaled = rescale_o(o, rescale)
            plgpu.barrier_wait(scratch.v_barriers.at[slot])
            start_accumulator(o_accumulator, rescaled)
            multiply_registers(o_accumulator, p.astype(scratch.q.dtype), scratch.v.at[slot], scratch.staging, 0)
            return read_accumulator(o_accumulator, rescaled), new_sums

        s_accumulator = plgpu.ACC((WGMMA_ROWS, PAGE_SIZE), jnp.float32)
        return pl.run_scoped(multiply, s_accumulator, plgpu.ACC(o.shape, jnp.float32))
