"""Attention to pages of latents on Hopper: all heads read the same rows, whose first columns are their values too.

Kernels `paged_latents` and `paged_latents_split`, with e value columns (512), followed by 64 rotary columns:

item       (block of queries, 64 heads[, split]): up to 64 rows, as in `heads`. Tiles of heads of a split are consecutive,
           followed by a row's other blocks. All but the first read their pages from L2
roles      producer WG3 (40 registers)    TMA q; pages, each once
           scores WG2 (136)               s = q k^T of a page, softmax; p and the factor of o to shared memory
           outputs WG0, WG1 (168)         o[:, own half of e] = factor * o + p v
smem       q 64 (e + 64) | S pages of 64 (e + 64); S = 2, e = 512: 72 + 144 KiB of 227, one block a core
           p overwrites its page's rotary columns, which are not read after the scores
barriers   q_full: 3 copies; q_empty: 1 release, after an item's last scores
           pages.full[s]: 3 copies; p_full[s]: 1 arrival of the scores; pages.empty[s]: 2 releases, after p v
           sums_full: 1 arrival of the scores, with the factor of an item's o; sums_empty: 2 releases
time       the scores of a page overlap p v of the previous page
cost       2 * 64 * 64 * (2 e + 64) FLOPs and 128 (e + 64) bytes a page: 8.9 MFLOP and 74 kB. At 4.8 TB/s a core receives a page
           in 2.0 us. It multiplies it in 1.2 us, and moves 313 kB through shared memory in 1.4 us; twice that with 128 heads
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.attention.mosaic.consumer import rescale_o
from moe_jax.kernels.attention.mosaic.warpgroups import LOG2_E, ROWS, operand, read_accumulator, start_accumulator
from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.kernels.attention.paged.blocks import QueryBlocks, RowPages, Splits
from moe_jax.kernels.attention.paged.items import Before, BlockPages, Item, ItemOrder, RowSums, Scoring, block_pages, no_keys
from moe_jax.kernels.hopper.interpreter import finish_reading
from moe_jax.kernels.hopper.launch import Named, launch, store
from moe_jax.kernels.hopper.pipeline import CONSUMERS, WGMMA_ROWS, Pipeline

STAGES = 2

SCORES, PRODUCER = CONSUMERS, CONSUMERS + 1
"""Warpgroups after the two of the outputs."""

REGISTERS = {"outputs": 168, "scores": 136, "producer": 40}

ROTARY_COLUMNS = 64
"""Columns after the values. A page's p, 64 rows of 64 keys, fits in their memory."""

PART_COLUMNS = 128
"""Columns of a matmul of the outputs. With 512 threads ptxas compiles no instruction of 256 columns, no matter how many
registers a warpgroup gets later."""


@partial(jax.jit, static_argnames=("scale", "group", "splits"))
def attend_latents(
    q: Float[Array, "blocks tiles rows key_dim"],
    latents: Float[Array, "pages 1 64 key_dim"],
    blocks: QueryBlocks,
    row_pages: RowPages,
    *,
    scale: float,
    group: int,
    splits: Splits,
) -> tuple[Float[Array, "blocks splits tiles 64 value_dim"], Float[Array, "blocks splits tiles 64"] | None]:
    """Returns attention and lse of each query block over each split of its latents (MLA), in tiles of 64 rows.

    A tile has up to 64 heads. The values are all columns of the latents except the last 64.
    """
    num_blocks, tiles, _, key_dim = q.shape
    value_dim, dtype = key_dim - ROTARY_COLUMNS, q.dtype
    copies = CONSUMERS * value_parts(value_dim)[1] + 1
    results = num_blocks, splits.number, tiles, WGMMA_ROWS
    outputs = [jax.ShapeDtypeStruct((*results, value_dim), dtype if splits.number == 1 else jnp.float32)]
    if splits.number > 1:
        outputs.append(jax.ShapeDtypeStruct(results, jnp.float32))
    scratch = Named(
        q=LatentColumns.allocate(value_dim, dtype),
        latents=LatentColumns.allocate(value_dim, dtype, STAGES),
        rescale=plgpu.SMEM((STAGES, WGMMA_ROWS), jnp.float32),
        inverse=plgpu.SMEM((WGMMA_ROWS,), jnp.float32),
        pages=Pipeline.allocate(STAGES, copies=copies),
        p_full=plgpu.Barrier(num_barriers=STAGES),
        q_full=plgpu.Barrier(num_arrivals=copies),
        q_empty=plgpu.Barrier(),
        sums_full=plgpu.Barrier(),
        sums_empty=plgpu.Barrier(num_arrivals=CONSUMERS),
    )
    order = ItemOrder(tiles, splits, blocks_per_core=1, splits_last=True)

    def body(of_blocks: BlockPages, q_ref, latents_ref, out_ref, *rest) -> None:
        lse_ref, scratch = (None, rest[0]) if splits.number == 1 else rest
        scoring = Scoring(scale * LOG2_E, group, of_blocks.read_window())
        roles = _Roles(of_blocks, q_ref, latents_ref, out_ref, lse_ref, scratch, order, scoring)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == PRODUCER)
        def _produce():
            plgpu.set_max_registers(REGISTERS["producer"], action="decrease")
            roles.produce()

        @pl.when(warpgroup == SCORES)
        def _score():
            plgpu.set_max_registers(REGISTERS["scores"], action="increase")
            roles.score()

        @pl.when(warpgroup < CONSUMERS)
        def _sum():
            plgpu.set_max_registers(REGISTERS["outputs"], action="increase")
            roles.sum_values(warpgroup)

    name = "paged_latents" if splits.number == 1 else "paged_latents_split"
    kernel = launch(name, body, outputs, [scratch], warpgroups=PRODUCER + 1, blocks_per_core=1)
    out, *lse = kernel(block_pages(blocks, row_pages), q, latents)
    return out, lse[0] if lse else None


class LatentColumns(NamedTuple):
    """Latents or queries in shared memory, split into column groups that are multiplied separately."""

    values: Any
    """The columns of values: [.., 2 warpgroups of the outputs, parts, 64, part's columns]."""
    rotary: Any
    """The columns after them; p, once scores are computed."""

    @classmethod
    def allocate(cls, value_dim: int, dtype: jnp.dtype, *slots: int) -> "LatentColumns":
        """Allocates 64 rows in each slot."""
        parts = operand(*slots, *value_parts(value_dim), dtype=dtype)
        return cls(parts, operand(*slots, WGMMA_ROWS, ROTARY_COLUMNS, dtype=dtype))

    def copy(self, source, rows: int, barrier) -> None:
        """Starts the TMA copies of the first `rows` rows."""
        *_, parts, _, width = self.values.shape
        for part, (warpgroup, own) in enumerate(np.ndindex(CONSUMERS, parts)):
            columns = pl.ds(part * width, width)
            plgpu.copy_gmem_to_smem(source.at[:, columns], self.values.at[warpgroup, own, pl.ds(0, rows)], barrier)
        columns = pl.ds(CONSUMERS * parts * width, ROTARY_COLUMNS)
        plgpu.copy_gmem_to_smem(source.at[:, columns], self.rotary.at[pl.ds(0, rows)], barrier)

    def slot(self, slot) -> "LatentColumns":
        """Returns one of several pipeline slots."""
        return LatentColumns(self.values.at[slot], self.rotary.at[slot])


def value_parts(value_dim: int) -> tuple[int, int, int, int]:
    """Returns the shape of the value columns in shared memory."""
    width = min(PART_COLUMNS, value_dim // CONSUMERS)
    return CONSUMERS, value_dim // CONSUMERS // width, WGMMA_ROWS, width


class _Roles(NamedTuple):
    """The roles of a thread block's warpgroups, each a loop over the block's items."""

    of_blocks: BlockPages
    q_ref: Any
    latents_ref: Any
    out_ref: Any
    lse_ref: Any
    scratch: Named
    order: ItemOrder
    scoring: Scoring

    def produce(self) -> None:
        """Producer: loads an item's queries, then one page per step."""
        scratch, pages = self.scratch, self.scratch.pages

        def item(item: Item, before: Before) -> None:
            def load(step) -> None:
                page = item.page(self.of_blocks.page_table, step)
                pages.acquire(before.steps + step)
                slot = pages.slot(before.steps + step)
                scratch.latents.slot(slot).copy(self.latents_ref.at[page, 0], PAGE_SIZE, pages.full_barrier(slot))

            # A slot becomes free before the queries' buffer does.
            pl.when(item.steps > 0)(lambda: load(jnp.int32(0)))
            pl.when(before.items > 0)(lambda: plgpu.barrier_wait(scratch.q_empty))
            scratch.q.copy(self.q_ref.at[item.block, item.head], self.q_ref.shape[2], scratch.q_full)
            lax.fori_loop(1, item.steps, lambda step, _: load(step), None)

        total = self.order.for_each_item(self.of_blocks, item)
        pages.drain(total.steps)
        pl.when(total.items > 0)(lambda: plgpu.barrier_wait(scratch.q_empty))

    def score(self) -> None:
        """Scores warpgroup: computes q k^T and softmax of each page, and passes p to both output warpgroups."""
        scratch = self.scratch

        def item(item: Item, before: Before) -> None:
            plgpu.barrier_wait(scratch.q_full)

            def add_page(step, sums: RowSums) -> RowSums:
                return self._score_page(scratch.pages.slot(before.steps + step), sums, item.last_key(step))

            sums = lax.fori_loop(0, item.steps, add_page, no_keys())
            plgpu.barrier_arrive(scratch.q_empty)
            pl.when(before.items > 0)(lambda: plgpu.barrier_wait(scratch.sums_empty))
            scratch.inverse[...] = sums.inverse()
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.sums_full)
            if self.lse_ref is not None:
                self.lse_ref[item.block, item.split, item.head] = sums.lse()

        total = self.order.for_each_item(self.of_blocks, item)
        pl.when(total.items > 0)(lambda: plgpu.barrier_wait(scratch.sums_empty))

    def _score_page(self, slot, sums: RowSums, last_key) -> RowSums:
        scratch = self.scratch
        scratch.pages.wait(slot)
        q, k = scratch.q, scratch.latents.slot(slot)

        def multiply(accumulator) -> RowSums:
            for part in np.ndindex(q.values.shape[:2]):
                plgpu.wgmma(accumulator, q.values.at[part], k.values.at[part].transpose((1, 0)))
            plgpu.wgmma(accumulator, q.rotary, k.rotary.transpose((1, 0)))
            p, rescale, new_sums = self.scoring.weigh(accumulator[...], sums, last_key)
            k.rotary[...] = p.astype(k.rotary.dtype)
            scratch.rescale.at[slot][...] = rescale
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.p_full.at[slot])
            return new_sums

        return pl.run_scoped(multiply, plgpu.ACC((WGMMA_ROWS, PAGE_SIZE), jnp.float32))

    def sum_values(self, warpgroup) -> None:
        """Output warpgroup: accumulates p v for half of the result's columns."""
        scratch = self.scratch
        *_, parts, _, width = scratch.q.values.shape

        def item(item: Item, before: Before) -> None:
            def add_page(step, o):
                return self._add_page(warpgroup, scratch.pages.slot(before.steps + step), o)

            zeros = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
            o = lax.fori_loop(0, item.steps, add_page, [zeros] * parts)
            plgpu.barrier_wait(scratch.sums_full)
            inverse = plgpu.load(scratch.inverse, layout=ROWS, optimized=False)
            finish_reading()
            plgpu.barrier_arrive(scratch.sums_empty)
            for part in range(parts):
                out = self.out_ref.at[item.block, item.split, item.head, :, pl.ds((warpgroup * parts + part) * width, width)]
                store(out, rescale_o(o[part], inverse).astype(out.dtype))

        self.order.for_each_item(self.of_blocks, item)

    def _add_page(self, warpgroup, slot, o: list) -> list:
        scratch = self.scratch
        scratch.pages.wait(slot)
        plgpu.barrier_wait(scratch.p_full.at[slot])
        rescale = plgpu.load(scratch.rescale.at[slot], layout=ROWS, optimized=False)
        o = [rescale_o(part, rescale) for part in o]
        latents = scratch.latents.slot(slot)

        def multiply(*accumulators) -> list:
            for part, accumulator in enumerate(accumulators):
                start_accumulator(accumulator, o[part])
            for part, accumulator in enumerate(accumulators):
                plgpu.wgmma(accumulator, latents.rotary, latents.values.at[warpgroup, part])
            return [read_accumulator(*pair) for pair in zip(accumulators, o, strict=True)]

        o = pl.run_scoped(multiply, *(plgpu.ACC(part.shape, jnp.float32) for part in o))
        finish_reading()
        scratch.pages.release(slot)
        return o
