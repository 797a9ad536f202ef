"""The rows of a step as one array of int32: a single copy to the device in each step."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int

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
