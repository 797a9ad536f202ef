"""What each query of packed segments sees: one interval of keys, [first_key[i], i]; each key is seen by [j, last_query[j]].

Queries and keys that are different tokens of one sequence in its order have two bounds each, and an interval may be empty. No
bound ever falls along a row of tokens, so that a block's own bounds are those of its first and last token.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def first_keys(segment_ids: Int[Array, "batch seq"], window: Array | int | None) -> Int[Array, "batch seq"]:
    """The first key that each query sees: its segment's first token or, with a window, the `window`-th key from the end."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first = lax.cummax(jnp.where(starts, index, 0), axis=1)
    return first if window is None else jnp.maximum(first, index - _clip(window, segment_ids) + 1)


def last_queries(segment_ids: Int[Array, "batch seq"], window: Array | int | None) -> Int[Array, "batch seq"]:
    """The last query that sees each key."""
    length = segment_ids.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
    ends = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    last = lax.cummin(jnp.where(ends, index, length), axis=1, reverse=True)
    return last if window is None else jnp.minimum(last, index + _clip(window, segment_ids) - 1)


def queries_of_keys(
    first_key: Int[Array, "batch queries"], last_key: Int[Array, "batch queries"], num_keys: int
) -> tuple[Int[Array, "batch keys"], Int[Array, "batch keys"]]:
    """(first_query, last_query): the interval of queries that see each key, given the interval of keys that each query sees."""

    def of_row(first_key: Array, last_key: Array) -> tuple[Array, Array]:
        index = jnp.arange(num_keys, dtype=jnp.int32)
        first = jnp.searchsorted(last_key, index, side="left", method="scan_unrolled")
        last = jnp.searchsorted(first_key, index, side="right", method="scan_unrolled") - 1
        return first.astype(jnp.int32), last.astype(jnp.int32)

    return jax.vmap(of_row)(first_key, last_key)


def key_blocks(
    first_key: Int[Array, "batch queries"],
    last_key: Int[Array, "batch queries"] | None,
    num_keys: int,
    block_q: int,
    block_kv: int,
) -> Int[Array, "batch q_blocks 4"]:
    """Blocks of keys that a block of queries visits, from the last down to the first.

    Query i sees keys first_key[i] .. last_key[i]; last_key None: up to key i. Returns (last, masked, unmasked, visited): visits
    begin at block `last` and go down. The first `masked` of the `visited` need the mask, those up to number `unmasked` are seen
    whole by every query of the block, the rest need it again. Where nothing is seen, one block is visited under its mask.
    """
    if last_key is None:
        last_key = jnp.arange(first_key.shape[1], dtype=jnp.int32)[None]
    first_low, first_high = first_key[:, ::block_q], first_key[:, block_q - 1 :: block_q]
    last_low, last_high = last_key[:, ::block_q], last_key[:, block_q - 1 :: block_q]
    end = last_high // block_kv + 1
    visited = jnp.maximum(end - first_low // block_kv, 1)
    masked = jnp.clip(end - (last_low + 1) // block_kv, 1, visited)
    unmasked = jnp.clip(end + -first_high // block_kv, masked, visited)
    return _table(jnp.clip(end - 1, 0, num_keys // block_kv - 1), masked, unmasked, visited)


def query_blocks(
    first_query: Int[Array, "batch keys"] | None,
    last_query: Int[Array, "batch keys"],
    num_queries: int,
    block_q: int,
    block_kv: int,
) -> Int[Array, "batch kv_blocks 4"]:
    """Blocks of queries that see a block of keys, from the first up: (first, masked, unmasked, visited), as `key_blocks`.

    Key j is seen by queries first_query[j] .. last_query[j]; first_query None: from query j on.
    """
    if first_query is None:
        first_query = jnp.arange(last_query.shape[1], dtype=jnp.int32)[None]
    first_low, first_high = first_query[:, ::block_kv], first_query[:, block_kv - 1 :: block_kv]
    last_low, last_high = last_query[:, ::block_kv], last_query[:, block_kv - 1 :: block_kv]
    first = first_low // block_q
    visited = jnp.maximum(last_high // block_q + 1 - first, 1)
    masked = jnp.clip(-(-first_high // block_q) - first, 1, visited)
    unmasked = jnp.clip((last_low + 1) // block_q - first, masked, visited)
    return _table(jnp.clip(first, 0, num_queries // block_q - 1), masked, unmasked, visited)


def _clip(window: Array | int, segment_ids: Array) -> Array:
    """A window of which sums neither overflow nor leave a query without itself."""
    return jnp.clip(window, 1, segment_ids.shape[1]).astype(jnp.int32)


def _table(*columns: Array) -> Array:
    return jnp.stack(jnp.broadcast_arrays(*columns), axis=-1).astype(jnp.int32)
