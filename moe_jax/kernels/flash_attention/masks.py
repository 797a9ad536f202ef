"""What each query of packed segments sees: one interval of keys, [first_key[i], i]; each key is seen by [j, last_query[j]].

Both bounds grow along a row of tokens, so that a block's own bounds are those of its first and last token.
"""

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


def key_blocks(first_key: Int[Array, "batch seq"], block_q: int, block_kv: int) -> Int[Array, "batch q_blocks 4"]:
    """Blocks of keys that a block of queries visits, from the last down to the first.

    Returns (last, masked, unmasked, visited): visits begin at block `last` and go down. The first `masked` of the `visited`
    need the mask, those up to number `unmasked` are seen whole by every query of the block, the rest need it again.
    """
    first = first_key[:, ::block_q]
    block_start = jnp.arange(first.shape[1], dtype=jnp.int32) * block_q
    end = -(-(block_start + block_q) // block_kv)
    visited = end - first // block_kv
    masked = jnp.clip(end - (block_start + 1) // block_kv, 1, visited)
    unmasked = jnp.clip(end + -first_key[:, block_q - 1 :: block_q] // block_kv, masked, visited)
    return _table(end - 1, masked, unmasked, visited)


def query_blocks(last_query: Int[Array, "batch seq"], block_q: int, block_kv: int) -> Int[Array, "batch kv_blocks 4"]:
    """Blocks of queries that see a block of keys, from the first up: (first, masked, unmasked, visited), as `key_blocks`."""
    last = last_query[:, block_kv - 1 :: block_kv]
    block_start = jnp.arange(last.shape[1], dtype=jnp.int32) * block_kv
    first = block_start // block_q
    visited = last // block_q + 1 - first
    masked = jnp.clip(-(-(block_start + block_kv - 1) // block_q) - first, 1, visited)
    unmasked = jnp.clip((last_query[:, ::block_kv] + 1) // block_q - first, masked, visited)
    return _table(first, masked, unmasked, visited)


def _clip(window: Array | int, segment_ids: Array) -> Array:
    """A window of which sums neither overflow nor leave a query without itself."""
    return jnp.clip(window, 1, segment_ids.shape[1]).astype(jnp.int32)


def _table(*columns: Array) -> Array:
    return jnp.stack(jnp.broadcast_arrays(*columns), axis=-1).astype(jnp.int32)
