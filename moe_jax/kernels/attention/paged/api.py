"""Causal attention to keys and values in pages: one query per row in decoding, many in a chunk of a prompt."""

from functools import partial

import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention.api import resolve_attention_backend
from moe_jax.kernels.attention.paged import PAGE_SIZE, xla
from moe_jax.kernels.attention.paged.blocks import PagedQueries
from moe_jax.kernels.attention.paged.fp8 import FP8Pages, Pages


def paged_attention(
    q: Float[Array, "tokens heads key_dim"],
    keys: Pages,
    values: Pages | None,
    queries: PagedQueries,
    *,
    scale: float,
    value_dim: int | None = None,
    window: Int[Array, ""] | int | None = None,
    sinks: Float[Array, " heads"] | None = None,
    single_query_rows: int = 0,
    fixed_splits: bool = False,
    backend: str | None = None,
) -> Float[Array, "tokens heads value_dim"]:
    """Returns softmax(scale * q k^T + mask) v of each query over its own row's keys, in q's dtype, f32 inside.

    A query sees the keys of its row that are not after it, with a window the last `window` of them. A traced window below 1
    counts as 1. Heads h*G .. h*G+G-1 share key head h, G = heads / kv_heads. Padding has unspecified finite results. All of a
    page must be finite, even unwritten entries.

    Args:
        keys, values: pages in a float dtype, or both `fp8.FP8Pages`.
        values: None if the values are the first `value_dim` columns of the keys, as with DeepSeek's latents.
        value_dim: given if and only if `values` is None.
        sinks: each head's extra score in the softmax, which belongs to no token; not with latents.
        fixed_splits: "mosaic" sums every 512 keys separately, and merges these sums in order. Without it, it splits only for
            few queries, and a query's bits depend on their number. "xla" always sums the keys in order.
        single_query_rows: the number of rows, the first ones, that have exactly one query each, like decoding rows.
            `first_query` must agree. All rows may be such rows only if no padding follows. "mosaic" computes such rows faster.
        backend: "xla" accepts every input; "mosaic", the default if supported, needs a Hopper GPU, and pages of 16 bits or in
            FP8. Keys and values are 64 or 128 wide there. Latents have 128, 256 or 512 columns of values, followed by 64.

    Raises:
        ValueError: shapes that do not match, too many `single_query_rows`, a window below 1. Also an unknown backend, or one
            that does not support the input.
    """
    value_dim = _check(q, keys, values, queries, value_dim, window, single_query_rows)
    if resolve_attention_backend(backend, partial(_refusal, q, keys, values, value_dim)) == "mosaic":
        from moe_jax.kernels.attention.paged import mosaic

        of_queries = partial(mosaic.paged_attention, single_query_rows=single_query_rows, fixed_splits=fixed_splits)
        return of_queries(q, (keys, values), queries, scale=scale, window=window, sinks=sinks)
    return xla.paged_attention(q, keys, values, queries, scale=scale, window=window, value_dim=value_dim, sinks=sinks)


def _refusal(q, keys, values, value_dim: int) -> str | None:
    # Imports Pallas Mosaic GPU, a second of CPU time: called only where the kernels may run.
    from moe_jax.kernels.attention.paged.mosaic import refusal

    return refusal(q, keys, values, value_dim)


def _check(q, keys, values, queries: PagedQueries, value_dim, window, single_query_rows) -> int:
    """Returns the width of the values; raises ValueError if arguments do not match."""
    if q.ndim != 3 or keys.ndim != 4 or q.shape[1] % keys.shape[1] or q.shape[2] != keys.shape[3]:
        raise ValueError(
            f"q [tokens, heads, key_dim] must match keys [pages, kv_heads, {PAGE_SIZE}, key_dim], "
            f"heads a multiple of kv_heads; got q {q.shape}, keys {keys.shape}"
        )
    if keys.shape[2] != PAGE_SIZE:
        raise ValueError(f"a page must hold {PAGE_SIZE} tokens; got keys {keys.shape}")
    if (values is None) == (value_dim is None):
        raise ValueError(
            f"either values or value_dim must be given; got values {'None' if values is None else values.shape}, "
            f"value_dim {value_dim}"
        )
    if isinstance(keys, FP8Pages) != isinstance(values, FP8Pages):
        raise ValueError(f"pages in FP8 hold keys and values; got values {None if values is None else 'in another dtype'}")
    if values is None:
        if not 1 <= value_dim <= keys.shape[3]:
            raise ValueError(f"value_dim must be from 1 to the width of the keys, {keys.shape[3]}; got {value_dim}")
    elif values.shape[:3] != keys.shape[:3]:
        raise ValueError(f"values must have the pages, heads and tokens of keys, {keys.shape[:3]}; got {values.shape[:3]}")
    rows = queries.num_keys.shape[0]
    if not rows or queries.first_query.shape != (rows + 1,) or queries.page_table.ndim != 2:
        raise ValueError(
            f"first_query must be [rows + 1], num_keys [rows] and page_table [rows, max_pages] of at least one row; "
            f"got {queries.first_query.shape}, {queries.num_keys.shape}, {queries.page_table.shape}"
        )
    if queries.page_table.shape[0] != rows or not queries.page_table.shape[1]:
        raise ValueError(f"page_table must have {rows} rows of at least one page; got {queries.page_table.shape}")
    tokens = q.shape[0]
    most_single = rows if tokens == rows else min(tokens, rows - 1)
    if not 0 <= single_query_rows <= most_single:
        raise ValueError(
            f"single_query_rows must be from 0 to {most_single} with {rows} rows and {tokens} tokens; got {single_query_rows}"
        )
    if isinstance(window, int | np.integer) and window < 1:
        raise ValueError(f"window must be at least 1 or None; got {window}")
    return value_dim if values is None else values.shape[3]
