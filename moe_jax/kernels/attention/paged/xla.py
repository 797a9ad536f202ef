"""Paged attention in plain XLA, for every device and dtype: blocks of tokens in turn, page by page.

A token's bits depend only on its own row. Pages that it does not see have no effect. Each token has its own matmul, always of
the same shape. Cost for a block of B tokens: B * kv_heads * 64 * (key_dim + value_dim) elements in memory, gathered for each
page of its rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.kernels.attention.paged.blocks import PagedQueries, places
from moe_jax.kernels.attention.paged.fp8 import Pages, read
from moe_jax.kernels.precision import at_least_f32

TOKEN_BLOCK = 32
"""Tokens per block, always this number: XLA sums a matmul of another shape in another order."""


def paged_attention(
    q: Float[Array, "tokens heads key_dim"],
    keys: Pages,
    values: Pages | None,
    queries: PagedQueries,
    *,
    scale: float,
    window: Int[Array, ""] | int | None,
    value_dim: int,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "tokens heads value_dim"]:
    """Computes paged attention in XLA (contract in `api.paged_attention`); padding yields zeros."""
    (tokens, heads, key_dim), kv_heads = q.shape, keys.shape[1]
    dtype = at_least_f32(q.dtype)
    row, position = places(queries, tokens)
    first_key = jnp.zeros_like(position) if window is None else jnp.maximum(position - jnp.maximum(window, 1) + 1, 0)

    def of_block(block):
        q, row, position, first_key = block
        table = jnp.clip(queries.page_table[row], 0, keys.shape[0] - 1)

        def add_page(j, state):
            row_max, row_sum, out = state
            page = table[:, jnp.minimum(j, table.shape[1] - 1)]
            k = read(keys, page, dtype)
            v = k[..., :value_dim] if values is None else read(values, page, dtype)
            key = j * PAGE_SIZE + jnp.arange(PAGE_SIZE)
            seen = (key <= position[:, None]) & (key >= first_key[:, None])
            scores = jnp.einsum("thgd,thkd->thgk", q, k, precision="highest") * scale
            scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
            new_max = jnp.maximum(row_max, scores.max(axis=-1))
            # Finite if no key has been seen, so that differences are not NaN.
            finite = jnp.where(jnp.isneginf(new_max), 0, new_max)
            p, rescale = jnp.exp(scores - finite[..., None]), jnp.exp(row_max - finite)
            added = jnp.einsum("thgk,thke->thge", p, v, precision="highest")
            return new_max, row_sum * rescale + p.sum(axis=-1), out * rescale[..., None] + added

        of_query = q.shape[:3]
        state = jnp.full(of_query, -jnp.inf, dtype), jnp.zeros(of_query, dtype), jnp.zeros((*of_query, value_dim), dtype)
        first_page = jnp.where(position >= 0, first_key, jnp.iinfo(jnp.int32).max).min() // PAGE_SIZE
        row_max, row_sum, out = jax.lax.fori_loop(first_page, position.max() // PAGE_SIZE + 1, add_page, state)
        out = out / jnp.where(row_sum > 0, row_sum, 1)[..., None]
        if sinks is None:
            return out
        return out * jax.nn.sigmoid(row_max + jnp.log(row_sum) - sinks.astype(dtype).reshape(kv_heads, -1))[..., None]

    num_blocks = -(-tokens // TOKEN_BLOCK)
    padding = num_blocks * TOKEN_BLOCK - tokens

    def split(a: Array, fill: int = 0) -> Array:
        a = jnp.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1), constant_values=fill)
        return a.reshape(num_blocks, TOKEN_BLOCK, *a.shape[1:])

    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, key_dim).astype(dtype)
    out = jax.lax.map(of_block, (split(grouped), split(row), split(position, -1), split(first_key)))
    return out.reshape(num_blocks * TOKEN_BLOCK, heads, value_dim)[:tokens].astype(q.dtype)
