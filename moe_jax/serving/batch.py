"""The tokens of a step, made on the device from an upload and the state: their positions, places in pages, and rows."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries
from moe_jax.layers.paged import TokenPlaces
from moe_jax.serving.upload import StepRows


class StepBatch(NamedTuple):
    """The tokens of a step, decoding rows first, and where each stands."""

    tokens: Int[Array, "tokens"]
    positions: Int[Array, "tokens"]
    valid: Bool[Array, "tokens"]
    places: TokenPlaces
    queries: PagedQueries
    last_token_of_row: Int[Array, "rows"]
    queries_per_row: int | None
    """1 for a step without chunks."""


def batch_of(rows: StepRows, page_table: Int[Array, "slots max_pages"], last_token: Int[Array, "slots"]) -> StepBatch:
    """Makes the batch of a table that is up to date."""
    num_decodes, num_chunk_tokens = len(rows.decode_slots), len(rows.chunk_tokens)
    decoding = rows.decode_slots >= 0
    # Chunks lie one behind the other, in the order of their rows.
    ends = jnp.cumsum(rows.chunk_counts)
    index = jnp.arange(num_chunk_tokens, dtype=jnp.int32)
    chunk = jnp.minimum(jnp.searchsorted(ends, index, side="right"), len(ends) - 1)
    in_chunk = index < rows.chunk_counts.sum()
    starts = ends - rows.chunk_counts
    chunk_positions = rows.chunk_starts[chunk] + index - starts[chunk]

    slots = jnp.concatenate([rows.decode_slots, rows.chunk_slots])
    tables = page_table.at[slots].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    row = jnp.concatenate([jnp.arange(num_decodes, dtype=jnp.int32), num_decodes + chunk.astype(jnp.int32)])
    valid = jnp.concatenate([decoding, in_chunk])
    positions = jnp.where(valid, jnp.concatenate([rows.decode_positions, chunk_positions]), 0)
    tokens = jnp.concatenate([jnp.where(decoding, last_token[rows.decode_slots], 0), rows.chunk_tokens])
    page = jnp.where(valid, tables[row, positions // PAGE_SIZE], 0)
    first_query = jnp.concatenate([jnp.arange(num_decodes + 1, dtype=jnp.int32), num_decodes + ends.astype(jnp.int32)])
    num_keys = jnp.concatenate([jnp.where(decoding, rows.decode_positions + 1, 1), rows.chunk_starts + rows.chunk_counts])
    return StepBatch(
        tokens,
        positions,
        valid,
        TokenPlaces(page, positions % PAGE_SIZE),
        PagedQueries(first_query, num_keys, tables),
        jnp.maximum(first_query[1:] - 1, 0),
        queries_per_row=None if num_chunk_tokens else 1,
    )


def updated_table(page_table: Int[Array, "slots max_pages"], rows: StepRows) -> Int[Array, "slots max_pages"]:
    """Returns the table with the new pages of decoding rows, and the tables of chunks."""
    nowhere = len(page_table)
    column = rows.decode_positions // PAGE_SIZE
    slots = jnp.where((rows.decode_slots >= 0) & (rows.decode_pages >= 0), rows.decode_slots, nowhere)
    page_table = page_table.at[slots, column].set(rows.decode_pages, mode="drop")
    slots = jnp.where(rows.chunk_slots >= 0, rows.chunk_slots, nowhere)
    return page_table.at[slots].set(rows.chunk_tables, mode="drop")
