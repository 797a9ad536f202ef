"""The rows of a step, uploaded as one array of int32; and its tokens, made of them and of the state on the device.

`ComputedLayers` are the tokens' results.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import ModelConfig
from moe_jax.generation.speculative import check_drafts
from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries
from moe_jax.layers.paged import LayerPages, TokenPlaces, empty_pages
from moe_jax.serving.limits import EngineLimits
from moe_jax.serving.schedule import StepPlan


class StepShape(NamedTuple):
    """The sizes of a step's program; `StepRows` has arrays of these sizes."""

    decodes: int
    """Decoding rows."""
    chunk_tokens: int
    """Tokens of all chunks of prompts."""
    chunks: int
    max_pages: int
    """Pages of the longest sequence."""
    drafts: int = 0
    """Drafts of a decoding row, 0 or 1: tokens that it computes beside its newest one."""


class StepRows(NamedTuple):
    """The rows of a step; rows that are not used have slot -1."""

    decode_slots: Int[Array, "decodes"]
    decode_positions: Int[Array, "decodes"]
    """The position of the token that the row reads: the slot's newest. With drafts the last position that it may compute."""
    decode_pages: Int[Array, "decodes"]
    """The page that the position lies in; -1 where it is in the table already."""
    chunk_slots: Int[Array, "chunks"]
    chunk_starts: Int[Array, "chunks"]
    """The position of the chunk's first token."""
    chunk_counts: Int[Array, "chunks"]
    """The number of the chunk's tokens; 0 for a row that is not used."""
    chunk_samples: Int[Array, "chunks"]
    """1 where the chunk ends its prompt, so that a token is drawn behind it; else 0."""
    chunk_next: Int[Array, "chunks"]
    """The token behind the chunk, where none is drawn; only drafts read it."""
    chunk_tokens: Int[Array, "chunk_tokens"]
    """The tokens of all chunks, one chunk behind the other."""
    chunk_tables: Int[Array, "chunks max_pages"]
    """The pages of each chunk's sequence."""

    @property
    def sampling_slots(self) -> Int[Array, "rows"]:
        """The slot of each row behind which a token is drawn; -1 for other rows."""
        # Arrays of numpy or of jax: `pack` and the tests use the one, the step the other.
        xp = self.decode_slots.__array_namespace__()
        return xp.concat([self.decode_slots, xp.where(self.chunk_samples > 0, self.chunk_slots, -1)])


def empty_rows(shape: StepShape) -> StepRows:
    """Makes rows of which none is used."""
    decodes, chunk_tokens, chunks, max_pages, _ = shape

    def filled(*sizes: int, value: int = 0) -> Any:
        return np.full(sizes, value, np.int32)

    return StepRows(
        decode_slots=filled(decodes, value=-1),
        decode_positions=filled(decodes),
        decode_pages=filled(decodes, value=-1),
        chunk_slots=filled(chunks, value=-1),
        chunk_starts=filled(chunks),
        chunk_counts=filled(chunks),
        chunk_samples=filled(chunks),
        chunk_next=filled(chunks),
        chunk_tokens=filled(chunk_tokens),
        chunk_tables=filled(chunks, max_pages),
    )


def packed(rows: Sequence[StepRows]) -> np.ndarray:
    """Joins all arrays of the rows of each device to one."""
    return np.concatenate([np.ravel(array) for of_device in rows for array in of_device])


def unpacked(upload: Int[Array, "_"], shape: StepShape) -> StepRows:
    """Undoes `packed` for one device."""
    arrays, start = [], 0
    for like in empty_rows(shape):
        size = math.prod(like.shape)
        arrays.append(upload[start : start + size].reshape(like.shape))
        start += size
    return StepRows(*arrays)


def filled(plan: StepPlan, rows: StepRows) -> StepRows:
    """Writes the plan into empty rows, and returns them."""
    if plan.decodes:
        n = len(plan.decodes)
        columns = np.array([decode[1:] for decode in plan.decodes], np.int32).T
        rows.decode_slots[:n], rows.decode_positions[:n], rows.decode_pages[:n] = columns
    first = 0
    for i, chunk in enumerate(plan.chunks):
        count, pages = len(chunk.tokens), chunk.sequence.pages
        rows.chunk_slots[i], rows.chunk_starts[i], rows.chunk_counts[i] = chunk.sequence.slot, chunk.start, count
        rows.chunk_samples[i] = chunk.samples
        rows.chunk_next[i] = 0 if chunk.samples else chunk.sequence.tokens[chunk.start + count]
        rows.chunk_tokens[first : first + count] = chunk.tokens
        rows.chunk_tables[i, : len(pages)] = pages
        first += count
    return rows


class Drafting(NamedTuple):
    """The state of drafts."""

    pages: LayerPages
    """Pages of the module's layer; a page has the number that it has in the model's layers."""
    position: Int[Array, "slots"]
    """The position of each slot's newest token. The host knows it only once it has read the step that drew the token."""
    draft: Int[Array, "slots"]
    """The draft of the token behind it."""


class DraftedTokens(NamedTuple):
    """The tokens of a step, and where each stands; a decoding row has two of them, its newest token and its draft."""

    drafts: Int[Array, "decodes"]
    """The draft of each decoding row; -1: it has none, because its place is behind the sequence's end."""
    positions: Int[Array, "tokens"]
    valid: Bool[Array, "tokens"]
    places: TokenPlaces
    queries: PagedQueries
    outputs: Int[Array, "outputs"]
    """Indices of the tokens that `StepOutput.logits` is for."""


def check_drafting(drafts: int, config: ModelConfig, limits: EngineLimits) -> None:
    """Checks that an engine of these limits can draft.

    Raises:
      ValueError: drafts are neither 0 nor 1, the model has no module that drafts, or a step no room for drafts.
    """
    if drafts not in (0, 1):
        raise ValueError(f"drafts must be 0 or 1; got {drafts!r}")
    if drafts:
        check_drafts(config)
        if limits.max_tokens_per_step < 2 * limits.max_sequences:
            raise ValueError(
                f"with drafts max_tokens_per_step must be at least twice max_sequences; "
                f"got {limits.max_tokens_per_step} and {limits.max_sequences}"
            )


def init_drafting(config: ModelConfig, num_pages: int, num_slots: int, dtype: DTypeLike) -> Drafting:
    """Returns the state without sequences."""
    slots = jnp.zeros((2, num_slots), jnp.int32)
    return Drafting(empty_pages(config, num_pages, dtype)[0], slots[0], slots[1])


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
    own_tokens, own_positions, own_valid = _decoding(rows, last_token, drafting)
    per_row = own_tokens.shape[1]
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
    valid = jnp.concatenate([own_valid.ravel(), in_chunk])
    positions = jnp.where(valid, jnp.concatenate([own_positions.ravel(), chunk_positions]), 0)
    tokens = jnp.concatenate([jnp.where(own_valid, own_tokens, 0).ravel(), rows.chunk_tokens])
    page = jnp.where(valid, tables[row, positions // PAGE_SIZE], 0)
    num_decoding = num_decodes * per_row
    first_query = per_row * jnp.arange(num_decodes + 1, dtype=jnp.int32)
    first_query = jnp.concatenate([first_query, num_decoding + ends.astype(jnp.int32)])
    num_keys = jnp.where(rows.decode_slots >= 0, own_positions[:, -1] + 1, 1)
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


def _decoding(rows: StepRows, last_token: Int[Array, "slots"], drafting: Drafting | None) -> tuple:
    """Returns tokens, positions and validity [decodes, per_row] of decoding rows: of one token, or with drafts of two."""
    slots, last = rows.decode_slots, rows.decode_positions[:, None]
    used, tokens = slots[:, None] >= 0, last_token[slots][:, None]
    if drafting is None:
        return tokens, last, used
    own = drafting.position[slots][:, None]
    tokens = jnp.concatenate([tokens, drafting.draft[slots][:, None]], axis=1)
    # A row whose sequence has ended, as the host does not know yet, may lie behind the sequence's pages: it writes nothing.
    return tokens, jnp.minimum(own, last) + jnp.arange(2), used & (own + jnp.arange(2) <= last)
