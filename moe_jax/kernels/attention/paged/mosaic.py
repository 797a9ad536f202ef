"""Paged attention on Hopper: queries in blocks, a kernel over their pages, and a merge of the splits of keys."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention.paged.blocks import WHOLE, RowPages, most_splits, query_blocks, window_operand
from moe_jax.kernels.attention.paged.heads import attend_blocks
from moe_jax.kernels.attention.paged.merge import merge_splits
from moe_jax.kernels.attention.paged.queries import PagedQueries
from moe_jax.kernels.hopper import target
from moe_jax.kernels.hopper.interpreter import is_interpreted
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS
from moe_jax.kernels.hopper.target import compute_capability

SPLIT_PAGES = 8
"""Pages of a split: 512 keys."""


def refusal(q: Array, keys: Array, values: Array | None) -> str | None:
    """Returns the reason why the kernel cannot compute this attention, with what it takes; None where it can."""
    if not is_interpreted() and compute_capability() != "9.0":
        return f"it needs a Hopper GPU (compute capability 9.0); this is {compute_capability() or 'no NVIDIA GPU'}"
    if values is None:
        return "pages of latents are not read by a kernel yet"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or keys.dtype != q.dtype or values.dtype != q.dtype:
        return f"q and pages must all be bfloat16 or all float16; got {q.dtype}, {keys.dtype}, {values.dtype}"
    if q.shape[1] // keys.shape[1] > WGMMA_ROWS:
        return f"a key head must have at most {WGMMA_ROWS} query heads; got {q.shape[1] // keys.shape[1]}"
    for name, width in (("key_dim", q.shape[2]), ("value_dim", values.shape[3])):
        if width not in (64, 128):
            return f"{name} must be 64 or 128; got {width}"
    return None


def paged_attention(
    q: Float[Array, "tokens heads key_dim"],
    keys: Float[Array, "pages kv_heads 64 key_dim"],
    values: Float[Array, "pages kv_heads 64 value_dim"],
    queries: PagedQueries,
    *,
    scale: float,
    window: Int[Array, ""] | int | None,
    queries_per_row: int | None,
    fixed_splits: bool,
) -> Float[Array, "tokens heads value_dim"]:
    """Returns attention as `api.paged_attention` defines it; padding gives the result of some query."""
    tokens, heads, key_dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    block_tokens = 1 if queries_per_row == 1 else max(1, WGMMA_ROWS // group)
    blocks = query_blocks(queries, tokens, block_tokens, one_a_row=queries_per_row == 1)
    num_blocks = len(blocks.position)
    grouped = q.reshape(tokens, kv_heads, group, key_dim)
    # One query a block: the gather would be a kernel of its own, and read what is there.
    in_blocks = grouped[:, None] if blocks.row is None else grouped.at[blocks.tokens].get(mode="fill", fill_value=0)
    of_blocks = in_blocks.transpose(0, 2, 1, 3, 4)
    of_blocks = of_blocks.reshape(num_blocks, kv_heads, block_tokens * group, key_dim)
    rows = -(-block_tokens * group // 8) * 8
    of_blocks = jnp.pad(of_blocks, ((0, 0), (0, 0), (0, rows - block_tokens * group), (0, 0)))
    splits = most_splits(queries.page_table.shape[1], SPLIT_PAGES, window, block_tokens)
    # Enough blocks keep the GPU busy by themselves. Partial results cost memory and time.
    if num_blocks * kv_heads >= _cores() and not fixed_splits:
        splits = WHOLE
    row_pages = RowPages(queries.page_table, window_operand(window))
    parts, lse = attend_blocks(of_blocks, keys, values, blocks, row_pages, scale=scale, group=group, splits=splits)
    out = parts[:, 0] if lse is None else merge_splits(parts, lse, blocks, row_pages.window, splits=splits, dtype=q.dtype)
    out = out[:, :, : block_tokens * group].reshape(num_blocks, kv_heads, block_tokens, group, -1)
    out = out.transpose(0, 2, 1, 3, 4).reshape(num_blocks * block_tokens, heads, -1)
    return out if queries_per_row == 1 else out[blocks.place]


def _cores() -> int:
    return 1 if is_interpreted() else target.num_cores()
