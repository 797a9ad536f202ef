"""The queries of paged attention: ragged rows of tokens, each with a table of pages; and the blocks that kernels compute."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from moe_jax.kernels.attention.paged import PAGE_SIZE


class PagedQueries(NamedTuple):
    """Ragged rows of queries, one row per sequence, concatenated along the token axis, with a page table per row.

    Query i of row r is at key position num_keys[r] - count[r] + i, where count[r] = first_query[r + 1] - first_query[r]. Key j
    of row r is in page page_table[r, j // PAGE_SIZE], at offset j % PAGE_SIZE. Rows may share pages.
    """

    first_query: Int[Array, "rows+1"]
    """The start of each row's queries. The last entry is the number of queries; tokens after it are padding."""
    num_keys: Int[Array, "rows"]
    """Keys of each row, including its own queries'."""
    page_table: Int[Array, "rows max_pages"]
    """Entries after a row's last key may be any number."""


def places(queries: PagedQueries, num_tokens: int) -> tuple[Int[Array, "tokens"], Int[Array, "tokens"]]:
    """Returns each token's row, and its position among the row's keys.

    Padding, and tokens of rows with fewer keys than queries, have an arbitrary row and position -1.
    """
    first, token = queries.first_query, jnp.arange(num_tokens, dtype=jnp.int32)
    rows = queries.num_keys.shape[0]
    row = jnp.clip(jnp.searchsorted(first, token, side="right", method="compare_all") - 1, 0, rows - 1).astype(jnp.int32)
    is_query = (token >= first[0]) & (token < first[rows])
    position = queries.num_keys[row] - first[row + 1] + token
    return row, jnp.where(is_query, jnp.maximum(position, -1), -1).astype(jnp.int32)


class QueryBlocks(NamedTuple):
    """Blocks of consecutive queries of one row, as the kernels process them; the same for all layers."""

    tokens: Int[Array, "blocks block_tokens"]
    """The block's queries, as indices of tokens; the number of tokens for unused places."""
    row: Int[Array, "blocks"] | None
    """None: block i is row i's one query. XLA would recompute these numbers for each layer in a separate kernel."""
    position: Int[Array, "blocks"]
    """The key position of the first query."""
    num_pages: Int[Array, "blocks"]
    """The number of pages that the last query sees; 0 for a block of padding or without queries."""
    place: Int[Array, "tokens"]
    """For each token its place in `tokens`, flattened; arbitrary for a token in no block."""


class RowPages(NamedTuple):
    """The page table of each row, and the sliding window of all rows."""

    table: Int[Array, "rows max_pages"]
    window: Int[Array, "1"] | None
    """The sliding window of all rows, from `window_operand`; None if there is none."""


@jax.jit
def single_query_blocks(num_keys: Int[Array, "rows"]) -> QueryBlocks:
    """Returns one block per row, for decoding with one query per row."""
    token, position = jnp.arange(len(num_keys), dtype=jnp.int32), num_keys - 1
    return QueryBlocks(token[:, None], None, position, jnp.maximum(position // PAGE_SIZE + 1, 0), token)


def most_blocks(rows: int, num_tokens: int, block_tokens: int) -> int:
    """Returns an upper bound on the blocks of `rows` rows and `num_tokens` tokens, padding included."""
    return min(rows + 1 + num_tokens // block_tokens, num_tokens)


@partial(jax.jit, static_argnums=(1, 2), static_argnames="skip")
def query_blocks(queries: PagedQueries, num_tokens: int, block_tokens: int, *, skip: int = 0) -> QueryBlocks:
    """Cuts each row's queries, and then padding, into blocks of `block_tokens`.

    Args:
      skip: the number of rows, the first ones, that have one query each and get no blocks.
    """
    first_query, num_keys = queries.first_query[skip:], queries.num_keys[skip:]
    rows = len(num_keys)
    num_blocks = most_blocks(rows, num_tokens - skip, block_tokens)
    # Padding is an extra last row, which sees no page.
    counts = jnp.append(first_query[1:], num_tokens) - first_query
    ends = jnp.cumsum(-(-counts // block_tokens))
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, block, side="right", method="compare_all"), rows).astype(jnp.int32)
    number = block - (ends[row] - -(-counts[row] // block_tokens))
    first = number * block_tokens
    in_row = jnp.where(block < ends[-1], jnp.clip(counts[row] - first, 0, block_tokens), 0)
    index = jnp.arange(block_tokens, dtype=jnp.int32)
    tokens = first_query[row][:, None] + first[:, None] + index
    is_used = index < in_row[:, None]
    tokens = jnp.where(is_used, tokens, num_tokens)
    is_padding, row = row == rows, jnp.minimum(row, rows - 1)
    position = jnp.where(is_padding, 0, num_keys[row] - counts[row] + first)
    num_pages = jnp.where((in_row > 0) & ~is_padding, (position + in_row - 1) // PAGE_SIZE + 1, 0)
    places = jnp.arange(num_blocks * block_tokens, dtype=jnp.int32)
    place = jnp.zeros(num_tokens, jnp.int32).at[tokens.reshape(-1)].set(places, mode="drop")
    return QueryBlocks(tokens, skip + row, position.astype(jnp.int32), num_pages.astype(jnp.int32), place)


class Splits(NamedTuple):
    """Splits of a block's keys over thread blocks (split-K): each begins at a multiple of `pages` pages."""

    number: int
    """The maximum number of parts with pages of a block, counted from the first such part."""
    pages: int


WHOLE = Splits(1, 2**20)
"""One part of all pages."""


def most_splits(max_pages: int, pages: int, window: Array | int | None, block_tokens: int) -> Splits:
    """Returns the `Splits` of `pages` pages each; a static window limits their number."""
    number = -(-max_pages // pages)
    if isinstance(window, int | np.integer):
        keys = int(window) + block_tokens - 1
        number = min(number, -(-(keys - 1) // (pages * PAGE_SIZE)) + 1)
    return Splits(number, pages) if number > 1 else WHOLE


def window_operand(window: Array | int | None) -> Int[Array, "1"] | None:
    """Converts a window to the int32 operand of the kernels, clamped against overflow."""
    return None if window is None else jnp.clip(jnp.asarray(window, jnp.int32), 1, 2**30).reshape(1)


def first_page(position: Any, num_pages: Any, window: Any) -> Any:
    """Returns the index of the page that contains the start of a block's sliding window; 0 without a window or pages."""
    if window is None:
        # Under a mesh with explicit axes, `zeros_like` of a scalar is a literal, which Pallas cannot lower as a result.
        return 0 * num_pages
    page = lax.div(jnp.maximum(position - window + 1, 0), jnp.int32(PAGE_SIZE))
    return jnp.minimum(page, jnp.maximum(num_pages - 1, 0))


def pages_of_split(split: Any, position: Any, num_pages: Any, window: Any, splits: Splits) -> tuple[Any, Any]:
    """Returns the page range [first, end) of one split of a block."""
    first = first_page(position, num_pages, window)
    begin = (lax.div(first, jnp.int32(splits.pages)) + split) * splits.pages
    return jnp.maximum(first, begin), jnp.minimum(num_pages, begin + splits.pages)


def count_splits(position: Any, num_pages: Any, window: Any, splits: Splits) -> Any:
    """Returns how many splits of a block have any pages."""
    first, pages = first_page(position, num_pages, window), jnp.int32(splits.pages)
    return lax.div(num_pages + (pages - 1), pages) - lax.div(first, pages)
