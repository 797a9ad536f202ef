"""Kernels of decoding steps, routing and strict bits, as cases for the race detector: case(rng) -> (function, arguments)."""

from functools import partial

import jax.numpy as jnp
import numpy as np

from moe_jax.config import RouterRule
from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries, paged_attention
from moe_jax.kernels.attention.paged.blocks import QueryBlocks, Splits
from moe_jax.kernels.attention.paged.fp8 import FP8Pages, quantised
from moe_jax.kernels.attention.paged.mosaic import merge_splits
from moe_jax.kernels.decode.add_norm import ExpertRows, add_experts, add_splits
from moe_jax.kernels.decode.heads import HeadNorms, NewTokens, chunk_heads_to_pages, heads_to_pages
from moe_jax.kernels.decode.plan_rows import place_rows, plan_rows
from moe_jax.kernels.decode.route import route_rows
from moe_jax.kernels.hopper.mainloop import TileShape
from moe_jax.kernels.split_matmul import split_matmul
from moe_jax.kernels.strict.matmul import matmul
from moe_jax.kernels.strict.rows import gated_silu, log_sum_exp, norm_rows
from moe_jax.kernels.top_k import _top_k

TOKENS, HIDDEN, EXPERTS = 5, 256, 128


def normal(rng, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(rng.normal(size=shape), dtype)


def added_splits(rng):
    arrays = normal(rng, TOKENS, HIDDEN), normal(rng, 2, TOKENS, HIDDEN, dtype=jnp.float32), normal(rng, HIDDEN)
    return lambda *arrays: add_splits(*arrays, eps=1e-6), arrays


def added_experts(rng):
    """The rows of pairs; the last token has no expert."""
    ids = np.zeros((TOKENS, EXPERTS), np.int32)
    ids[-1] = EXPERTS
    rows, weights = normal(rng, 2 * TOKENS, HIDDEN), normal(rng, TOKENS, EXPERTS, dtype=jnp.float32)
    outputs = ExpertRows(rows, weights, jnp.asarray(ids), None, None)
    return lambda x, weight: add_experts(x, outputs, weight, eps=1e-6, k=2), [normal(rng, TOKENS, HIDDEN), normal(rng, HIDDEN)]


def in_fp8(case):
    """Returns the case with its last two arguments, the pages of keys and values, in FP8."""

    def with_rounded(rng):
        f, (first, *pages) = case(rng)
        return f, (first, *(FP8Pages(*quantised(each)) for each in pages))

    return with_rounded


def heads(rng, distance=64):
    """Two tokens of one page and one of another."""
    new = NewTokens(*(normal(rng, 3, 128, dtype=jnp.float32) for _ in range(2)), jnp.asarray([1, 0, 1]), jnp.asarray([3, 0, 4]))
    arrays = normal(rng, 1, 3, 512, dtype=jnp.float32), normal(rng, 2, 1, 64, 128), normal(rng, 2, 1, 64, 128)
    norms = HeadNorms(normal(rng, 128), normal(rng, 128))
    options = dict(dtype=jnp.bfloat16, eps=1e-6, distance=distance)
    return lambda splits, keys, values: heads_to_pages(splits, norms, new, keys, values, **options), arrays


def heads_of_chunk(rng, distance=64):
    """64 tokens of two pages, two heads of queries and two of keys."""
    places = jnp.arange(30, 94, dtype=jnp.int32)
    new = NewTokens(*(normal(rng, 64, 128, dtype=jnp.float32) for _ in range(2)), places // 64, places % 64)
    arrays = normal(rng, 64, 6 * 128), normal(rng, 2, 2, 64, 128), normal(rng, 2, 2, 64, 128)
    norms = HeadNorms(normal(rng, 128), normal(rng, 128))
    return lambda *arrays: chunk_heads_to_pages(arrays[0], norms, new, *arrays[1:], eps=1e-6, distance=distance), arrays


def chunks(rng):
    """A chunk of two blocks of queries, each with three blocks of keys, one of a single query, and padding."""
    table = jnp.asarray(rng.permutation(10).reshape(2, 5), jnp.int32)
    queries = PagedQueries(jnp.asarray([0, 19, 20]), jnp.asarray([270, 1], jnp.int32), table)
    arrays = normal(rng, 23, 8, 64), *(normal(rng, 10, 1, PAGE_SIZE, 64) for _ in range(2))
    return lambda *arrays: paged_attention(*arrays, queries, scale=0.1, backend="mosaic"), arrays


def routes(rng):
    valid = jnp.arange(TOKENS) < 4
    splits = normal(rng, 2, TOKENS, EXPERTS, dtype=jnp.float32)
    return lambda splits: route_rows(splits, valid, k=2, rule=RouterRule()), [splits]


def choices(rng):
    """A tile of rows for each block."""
    return lambda x: _top_k(x, k=2), [normal(rng, 128, EXPERTS, dtype=jnp.float32)]


def plans(rng):
    """More tokens than a block has rows; most share few experts."""
    experts, is_chosen = (np.zeros((70, EXPERTS), np.int32) for _ in range(2))
    experts[:, 0] = rng.integers(0, 2, 70)
    np.put_along_axis(is_chosen, experts[:, :1], 1, axis=1)

    def f(is_chosen, experts):
        found = plan_rows(is_chosen, jnp.int32(0), num_held=EXPERTS, num_blocks=6, holds_all_tokens=False)
        return found, place_rows(is_chosen, experts, found, k=1, num_blocks=6)

    return f, [jnp.asarray(is_chosen), jnp.asarray(experts)]


def products(rng):
    """Parts of four steps and of five that are added, two matrices, more rows than a tile, more steps than stages."""
    arrays = normal(rng, 70, 576), normal(rng, 128, 576), normal(rng, 16, 576)
    return matmul, arrays


def products_in_parts(rng):
    """Parts of one step and of two, several tiles, and chunks of results that take turns in two buffers."""
    arrays = normal(rng, 9, 192), normal(rng, 128, 192), normal(rng, 64, 192)
    tile = TileShape(64, 128, 2)
    return lambda x, *weights: split_matmul("project_tokens", x, weights, tile, 2), arrays


def rows_of_logits(rng):
    def f(x, weight, h, logits):
        return norm_rows(x, weight, eps=1e-6), gated_silu(h, dtype=x.dtype), log_sum_exp(logits)

    f32 = {"dtype": jnp.float32}
    return f, [normal(rng, 3, HIDDEN), normal(rng, HIDDEN), normal(rng, 3, HIDDEN, **f32), normal(rng, 3, 256, **f32)]


def merged_splits(rng):
    arrays = normal(rng, 2, 2, 1, 8, 128, dtype=jnp.float32), normal(rng, 2, 2, 1, 64, dtype=jnp.float32)
    num_pages = jnp.asarray([16, 3], jnp.int32)
    blocks = QueryBlocks(None, None, 64 * num_pages - 1, num_pages, None)
    return lambda *arrays: merge_splits(*arrays, blocks, None, rows=8, splits=Splits(2, 8), dtype=jnp.bfloat16), arrays


def pages(max_pages, window=None):
    """Two rows that decode, of one head for keys; keys of more than eight pages are split."""

    def case(rng):
        table = jnp.asarray(rng.permutation(2 * max_pages).reshape(2, -1), jnp.int32)
        queries = PagedQueries(jnp.arange(3), jnp.asarray([70, PAGE_SIZE * max_pages], jnp.int32), table)
        arrays = normal(rng, 2, 2, 64), *(normal(rng, 2 * max_pages, 1, PAGE_SIZE, 64) for _ in range(2))

        def f(q, keys, values):
            options = dict(scale=0.1, window=window, single_query_rows=2, fixed_splits=True, backend="mosaic")
            return paged_attention(q, keys, values, queries, **options)

        return f, arrays

    return case


def latents(max_pages):
    """Two rows that decode with 16 heads. Keys of more than eight pages are split."""

    def case(rng):
        table = jnp.asarray(rng.permutation(2 * max_pages).reshape(2, -1), jnp.int32)
        queries = PagedQueries(jnp.arange(3), jnp.asarray([130, PAGE_SIZE * max_pages], jnp.int32), table)
        arrays = normal(rng, 2, 16, 192), normal(rng, 2 * max_pages, 1, PAGE_SIZE, 192)
        options = dict(scale=0.1, value_dim=128, single_query_rows=2, fixed_splits=True, backend="mosaic")
        return lambda q, pages: paged_attention(q, pages, None, queries, **options), arrays

    return case


CASES = {
    "pages": (pages(2), {"paged_attention"}),
    "pages in splits": (pages(9), {"paged_attention_split"}),
    "pages in FP8": (in_fp8(pages(4)), {"paged_attention"}),
    "heads to pages in FP8": (in_fp8(heads), {"heads_to_pages"}),
    "pages of windows": (pages(9, jnp.int32(100)), {"paged_attention_split"}),
    "latents": (latents(4), {"paged_latents"}),
    "latents in splits": (latents(11), {"paged_latents_split", "merge_splits"}),
    "added splits": (added_splits, {"add_splits_norm"}),
    "added experts": (added_experts, {"add_experts_norm"}),
    "heads": (heads, {"heads_to_pages"}),
    "heads of a chunk": (heads_of_chunk, {"chunk_heads_to_pages"}),
    "heads of a chunk rotated in part": (partial(heads_of_chunk, distance=32), {"chunk_heads_to_pages"}),
    "chunks": (chunks, {"paged_attention_prompts"}),
    "routes": (routes, {"route_rows"}),
    "choices": (choices, {"top_k"}),
    "plans": (plans, {"plan_rows", "place_rows"}),
    "strict products": (products, {"strict_matmul"}),
    "products in parts": (products_in_parts, {"project_tokens"}),
    "strict rows": (rows_of_logits, {"strict_norm", "strict_gated_silu", "strict_parts", "strict_merge"}),
    "merged splits": (merged_splits, {"merge_splits"}),
}
