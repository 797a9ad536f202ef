"""The queries of paged attention: ragged rows of tokens, each with a table of the pages that hold its keys."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class PagedQueries(NamedTuple):
    """Rows of queries, one row a sequence, that follow each other along the axis of tokens.

    Query i of row r stands at key position num_keys[r] - count[r] + i, where count[r] = first_query[r + 1] - first_query[r].
    Key j of row r lies in page page_table[r, j // PAGE_SIZE], at place j % PAGE_SIZE. Rows may share pages.
    """

    first_query: Int[Array, "rows+1"]
    """Where each row's queries begin. The last entry is the number of queries; tokens behind it are padding."""
    num_keys: Int[Array, "rows"]
    """Keys of each row, those of its own queries included."""
    page_table: Int[Array, "rows max_pages"]
    """Entries behind a row's last key may be any number."""


class QueryPlaces(NamedTuple):
    """The row of each token and its position among the row's keys."""

    row: Int[Array, "tokens"]
    """Some row, for padding too."""
    position: Int[Array, "tokens"]
    """-1 for padding."""


def places(queries: PagedQueries, num_tokens: int) -> QueryPlaces:
    """Returns where each of `num_tokens` tokens stands; -1 also stands for a row with fewer keys than queries."""
    first, token = queries.first_query, jnp.arange(num_tokens, dtype=jnp.int32)
    rows = queries.num_keys.shape[0]
    row = jnp.clip(jnp.searchsorted(first, token, side="right", method="compare_all") - 1, 0, rows - 1).astype(jnp.int32)
    is_query = (token >= first[0]) & (token < first[rows])
    position = queries.num_keys[row] - first[row + 1] + token
    return QueryPlaces(row, jnp.where(is_query, jnp.maximum(position, -1), -1).astype(jnp.int32))
