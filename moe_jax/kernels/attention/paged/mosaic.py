"""Paged attention on Hopper: queries in blocks, a kernel over their pages, and a merge of the splits of keys.

Kernel `merge_splits`: one warpgroup per block and (block of queries, key head, query row), columns over the threads. Existing
splits are added in turn, with the larger of two logarithms as the common factor.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.kernels import backends
from moe_jax.kernels.attention.mosaic.consumer import LOWEST
from moe_jax.kernels.attention.mosaic.warpgroups import LOG2_E
from moe_jax.kernels.attention.paged.blocks import (
    WHOLE,
    PagedQueries,
    QueryBlocks,
    RowPages,
    Splits,
    count_splits,
    most_splits,
    query_blocks,
    single_query_blocks,
    window_operand,
)
from moe_jax.kernels.attention.paged.fp8 import FP8Pages, Pages
from moe_jax.kernels.attention.paged.heads import attend_blocks
from moe_jax.kernels.attention.paged.latents import ROTARY_COLUMNS, attend_latents
from moe_jax.kernels.attention.paged.prompts import attend_prompts, most_tiles, takes_group
from moe_jax.kernels.backends import compute_capability
from moe_jax.kernels.hopper.interpreter import is_interpreted
from moe_jax.kernels.hopper.launch import WARPGROUP_THREADS, launch
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS

SPLIT_PAGES = 8
"""Pages of a split: 512 keys."""

LATENT_ITEMS_PER_CORE = 1.5
"""Minimum items of latents per core before splits become longer than SPLIT_PAGES: then two rounds are nearly full."""

MERGE_BLOCKS = 16
"""Thread blocks a core of `merge_splits`."""

MERGE_LOADS = 4
"""Splits that it loads at a time."""


def refusal(q: Array, keys: Pages, values: Pages | None, value_dim: int) -> str | None:
    """Returns why the kernel does not support this attention, with the supported sizes; None if it does."""
    if not is_interpreted() and compute_capability() != "9.0":
        return f"it needs a Hopper GPU (compute capability 9.0); this is {compute_capability() or 'no NVIDIA GPU'}"
    if isinstance(keys, FP8Pages) and q.dtype != jnp.bfloat16:
        return f"with pages in FP8 q must be bfloat16; got {q.dtype}"
    dtypes = [a.dtype for a in (q, keys, values) if a is not None and not isinstance(a, FP8Pages)]
    if q.dtype not in (jnp.bfloat16, jnp.float16) or set(dtypes) != {q.dtype}:
        return f"q and pages must all be bfloat16 or all float16; got {', '.join(map(str, dtypes))}"
    if values is None:
        return _refusal_of_latents(q.shape[1], keys.shape, value_dim)
    if q.shape[1] // keys.shape[1] > WGMMA_ROWS:
        return f"a key head must have at most {WGMMA_ROWS} query heads; got {q.shape[1] // keys.shape[1]}"
    for name, width in (("key_dim", q.shape[2]), ("value_dim", values.shape[3])):
        if width not in (64, 128):
            return f"{name} must be 64 or 128; got {width}"
    return None


def _refusal_of_latents(heads: int, pages: tuple[int, ...], value_dim: int) -> str | None:
    if pages[1] != 1:
        return f"pages of latents must have one key head; got {pages[1]}"
    if heads % _head_tiles(heads):
        return f"more than {WGMMA_ROWS} heads of latents must be equal tiles of at most {WGMMA_ROWS}; got {heads}"
    if value_dim not in (128, 256, 512) or pages[3] != value_dim + ROTARY_COLUMNS:
        return (
            f"latents must have 128, 256 or 512 columns of values and {ROTARY_COLUMNS} behind them; "
            f"got {value_dim} and {pages[3] - value_dim}"
        )
    return None


def _head_tiles(heads: int) -> int:
    return -(-heads // WGMMA_ROWS)


def paged_attention(
    q: Float[Array, "tokens heads key_dim"],
    pages: tuple[Pages, Pages | None],
    queries: PagedQueries,
    *,
    scale: float,
    window: Int[Array, ""] | int | None,
    sinks: Float[Array, " heads"] | None,
    single_query_rows: int,
    fixed_splits: bool,
) -> Float[Array, "tokens heads value_dim"]:
    """Computes paged attention on Hopper (contract in `api.paged_attention`); padding yields zeros.

    Sinks need the logsumexp of a query's scores, which only splits have.
    """
    (tokens, heads, key_dim), rows, (keys, values) = q.shape, len(queries.num_keys), pages
    fixed_splits = fixed_splits or sinks is not None
    # Heads that share keys fill the rows of a block. If more than 64 do, each tile of heads is treated as a key head.
    kv_heads = _head_tiles(heads) if values is None else keys.shape[1]
    group = heads // kv_heads
    grouped = q.reshape(tokens, kv_heads, group, key_dim)
    attend = partial(_attend, keys=keys, values=values, queries=queries, scale=scale, window=window, sinks=sinks)
    attend = partial(attend, fixed_splits=fixed_splits)
    if single_query_rows == rows:
        return attend(grouped, single_query_blocks(queries.num_keys))
    # With few registers to spare, the consumers of `attend_prompts` widen no pages in FP8.
    takes_prompts = not (values is None or isinstance(values, FP8Pages) or fixed_splits) and takes_group(group)
    # `attend_prompts` splits no keys, so it needs enough tiles to keep the GPU busy.
    if not takes_prompts or most_tiles(rows - single_query_rows, tokens - single_query_rows, kv_heads, group) < _cores():
        blocks = query_blocks(queries, tokens, max(1, WGMMA_ROWS // group))
        return attend(grouped, blocks)[blocks.place]
    out = attend_prompts(grouped, keys, values, queries, scale=scale, window=window, skip=single_query_rows)
    out = out.reshape(tokens, heads, -1)
    if not single_query_rows:
        return out
    # A row of one query would fill `group` of the 128 rows of a tile there.
    decoded = attend(grouped, single_query_blocks(queries.num_keys[:single_query_rows]))
    # In place. XLA turns `dynamic_update_slice` into an asynchronous copy on a separate stream.
    return out.at[jnp.arange(single_query_rows)].set(decoded, indices_are_sorted=True, unique_indices=True)


def _attend(
    q: Float[Array, "tokens kv_heads group key_dim"],
    blocks: QueryBlocks,
    *,
    keys: Pages,
    values: Pages | None,
    queries: PagedQueries,
    scale: float,
    window: Int[Array, ""] | int | None,
    sinks: Float[Array, " heads"] | None,
    fixed_splits: bool,
) -> Float[Array, "places heads value_dim"]:
    """Returns the attention of the queries in `blocks`, in the order of `blocks.tokens`."""
    _, kv_heads, group, key_dim = q.shape
    num_blocks, block_tokens = blocks.tokens.shape
    max_pages, row_pages = queries.page_table.shape[1], RowPages(queries.page_table, window_operand(window))
    # One query per block: a gather would be a separate kernel that copies q unchanged.
    in_blocks = q[:, None] if blocks.row is None else q.at[blocks.tokens].get(mode="fill", fill_value=0)
    of_blocks = in_blocks.transpose(0, 2, 1, 3, 4)
    of_blocks = of_blocks.reshape(-1, kv_heads, block_tokens * group, key_dim)
    rows = -(-block_tokens * group // 8) * 8
    of_blocks = jnp.pad(of_blocks, ((0, 0), (0, 0), (0, rows - block_tokens * group), (0, 0)))
    if values is None:
        pages = SPLIT_PAGES if fixed_splits else _pages_of_latents(num_blocks * kv_heads, max_pages)
        splits = most_splits(max_pages, pages, window, block_tokens)
        parts, lse = attend_latents(of_blocks, keys, blocks, row_pages, scale=scale, group=group, splits=splits)
    else:
        # Enough blocks keep the GPU busy without splits. Partial results cost memory and time.
        is_busy = num_blocks * kv_heads >= _cores() and not fixed_splits
        splits = WHOLE if is_busy else most_splits(max_pages, SPLIT_PAGES, window, block_tokens)
        if sinks is not None and splits == WHOLE:
            splits = Splits(2, SPLIT_PAGES)  # only parts come with their logsumexp
        parts, lse = attend_blocks(of_blocks, keys, values, blocks, row_pages, scale=scale, group=group, splits=splits)
    if lse is None:
        out = parts[:, 0]
    elif sinks is not None:
        of_rows = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, group) * LOG2_E, (1, block_tokens))
        of_rows = jnp.pad(of_rows, ((0, 0), (0, rows - block_tokens * group)))
        parts, lse = parts[..., :rows, :], lse[..., :rows]
        out = _merged_in_xla(parts, lse, blocks, row_pages.window, splits, of_rows).astype(q.dtype)
    else:
        out = merge_splits(parts, lse, blocks, row_pages.window, rows=rows, splits=splits, dtype=q.dtype)
    out = out[:, :, : block_tokens * group].reshape(num_blocks, kv_heads, block_tokens, group, -1)
    return out.transpose(0, 2, 1, 3, 4).reshape(num_blocks * block_tokens, kv_heads * group, -1)


def _pages_of_latents(blocks: int, max_pages: int) -> int:
    """Returns the pages of a split: as many as possible while the splits keep the GPU busy.

    A result of 64 rows and 512 columns in f32 has the bytes of 1.8 pages, written and read again.
    """
    pages = SPLIT_PAGES
    while pages < max_pages and blocks * -(-max_pages // (2 * pages)) >= LATENT_ITEMS_PER_CORE * _cores():
        pages *= 2
    return pages


def _cores() -> int:
    return 1 if is_interpreted() else backends.num_cores()


@partial(jax.jit, static_argnames=("rows", "splits", "dtype"))
def merge_splits(
    out: Float[Array, "blocks splits kv_heads _ value_dim"],
    lse: Float[Array, "blocks splits kv_heads _"],
    blocks: QueryBlocks,
    window: Int[Array, "1"] | None,
    *,
    rows: int,
    splits: Splits,
    dtype: DTypeLike,
) -> Float[Array, "blocks kv_heads rows value_dim"]:
    """Merges the splits' attention: sum_s 2^lse[s] out[s] / sum_s 2^lse[s] over the splits s that have pages.

    Widths that are not multiples of 128 are merged in XLA.

    Args:
      rows: the number of leading rows to merge.
      lse: base 2; -inf for a split without visible keys. The first split of a block always exists.
    """
    if out.shape[4] % WARPGROUP_THREADS:
        return _merged_in_xla(out[..., :rows, :], lse[..., :rows], blocks, window, splits).astype(dtype)
    num_blocks, _, kv_heads, _, columns = out.shape
    whole = pl.ds(0, columns)
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=columns // WARPGROUP_THREADS)

    def body(out_ref, lse_ref, position_ref, num_pages_ref, window_ref, merged_ref):
        window = None if window_ref is None else window_ref[0]

        @plgpu.nd_loop((num_blocks, kv_heads, rows), collective_axes="block")
        def _row(info):
            block, head, row = info.index

            def load(split) -> tuple[Any, Any]:
                values = plgpu.load(out_ref.at[block, split, head, row, whole], layout=layout, optimized=False)
                return values, jnp.maximum(lse_ref[block, split, head, row], LOWEST)

            def add(sums, values, own, exists):
                """Adds one split to the weighted sums so far, rescaled to the larger lse."""
                out, weight, old = sums
                largest = jnp.where(exists, jnp.maximum(old, own), old)
                before, now = jnp.exp2(old - largest), jnp.where(exists, jnp.exp2(own - largest), 0.0)
                return out * before + values * now, weight * before + now, largest

            count = count_splits(position_ref[block], num_pages_ref[block], window, splits)

            def add_some(number, sums):
                some = [1 + number * MERGE_LOADS + i for i in range(MERGE_LOADS)]
                # A load takes longer than everything else, so the loads come first.
                loaded = [load(jnp.minimum(split, count - 1)) for split in some]
                for split, part in zip(some, loaded, strict=True):
                    sums = add(sums, *part, split < count)
                return sums

            values, own = load(0)
            rounds = lax.div(jnp.maximum(count - 1, 0) + (MERGE_LOADS - 1), jnp.int32(MERGE_LOADS))
            out, weight, _ = lax.fori_loop(0, rounds, add_some, (values, jnp.float32(1), own))
            merged_ref[block, head, row, whole] = (out / weight).astype(dtype)

    outputs = [jax.ShapeDtypeStruct((num_blocks, kv_heads, rows, columns), dtype)]
    kernel = launch("merge_splits", body, outputs, [], warpgroups=1, blocks_per_core=MERGE_BLOCKS)
    return kernel(out, lse, blocks.position, blocks.num_pages, window)[0]


def _merged_in_xla(
    out: Float[Array, "blocks splits kv_heads rows value_dim"],
    lse: Float[Array, "blocks splits kv_heads rows"],
    blocks: QueryBlocks,
    window: Int[Array, "1"] | None,
    splits: Splits,
    sinks: Float[Array, "kv_heads rows"] | None = None,
) -> Float[Array, "blocks kv_heads rows value_dim"]:
    counts = count_splits(blocks.position, blocks.num_pages, window, splits)
    exists = jnp.arange(splits.number) < counts[:, None]
    lse = jnp.where(exists[:, :, None, None], lse, -jnp.inf)
    largest = jnp.maximum(lse.max(axis=1, keepdims=True), LOWEST)
    weights = jnp.exp2(lse - largest)
    total = weights.sum(axis=1)
    if sinks is not None:
        total = total + jnp.exp2(sinks - largest[:, 0])
    # Splits without pages were not written.
    summed = (jnp.where(exists[:, :, None, None, None], out, 0) * weights[..., None]).sum(axis=1)
    return summed / jnp.where(total > 0, total, 1)[..., None]
