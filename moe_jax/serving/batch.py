"""The tokens of a step, made on the device from an upload and the state: their positions, places in pages, and rows.

`ComputedLayers` are their results.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries
from moe_jax.layers.paged import LayerPages, TokenPlaces
from moe_jax.serving.draft_state import Drafting
from moe_jax.serving.upload import StepRows


class StepBatch(NamedTuple):
    """The tokens of a step, decoding rows first, and where each stands."""

    tokens: Int[Array, "tokens"]
    positions: Int[Array, "tokens"]
    valid: Bool[Array, "tokens"]
    places: TokenPlaces
    queries: PagedQueries
    outputs: Int[Array, "outputs"]
    single_query_rows: int
    """The number of decoding rows; 0 with drafts, where each has two queries."""


class ComputedLayers(NamedTuple):
    """The results of all layers of a step."""

    hidden: Float[Array, "tokens hidden"]
    """Hidden states behind the last norm."""
    pages: list[LayerPages]
    experts: list[Int[Array, "tokens k"]]
    """The experts of each MoE layer."""


def batch_of(
    rows: StepRows, page_table: Int[Array, "slots max_pages"], last_token: Int[Array, "slots"], drafting: Drafting | None
) -> StepBatch:
    """Makes the batch of a table that is up to date."""
    num_decodes, num_chunk_tokens = len(rows.decode_slots), len(rows.chunk_tokens)
    decoding = _decoding(rows, last_token, drafting)
    per_row = decoding.tokens.shape[1]
    # Chunks lie one behind the other, in the order of their rows.
    ends = jnp.cumsum(rows.chunk_counts)
    index = jnp.arange(num_chunk_tokens, dtype=jnp.int32)
    chunk = jnp.minimum(jnp.searchsorted(ends, index, side="right"), len(ends) - 1)
    in_chunk = index < rows.chunk_counts.sum()
    starts = ends - rows.chunk_counts
    chunk_positions = rows.chunk_starts[chunk] + index - starts[chunk]

    slots = jnp.concatenate([rows.decode_slots, rows.chunk_slots])
    tables = page_table.at[slots].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    decode_rows = jnp.arange(num_decodes, dtype=jnp.int32)
    row = jnp.concatenate([jnp.repeat(decode_rows, per_row), num_decodes + chunk.astype(jnp.int32)])
    valid = jnp.concatenate([decoding.valid.ravel(), in_chunk])
    positions = jnp.where(valid, jnp.concatenate([decoding.positions.ravel(), chunk_positions]), 0)
    tokens = jnp.concatenate([jnp.where(decoding.valid, decoding.tokens, 0).ravel(), rows.chunk_tokens])
    page = jnp.where(valid, tables[row, positions // PAGE_SIZE], 0)
    num_decoding = num_decodes * per_row
    first_query = per_row * jnp.arange(num_decodes + 1, dtype=jnp.int32)
    first_query = jnp.concatenate([first_query, num_decoding + ends.astype(jnp.int32)])
    num_keys = jnp.where(rows.decode_slots >= 0, decoding.positions[:, -1] + 1, 1)
    num_keys = jnp.concatenate([num_keys, rows.chunk_starts + rows.chunk_counts])
    last_of_chunks = jnp.maximum(first_query[num_decodes + 1 :] - 1, 0)
    return StepBatch(
        tokens,
        positions,
        valid,
        TokenPlaces(page, positions % PAGE_SIZE),
        PagedQueries(first_query, num_keys, tables),
        jnp.concatenate([jnp.arange(num_decoding, dtype=jnp.int32), last_of_chunks]),
        single_query_rows=num_decodes if per_row == 1 else 0,
    )


def updated_table(page_table: Int[Array, "slots max_pages"], rows: StepRows) -> Int[Array, "slots max_pages"]:
    """Returns the table with the new pages of decoding rows, and the tables of chunks."""
    nowhere = len(page_table)
    column = rows.decode_positions // PAGE_SIZE
    slots = jnp.where((rows.decode_slots >= 0) & (rows.decode_pages >= 0), rows.decode_slots, nowhere)
    page_table = page_table.at[slots, column].set(rows.decode_pages, mode="drop")
    slots = jnp.where(rows.chunk_slots >= 0, rows.chunk_slots, nowhere)
    return page_table.at[slots].set(rows.chunk_tables, mode="drop")


class _Decoding(NamedTuple):
    """The tokens of decoding rows: one of each, or with drafts two."""

    tokens: Int[Array, "decodes per_row"]
    positions: Int[Array, "decodes per_row"]
    valid: Bool[Array, "decodes per_row"]


def _decoding(rows: StepRows, last_token: Int[Array, "slots"], drafting: Drafting | None) -> _Decoding:
    slots, last = rows.decode_slots, rows.decode_positions[:, None]
    used, tokens = slots[:, None] >= 0, last_token[slots][:, None]
    if drafting is None:
        return _Decoding(tokens, last, used)
    own = drafting.position[slots][:, None]
    tokens = jnp.concatenate([tokens, drafting.draft[slots][:, None]], axis=1)
    # A row whose sequence has ended, as the host does not know yet, may lie behind the sequence's pages: it writes nothing.
    return _Decoding(tokens, jnp.minimum(own, last) + jnp.arange(2), used & (own + jnp.arange(2) <= last))
