"""Items of the paged attention kernels, (block of queries, head, split), and the softmax of a page, shared by the kernels."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.attention.mosaic.consumer import LOWEST
from moe_jax.kernels.attention.mosaic.warpgroups import ROWS, broadcast_columns
from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.kernels.attention.paged.blocks import QueryBlocks, RowPages, Splits, pages_of_split
from moe_jax.kernels.hopper.launch import grid_size
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS


class BlockPages(NamedTuple):
    """Kernel operands that locate the pages of each query block; arrays outside a kernel, references inside."""

    row: Any
    """None: block i belongs to row i."""
    position: Any
    num_pages: Any
    page_table: Any
    window: Any
    """One number; None if there is none."""

    def read_window(self) -> Any:
        """Loads the window inside a kernel; None if there is none."""
        return None if self.window is None else self.window[0]


def block_pages(blocks: QueryBlocks, row_pages: RowPages) -> BlockPages:
    """Builds the `BlockPages` operands of a kernel."""
    return BlockPages(blocks.row, blocks.position, blocks.num_pages, row_pages.table, row_pages.window)


class Item(NamedTuple):
    """One unit of work: a block of queries, a head and a split of keys. A block without pages has one item of zero steps."""

    block: Any
    head: Any
    split: Any
    row: Any
    position: Any
    """The key position of the block's first query."""
    first_page: Any
    """The first of the pages, as an index into the row's table."""
    steps: Any
    """The number of pages."""

    def page(self, page_table: Any, step: Any) -> Any:
        """Returns the page index of a step from the page table."""
        return page_table[self.row, self.first_page + step]

    def last_key(self, step: Any) -> Any:
        """Returns the last visible key of the block's first query, relative to the first key of a step's page."""
        return self.position - (self.first_page + step) * PAGE_SIZE


class Before(NamedTuple):
    """Counts of items and steps that this thread block has finished, which determine pipeline slots and barrier phases."""

    steps: Any
    items: Any


class ItemOrder(NamedTuple):
    """Assigns items to thread blocks, so that concurrent blocks compute consecutive items."""

    heads: int
    splits: Splits
    blocks_per_core: int
    splits_last: bool
    """True orders work by split (neighbours read the same pages); False by head."""

    def for_each_item(self, of_blocks: BlockPages, body: Callable[[Item, Before], None]) -> Before:
        """Calls `body` for each of this thread block's items; returns their total work.

        Most splits of a short sequence have no pages; they are not items, and their results are not read.
        """
        own, stride = lax.axis_index("block"), grid_size(self.blocks_per_core)
        blocks = of_blocks.position.shape[0]
        items = blocks * self.heads * self.splits.number
        count = lax.div(items - own + stride - 1, jnp.int32(stride))
        window = of_blocks.read_window()

        def run(number, before: Before) -> Before:
            block, head, split = self._item(own + number * stride, blocks)
            row = block if of_blocks.row is None else of_blocks.row[block]
            position, num_pages = of_blocks.position[block], of_blocks.num_pages[block]
            first_page, end = pages_of_split(split, position, num_pages, window, self.splits)
            steps = jnp.maximum(end - first_page, 0)
            exists = (steps > 0) | (split == 0)
            pl.when(exists)(lambda: body(Item(block, head, split, row, position, first_page, steps), before))
            return Before(before.steps + steps, before.items + exists.astype(jnp.int32))

        return lax.fori_loop(0, count, run, Before(jnp.int32(0), jnp.int32(0)))

    def _item(self, index, blocks: int) -> tuple[Any, Any, Any]:
        """Returns (block, head, split)."""
        heads, splits = jnp.int32(self.heads), jnp.int32(self.splits.number)
        if self.splits_last:
            head, index = lax.rem(index, heads), lax.div(index, heads)
            return lax.rem(index, jnp.int32(blocks)), head, lax.div(index, jnp.int32(blocks))
        split, index = lax.rem(index, splits), lax.div(index, splits)
        return lax.div(index, heads), lax.rem(index, heads), split


class RowSums(NamedTuple):
    """The state of the online softmax per row: maximum and sum over the pages so far."""

    row_max: Any
    """In base 2."""
    row_sum: Any

    def inverse(self) -> Any:
        """Returns 1 / sum per row; 0 for a row that has seen no key."""
        return jnp.where(self.row_sum > 0, 1 / self.row_sum, 0.0)

    def lse(self) -> Any:
        """Returns the logsumexp in base 2 per row; -inf for a row that has seen no key."""
        return self.row_max + jnp.log2(self.row_sum)


class Scoring(NamedTuple):
    """Settings of the online softmax: scale in base 2, heads per query (rows), and sliding window or None."""

    scale_log2: float
    group: int
    """Rows of one query, which are consecutive."""
    window: Any

    def weigh(self, s: Any, sums: RowSums, last_key: Any) -> tuple[Any, Any, RowSums]:
        """Online softmax step for one page's scores s. Query 0 sees keys up to `last_key` of the page, each later one more.

        Without `last_key` all queries see all keys of the page.

        Returns the weights of the page's keys, the factor of the result so far, and the new sums.
        """
        if last_key is not None:
            row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
            column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
            last_key_of_row = last_key + lax.div(row, jnp.int32(self.group))
            seen = column <= last_key_of_row
            if self.window is not None:
                seen &= column > last_key_of_row - self.window
            s = jnp.where(seen, s, -jnp.inf)
        row_max = jnp.maximum(sums.row_max, s.max(axis=1) * self.scale_log2)
        p = jnp.exp2(s * self.scale_log2 - broadcast_columns(row_max, s.shape))
        rescale = jnp.exp2(sums.row_max - row_max)
        return p, rescale, RowSums(row_max, sums.row_sum * rescale + p.sum(axis=1))


def no_keys() -> RowSums:
    """Returns the initial `RowSums`, before any page."""
    return RowSums(
        plgpu.layout_cast(jnp.full(WGMMA_ROWS, LOWEST, jnp.float32), ROWS),
        plgpu.layout_cast(jnp.zeros(WGMMA_ROWS, jnp.float32), ROWS),
    )
