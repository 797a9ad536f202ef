"""Paged attention equals attention to contiguous keys, in XLA and in the interpreter of kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries, mosaic
from moe_jax.kernels.attention.paged import paged_attention as paged_attention_of_operations
from moe_jax.kernels.attention.paged.fp8 import FP8Pages, quantised, read
from tests.helpers import seeds
from tests.helpers.compiled_steps import whole
from tests.kernels.attention.test_paged_attention import SCALE

paged_attention = whole(paged_attention_of_operations)


def make(rng, counts, num_keys, heads, kv_heads, key_dim, value_dim, *, shared=0, padding=0, dtype=jnp.float32):
    """q, keys, values and queries. The rows' first `shared` pages are the same; pages are in random order."""
    counts, num_keys = np.asarray(counts), np.asarray(num_keys)
    pages = -(-num_keys // PAGE_SIZE)
    max_pages = pages.max() + 2
    order = rng.permutation(pages.sum() + shared + 3)
    table = rng.integers(0, len(order), (len(counts), max_pages))
    own = shared
    for row, count in enumerate(pages):
        table[row, :count] = order[own : own + count]
        own += count
        table[row, : min(shared, count)] = order[: min(shared, count)]
    arrays = (
        rng.normal(size=(counts.sum() + padding, heads, key_dim)),
        rng.normal(size=(len(order), kv_heads, PAGE_SIZE, key_dim)),
        rng.normal(size=(len(order), kv_heads, PAGE_SIZE, value_dim)),
    )
    first = np.concatenate([[0], np.cumsum(counts)])
    queries = PagedQueries(*(jnp.asarray(a, jnp.int32) for a in (first, num_keys, table)))
    return *(jnp.asarray(a, dtype) for a in arrays), queries


def first_single(counts):
    """The number of rows before the first row with another number of queries than one."""
    return next((row for row, count in enumerate(counts) if count != 1), len(counts))


def by_rows(q, keys, values, queries, window=None, sinks=None):
    """Attention of each row's queries to the row's keys, copied out of their pages, in f64; zeros for padding."""
    q, keys, values = (np.asarray(a, np.float64) for a in (q, keys, values))
    first, table = np.asarray(queries.first_query), np.asarray(queries.page_table)
    out = np.zeros((*q.shape[:2], values.shape[3]))
    for row, num_keys in enumerate(np.asarray(queries.num_keys)):
        own, pages = slice(first[row], first[row + 1]), table[row, : -(-num_keys // PAGE_SIZE)]
        k, v = (
            np.moveaxis(a[pages], 1, 2).reshape(-1, a.shape[1], a.shape[3])[:num_keys].repeat(q.shape[1] // a.shape[1], axis=1)
            for a in (keys, values)
        )
        distance = num_keys - len(q[own]) + np.arange(len(q[own]))[:, None] - np.arange(num_keys)
        seen = (distance >= 0) & (distance < (window or num_keys))
        scores = np.where(seen[:, None], np.einsum("qhd,khd->qhk", q[own], k) * SCALE, -np.inf)
        weights, sums = np.exp(scores), 0 if sinks is None else np.exp(np.asarray(sinks, np.float64))
        out[own] = np.einsum("qhk,khe->qhe", weights, v) / (weights.sum(axis=-1) + sums)[..., None]
    return out


@pytest.mark.parametrize(
    "counts, num_keys, window",
    [
        ([5, 0, 64, 1, 0, 70, 1], [5, 9, 64, 129, 0, 300, 64], None),
        ([2, 65, 1], [130, 65, 200], 70),
        pytest.param([1, 3], [100, 3], 1, marks=pytest.mark.thorough),
    ],
    ids=["ragged", "window", "window of one"],
)
def test_equals_attention(rng, counts, num_keys, window):
    """Rows of any number of queries, which begin with the same tokens and read the same page."""
    q, keys, values, queries = make(rng, counts, num_keys, 4, 2, 16, 8, shared=1, padding=3)
    out = paged_attention(q, keys, values, queries, scale=SCALE, window=window)
    np.testing.assert_allclose(out[:-3], by_rows(q, keys, values, queries, window)[:-3], atol=3e-6)
    assert np.isfinite(out).all()


def test_sinks(rng, monkeypatch):
    """Decoding rows and chunks, in XLA and in kernels, whose parts are merged with the sinks."""
    monkeypatch.setattr(mosaic, "_cores", lambda: 1)
    arrays = make(rng, [1, 1, 5], [70, 3, 600], 8, 2, 64, 64, padding=2, dtype=jnp.bfloat16)
    sinks = jnp.asarray(2 * rng.normal(size=8), jnp.bfloat16)
    options = dict(scale=SCALE, window=530, sinks=sinks, single_query_rows=2)
    wide, wanted = [a.astype(jnp.float32) for a in arrays[:3]], by_rows(*arrays, 530, sinks)[:7]
    np.testing.assert_allclose(paged_attention(*wide, arrays[3], **options)[:7], wanted, atol=3e-6)
    out = paged_attention(*arrays, **options, backend="mosaic")[:7]
    assert np.linalg.norm(np.asarray(out, np.float64) - wanted) < 6e-3 * np.linalg.norm(wanted)


def test_latents(rng):
    """Values are the first columns of the keys."""
    q, keys, _, queries = make(rng, [1, 3], [70, 130], 4, 1, 12, 8)
    out = paged_attention(q, keys, None, queries, value_dim=8, scale=SCALE)
    np.testing.assert_allclose(out, by_rows(q, keys, keys[..., :8], queries), atol=3e-6)


def test_a_token_depends_on_its_own_row_alone(rng):
    """Bit for bit: alone, in a chunk, among other rows, and with a wider table."""
    q, keys, values, queries = make(rng, [1, 20, 1], [150, 90, 300], 4, 2, 16, 16)
    together = paged_attention(q, keys, values, queries, scale=SCALE)
    table = jnp.pad(queries.page_table[1:2], ((0, 0), (0, 5)))
    for i in (0, 7, 19):
        alone = PagedQueries(jnp.array([0, 1]), jnp.array([90 - 19 + i]), table)
        one = paged_attention(q[1 + i][None], keys, values, alone, scale=SCALE, single_query_rows=1)
        np.testing.assert_array_equal(one[0], together[1 + i])


def test_blocks_of_tokens(rng, monkeypatch):
    """Tokens are computed in blocks, the last of them not full."""
    from moe_jax.kernels.attention.paged import xla

    q, keys, values, queries = make(rng, [9, 4], [9, 70], 2, 1, 8, 8)
    monkeypatch.setattr(xla, "TOKEN_BLOCK", 5)
    found = paged_attention(q, keys, values, queries, scale=SCALE)
    np.testing.assert_allclose(found, by_rows(q, keys, values, queries), atol=3e-6)


CHUNKS = [1, 1, 5, 0, 64, 1, 70], [700, 200, 5, 0, 130, 64, 200]
"""Two decoding rows and five chunks."""


@pytest.mark.parametrize(
    "counts, num_keys, heads, kv_heads, key_dim, value_dim, dtype, cores, window",
    [
        ([1] * 4, [1, 70, 128, 700], 16, 2, 64, 64, "bfloat16", 1000, None),
        pytest.param([1] * 4, [1, 70, 128, 700], 2, 2, 128, 64, "float16", 1, 100, marks=pytest.mark.thorough),
        (*CHUNKS, 8, 1, 64, 128, "float16", 8, 150),
        pytest.param(*CHUNKS, 32, 2, 64, 64, "bfloat16", 1, None, marks=pytest.mark.thorough),
        pytest.param([3, 0, 9], [3, 0, 700], 8, 1, 64, 64, "bfloat16", 1000, None, marks=pytest.mark.thorough),
        pytest.param([3, 0, 9], [520, 0, 1220], 8, 1, 64, 128, "bfloat16", 1000, 200, marks=pytest.mark.thorough),
    ],
    ids=[
        "decoding in splits",
        "decoding",
        "chunks beside rows in splits",
        "chunks of 16 heads a key head",
        "chunks in splits",
        "window in splits",
    ],
)
def test_the_kernel(rng, monkeypatch, counts, num_keys, heads, kv_heads, key_dim, value_dim, dtype, cores, window):
    """Equals f64. Where there are more cores than blocks of queries, keys are split. Padding of chunks gives zeros."""
    monkeypatch.setattr(mosaic, "_cores", lambda: cores)
    single_query_rows = first_single(counts)
    padding = 0 if single_query_rows == len(counts) else 3
    arrays = make(rng, counts, num_keys, heads, kv_heads, key_dim, value_dim, padding=padding, dtype=dtype)
    split, merge = [], mosaic.merge_splits
    monkeypatch.setattr(mosaic, "merge_splits", lambda *a, **options: (split.append(True), merge(*a, **options))[1])
    options = {"scale": SCALE, "window": window, "single_query_rows": single_query_rows}
    out = paged_attention(*arrays, **options, backend="mosaic")
    assert bool(split) == (cores > 1)
    assert out.dtype == dtype and not out[sum(counts) :].any()
    assert_near(out, by_rows(*arrays, window))


def assert_near(found, wanted):
    """Each head of each token."""
    error = np.linalg.norm(np.asarray(found, np.float64) - wanted, axis=-1)
    assert (error <= 6e-3 * np.linalg.norm(wanted, axis=-1)).all()


@pytest.mark.parametrize(
    "counts, num_keys, heads, kv_heads, width, cores, window, fixed_splits",
    [
        pytest.param([1] * 3, [1, 70, 700], 16, 2, 128, 1, None, False, marks=pytest.mark.thorough),
        ([1, 1, 5, 0, 64], [200, 64, 5, 0, 130], 8, 1, 64, 1, 70, True),
        pytest.param(*CHUNKS, 8, 1, 128, 8, None, False, marks=pytest.mark.thorough),
    ],
    ids=["decoding", "fixed splits", "chunks"],
)
def test_the_kernel_of_pages_in_fp8(rng, monkeypatch, counts, num_keys, heads, kv_heads, width, cores, window, fixed_splits):
    """It has the bits of the kernel for bf16 on the numbers that the pages mean, and about the result in f64."""
    monkeypatch.setattr(mosaic, "_cores", lambda: cores)
    monkeypatch.setattr(mosaic, "takes_group", lambda group: False)
    q, *pages, queries = make(rng, counts, num_keys, heads, kv_heads, width, width, dtype=jnp.bfloat16)
    in_fp8 = [FP8Pages(*quantised(each)) for each in pages]
    whole = [read(each, jnp.arange(each.shape[0]), jnp.bfloat16) for each in in_fp8]
    options = dict(
        scale=SCALE, window=window, single_query_rows=first_single(counts), fixed_splits=fixed_splits, backend="mosaic"
    )
    out = paged_attention(q, *in_fp8, queries, **options)
    np.testing.assert_array_equal(out, paged_attention(q, *whole, queries, **options))
    assert_near(out, by_rows(q, *whole, queries, window))


@pytest.mark.parametrize(
    "counts, num_keys, heads, value_dim, window, fixed_splits",
    [
        ([1, 1, 0, 9], [1, 700, 0, 70], 16, 128, 200, True),
        pytest.param([1, 1], [100, 200], 4, 512, 100, False, marks=pytest.mark.thorough),
        pytest.param([2, 0, 1], [129, 0, 64], 128, 256, None, False, marks=pytest.mark.thorough),
    ],
    ids=["decoding and a chunk in splits", "decoding", "drafts"],
)
def test_the_kernel_of_latents(rng, counts, num_keys, heads, value_dim, window, fixed_splits):
    """Equals f64, also with as many tokens as rows, where one row has two."""
    q, keys, _, queries = make(rng, counts, num_keys, heads, 1, value_dim + 64, 8, dtype=jnp.bfloat16)
    options = {"scale": SCALE, "window": window, "value_dim": value_dim, "single_query_rows": first_single(counts)}
    out = paged_attention(q, keys, None, queries, **options, fixed_splits=fixed_splits, backend="mosaic")
    assert out.dtype == q.dtype
    assert_near(out, by_rows(q, keys, keys[..., :value_dim], queries, window))


@pytest.mark.thorough
@pytest.mark.parametrize("window, value_dim", [(150, None), (None, 128)], ids=["window", "latents"])
def test_fixed_splits(window, value_dim):
    """A query's bits are the same alone, in a chunk, and next to enough other rows that keys would not be split."""
    width = 64 if value_dim is None else value_dim + 64
    q, keys, values, queries = make(seeds.rng(), [9, 1, 1], [590, 70, 600], 2, 1, width, 64, dtype=jnp.float16)
    options = {"scale": SCALE, "backend": "mosaic", "fixed_splits": True, "window": window, "value_dim": value_dim}
    pages = keys, values if value_dim is None else None
    together = paged_attention(q, *pages, queries, **options)
    row = PagedQueries(jnp.asarray([0, 1]), queries.num_keys[:1], queries.page_table[:1])
    alone = paged_attention(q[8:9], *pages, row, single_query_rows=1, **options)
    np.testing.assert_array_equal(together[8], alone[0])
    other = PagedQueries(jnp.asarray([0, 1]), queries.num_keys[2:], queries.page_table[2:])
    np.testing.assert_array_equal(together[10], paged_attention(q[10:], *pages, other, single_query_rows=1, **options)[0])
    values = values if value_dim is None else keys[..., :value_dim]
    np.testing.assert_allclose(
        np.asarray(together, np.float32), by_rows(q, keys, values, queries, window), rtol=2e-2, atol=2e-2
    )


def test_pages_before_the_window(rng):
    """Pages before a window, and pages after the last key, are not read: nothing changes if they hold NaN."""
    q, keys, values, queries = make(rng, [1, 9, 1], [700, 300, 130], 4, 2, 64, 64, dtype=jnp.bfloat16)
    seen = np.zeros(len(keys), bool)
    for row, (count, num_keys) in enumerate([(1, 700), (9, 300), (1, 130)]):
        seen[np.asarray(queries.page_table[row, (num_keys - count - 69) // PAGE_SIZE : -(-num_keys // PAGE_SIZE)])] = True
    assert not seen.all()
    run = jax.jit(lambda *arrays: paged_attention(*arrays, scale=SCALE, window=jnp.int32(70), backend="mosaic"))
    expected = run(q, keys, values, queries)
    unread = [jnp.where(jnp.asarray(seen)[:, None, None, None], a, jnp.nan) for a in (keys, values)]
    np.testing.assert_array_equal(run(q, *unread, queries), expected)
