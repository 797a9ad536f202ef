"""The pairs (query, key) that count: intervals of tokens, the blocks that cover them, and the mask of a block's scores.

A query of packed segments sees one interval of keys, [first_key[i], i], and a key is seen by the queries [j, last_query[j]].
Queries of a part of a sequence have two bounds each, and an interval may be empty. Neither bound ever decreases along a row of
tokens. The bounds of a block are therefore the bounds of its first and last token.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from moe_jax.kernels.attention.mosaic.warpgroups import ROWS, WorkTile, broadcast_columns
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS


class TokenInterval(NamedTuple):
    """The tokens first[i] .. last[i] of the other side that token i sees, or is seen by; none where last < first.

    In causal attention queries have no array `last`, and keys have no `first`: that bound is the token's own index.
    """

    first: Int[Array, "batch tokens"] | None
    last: Int[Array, "batch tokens"] | None


def first_keys(segment_ids: Int[Array, "batch seq"], window: Array | int | None) -> Int[Array, "batch seq"]:
    """Returns the first key that each query sees: its segment's first token or, if later, the start of the window."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first = lax.cummax(jnp.where(starts, index, 0), axis=1)
    return first if window is None else jnp.maximum(first, index - _clip(window, segment_ids) + 1)


def last_queries(segment_ids: Int[Array, "batch seq"], window: Array | int | None) -> Int[Array, "batch seq"]:
    """Returns the last query that sees each key."""
    length = segment_ids.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
    ends = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    last = lax.cummin(jnp.where(ends, index, length), axis=1, reverse=True)
    return last if window is None else jnp.minimum(last, index + _clip(window, segment_ids) - 1)


def queries_of_keys(keys: TokenInterval, num_keys: int) -> TokenInterval:
    """Returns the interval of queries that see each key, given the interval of keys that each query sees."""

    def of_row(keys: TokenInterval) -> TokenInterval:
        index = jnp.arange(num_keys, dtype=jnp.int32)
        assert keys.first is not None and keys.last is not None
        first = jnp.searchsorted(keys.last, index, side="left", method="scan_unrolled")
        last = jnp.searchsorted(keys.first, index, side="right", method="scan_unrolled") - 1
        return TokenInterval(first.astype(jnp.int32), last.astype(jnp.int32))

    return jax.vmap(of_row)(keys)


class BlockSteps(NamedTuple):
    """The range of blocks that one tile's loop visits, and which of its steps need the mask.

    A row of the tables of `n_block_steps`, `m_block_steps`. Steps [0, masked) and [full, total) apply the mask; in steps
    [masked, full) every pair counts. There is always a step, and the first applies the mask.
    """

    start: int | Array
    """The block of step 0: n_block_max in a loop over keys, downwards; m_block_min in a loop over queries, upwards."""
    masked: int | Array
    full: int | Array
    total: int | Array

    @classmethod
    def load(cls, table, tile: WorkTile) -> "BlockSteps":
        """Loads a tile's `BlockSteps` from the table in memory, inside a kernel."""
        return cls(*(table[tile.batch, tile.block, column] for column in range(4)))


def n_block_steps(keys: TokenInterval, num_keys: int, block_m: int, block_n: int) -> Int[Array, "batch m_blocks 4"]:
    """Returns the table of `BlockSteps` for each block of queries, whose loops visit key blocks from last to first.

    `keys` is the interval of keys that each query sees. n_block_max is the last visible block, inclusive (FlashAttention-3
    counts one more), and n_block_min = n_block_max - total + 1. If nothing is visible there is one step.
    """
    first_key, last_key = keys
    assert first_key is not None
    if last_key is None:
        last_key = jnp.arange(first_key.shape[1], dtype=jnp.int32)[None]
    first_low, first_high = first_key[:, ::block_m], first_key[:, block_m - 1 :: block_m]
    last_low, last_high = last_key[:, ::block_m], last_key[:, block_m - 1 :: block_m]
    end = last_high // block_n + 1
    total = jnp.maximum(end - first_low // block_n, 1)
    masked = jnp.clip(end - (last_low + 1) // block_n, 1, total)
    full = jnp.clip(end + -first_high // block_n, masked, total)
    return _table(BlockSteps(jnp.clip(end - 1, 0, num_keys // block_n - 1), masked, full, total))


def m_block_steps(queries: TokenInterval, num_queries: int, block_m: int, block_n: int) -> Int[Array, "batch n_blocks 4"]:
    """Returns the table of `BlockSteps` for each block of keys, whose loops visit query blocks from first to last.

    `queries` is the interval of queries that see each key. m_block_max = m_block_min + total - 1, inclusive. If no query sees a
    key of the block there is one step.
    """
    first_query, last_query = queries
    assert last_query is not None
    if first_query is None:
        first_query = jnp.arange(last_query.shape[1], dtype=jnp.int32)[None]
    first_low, first_high = first_query[:, ::block_n], first_query[:, block_n - 1 :: block_n]
    last_low, last_high = last_query[:, ::block_n], last_query[:, block_n - 1 :: block_n]
    m_block_min = first_low // block_m
    total = jnp.maximum(last_high // block_m + 1 - m_block_min, 1)
    masked = jnp.clip(-(-first_high // block_m) - m_block_min, 1, total)
    full = jnp.clip((last_low + 1) // block_m - m_block_min, masked, total)
    return _table(BlockSteps(jnp.clip(m_block_min, 0, num_queries // block_m - 1), masked, full, total))


def _clip(window: Array | int, segment_ids: Array) -> Array:
    """Limits a window to [1, seq]: sums with it do not overflow, and each query sees itself."""
    return jnp.clip(window, 1, segment_ids.shape[1]).astype(jnp.int32)


def _table(steps: BlockSteps) -> Array:
    return jnp.stack(jnp.broadcast_arrays(*steps), axis=-1).astype(jnp.int32)


class Mask(NamedTuple):
    """The mask of a step's scores in a kernel. A row is a token of the warpgroup, a column a token of the step's block.

    A pair counts if low[row] <= column token <= high[row], in indices of the sequence. Kinds:

    full        every pair counts
    causal      one bound is the row's own index, and the array of that bound is None
    interval    both bounds are arrays
    """

    kind: Literal["full", "causal", "interval"] = "full"
    low: Int[Array, "rows"] | None = None
    high: Int[Array, "rows"] | None = None
    first_row: int | Array = 0
    """The index in the sequence of row 0."""

    @classmethod
    def of_interval(cls, low, high, first_row) -> "Mask":
        """Builds the mask of a warpgroup's rows; a bound (`low` or `high`) of None is the row's own index (causal)."""
        return cls("causal" if low is None or high is None else "interval", low, high, first_row)

    def with_diagonal(self) -> "Mask":
        """Fills in the rows' own indices. Call it in each step: kept across steps they would occupy registers."""
        if self.kind != "causal":
            return self
        own = self.first_row + plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=ROWS)
        return self._replace(
            kind="interval", low=own if self.low is None else self.low, high=own if self.high is None else self.high
        )

    def apply(self, a, first_column, fill: float):
        """Returns `a` [rows, columns] with masked pairs replaced by `fill`; column 0 is token `first_column`."""
        if self.kind == "full":
            return a
        column = plgpu.broadcasted_iota(jnp.int32, a.shape, 1, layout=plgpu.Layout.WGMMA)
        above = column >= broadcast_columns(self.low - first_column, a.shape)
        return jnp.where(above & (column <= broadcast_columns(self.high - first_column, a.shape)), a, fill)
