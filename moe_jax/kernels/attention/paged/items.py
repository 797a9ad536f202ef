"""The items of the paged attention kernels, (block of queries, head, split), as persistent thread blocks take them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from moe_jax.kernels.attention.paged.blocks import QueryBlocks, RowPages, Splits, pages_of_split
from moe_jax.kernels.attention.paged.page_size import PAGE_SIZE
from moe_jax.kernels.hopper.launch import grid_size


class BlockPages(NamedTuple):
    """The pages of each block of queries; arrays outside a kernel, references inside."""

    row: Any
    """None: block i is of row i."""
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
    """The first of the pages, as a place in the row's table."""
    steps: Any
    """The number of pages."""

    def page(self, page_table: Any, step: Any) -> Any:
        """Returns the number of a step's page."""
        return page_table[self.row, self.first_page + step]

    def last_key(self, step: Any) -> Any:
        """Returns the last key that the block's first query sees, counted from the first key of a step's page."""
        return self.position - (self.first_page + step) * PAGE_SIZE


class Before(NamedTuple):
    """The work of a thread block before an item: slots and barriers go on from there."""

    steps: Any
    items: Any


class ItemOrder(NamedTuple):
    """The order of items. Thread blocks that run beside each other take items that follow each other."""

    heads: int
    splits: Splits
    blocks_per_core: int
    splits_last: bool
    """True: heads and blocks of one split follow each other, of which many read the same pages. False: a head's splits do."""

    def for_each_item(self, of_blocks: BlockPages, body: Callable[[Item, Before], None]) -> Before:
        """Calls body for this thread block's items, and returns how much work they were.

        Most splits of a short sequence have no pages. Nobody reads their results, and they are no items.
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
