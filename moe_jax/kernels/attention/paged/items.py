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
    """The pages of each block of queries; arrays outside a kernel, references inside."""

    row: Any
    """None: block i belongs to row i."""
    position: Any
    num_pages: Any
    page_table: Any
    window: Any
    """One number; None if there is none."""

    def read_window(self) -> Any:
        """Returns the window's number inside a kernel, None if there is none."""
        return None if self.window is None else self.window[0]


def block_pages(blocks: QueryBlocks, row_pages: RowPages) -> BlockPages:
    """Returns the operands of a kernel."""
    return BlockPages(blocks.row, blocks.position, blocks.num_pages, row_pages.table, row_pages.window)


class Item(NamedTuple):
    """One block of queries, one head and one split. A block without pages has an item of no steps, its first split."""

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
        """Returns the number of a step's page."""
        return page_table[self.row, self.first_page + step]

    def last_key(self, step: Any) -> Any:
        """Returns the last key that the block's first query sees, counted from the first key of a step's page."""
        return self.position - (self.first_page + step) * PAGE_SIZE


class Before(NamedTuple):
    """The work of a thread block before an item: slots and barriers continue from there."""

    steps: Any
    items: Any


class ItemOrder(NamedTuple):
    """The order of items. Concurrent thread blocks compute consecutive items."""

    heads: int
    splits: Splits
    blocks_per_core: int
    splits_last: bool
    """True orders work by split (neighbours read the same pages); False by head."""

    def for_each_item(self, of_blocks: BlockPages, body: Callable[[Item, Before], None]) -> Before:
        """Calls body for this thread block's items, and returns their total work.

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
    """The sums over the pages so far, for each row."""

    row_max: Any
    """In base 2."""
    row_sum: Any

    def inverse(self) -> Any:
        """Returns the factor of the result; 0 for a row that has seen no key."""
        return jnp.where(self.row_sum > 0, 1 / self.row_sum, 0.0)

    def lse(self) -> Any:
        """Returns the logarithm in base 2; -inf for a row that has seen no key."""
        return self.row_max + jnp.log2(self.row_sum)


class Scoring(NamedTuple):
    """The rules of all rows: the scale of scores in base 2, the queries' heads, and the window, None if there is none."""

    scale_log2: float
    group: int
    """Rows of one query, which are consecutive."""
    window: Any

    def weigh(self, s: Any, sums: RowSums, last_key: Any) -> tuple[Any, Any, RowSums]:
        """Adds a page's scores; the first query sees the keys up to `last_key` of this page, each later query one key more.

        Returns the weights of the page's keys, the factor of the result so far, and the new sums.
        """
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
    """Returns the sums over no page."""
    return RowSums(
        plgpu.layout_cast(jnp.full(WGMMA_ROWS, LOWEST, jnp.float32), ROWS),
        plgpu.layout_cast(jnp.zeros(WGMMA_ROWS, jnp.float32), ROWS),
    )
