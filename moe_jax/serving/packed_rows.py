"""Pages for the documents of packed rows: each document begins at a page of its own, as a sequence of an engine does.

row         | a: 100 tokens | b: 70 tokens | padding: 22 tokens |
pages       |   0   |   1   |   2   |  3   |         4          |
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Integer

from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries
from moe_jax.layers.paged import TokenPlaces
from moe_jax.layers.segments import segment_positions


class PackedRows(NamedTuple):
    """The places, positions and queries of the tokens of packed rows, one row behind the other."""

    positions: Int[Array, "tokens"]
    """Each token's index in its segment."""
    places: TokenPlaces
    queries: PagedQueries
    """A row for each segment; rows behind the last segment of a row of tokens have no queries."""
    num_pages: int
    num_segments: Int[Array, "rows"]
    """The segments of each row of tokens. Of a row with more than `max_segments` nothing else here is of use."""


def in_pages(segment_ids: Integer[Array, "rows seq"], max_segments: int) -> PackedRows:
    """Gives the tokens of each segment, a run of equal ids, pages of its own. Padding is a segment too.

    Args:
      max_segments: the most segments of a row.
    """
    rows, seq = segment_ids.shape
    positions = segment_positions(segment_ids)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    number = jnp.cumsum(positions == 0, axis=1, dtype=jnp.int32) - 1
    # The sum of ceil(length / 64) is largest where each segment leaves 63 places of its last page empty.
    per_row = (seq + (PAGE_SIZE - 1) * max_segments) // PAGE_SIZE
    page = jnp.cumsum(positions % PAGE_SIZE == 0, axis=1, dtype=jnp.int32) - 1
    page = (per_row * row + jnp.minimum(page, per_row - 1)).ravel()
    segment = (max_segments * row + jnp.minimum(number, max_segments - 1)).ravel()
    lengths = jnp.zeros(rows * max_segments, jnp.int32).at[segment].add(1)
    num_pages = rows * per_row
    first_page = jnp.full(rows * max_segments, num_pages, jnp.int32).at[segment].min(page)
    table = jnp.minimum(first_page[:, None] + jnp.arange(-(-seq // PAGE_SIZE), dtype=jnp.int32), num_pages - 1)
    queries = PagedQueries(jnp.pad(jnp.cumsum(lengths, dtype=jnp.int32), (1, 0)), lengths, table)
    places = TokenPlaces(page, (positions % PAGE_SIZE).ravel())
    return PackedRows(positions.ravel(), places, queries, num_pages, number[:, -1] + 1)
