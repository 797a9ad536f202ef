"""Keys and values in FP8: the codes and powers of two of heads, and the error of attention to them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries, fp8, paged_attention
from moe_jax.kernels.attention.paged.fp8 import FP8Pages, empty, read, written
from tests.helpers.compiled_steps import whole

quantised = jax.jit(fp8.quantised)


def numbers(codes, exponents):
    """Returns the numbers of heads in f64, by the definition."""
    return np.asarray(codes).astype(np.float64) * 2.0 ** (np.asarray(exponents, np.int64)[..., None] - 127)


def test_a_head_uses_the_whole_range_of_codes(rng):
    """The largest code is above 224, unless that of the next smaller power of two would be above 448."""
    x = rng.normal(size=(1000, 128)) * 2.0 ** rng.uniform(-40, 40, (1000, 1))
    codes, exponents = quantised(jnp.asarray(x, jnp.float32))
    largest = np.abs(np.asarray(codes).astype(np.float32)).max(axis=1)
    assert largest.min() >= 224 and largest.max() == 448
    found, step = numbers(codes, exponents), 2.0 ** (np.asarray(exponents, np.int64)[:, None] - 127 - 9)
    # Four significant bits, or half of the smallest code.
    assert (np.abs(found - x) <= np.maximum(2.0**-4 * np.abs(x), step / 2)).all()


def test_exact_heads():
    """Powers of two, sums of few of them, zeros, and the largest and smallest numbers of bf16 keep their values."""
    x = jnp.asarray([[1.0, -0.5, 1.75, 0], [448, 2**-9, -416, 0], [0, 0, 0, 0], [2.0**127, -(2.0**120), 0, 0]], jnp.bfloat16)
    np.testing.assert_array_equal(numbers(*quantised(x)), x.astype(jnp.float32))
    # 449 needs the next power of two. Its step is 32 there.
    codes, exponents = quantised(jnp.asarray([[449.0, 1.0]]))
    assert int(exponents[0]) == 128 and numbers(codes, exponents).tolist() == [[448, 1]]


def test_a_token_is_written_alone(rng):
    """A token's codes do not depend on other tokens of its page; a token out of range is dropped."""
    heads = rng.normal(size=(3, 2, 16)).astype(np.float32)

    @jax.jit
    def fill(heads, page, offset):
        pages = written(empty((4, 2, PAGE_SIZE, 16), jnp.float32, in_fp8=True), page, offset, heads)
        return pages, read(pages, jnp.arange(4), jnp.float32)

    pages, found = fill(heads, np.array([1, 1, 9]), np.array([5, 63, 0]))
    alone, _ = fill(heads, np.array([1, 9, 9]), np.array([5, 0, 0]))
    for together, one in zip(pages, alone, strict=True):
        np.testing.assert_array_equal(together[1, :, 5], one[1, :, 5])
    expected = np.zeros((4, 2, PAGE_SIZE, 16))
    expected[1, :, [5, 63]] = numbers(*quantised(heads[:2]))
    np.testing.assert_array_equal(found, expected)


def test_error_of_attention(rng):
    """The output differs by 3 to 5 % for random keys: keys and values each add about 2.6 %, the error of their codes."""
    width = 128
    q, keys, values = (rng.normal(size=size) for size in ((8, 8, width), *[(8, 2, PAGE_SIZE, width)] * 2))
    rows = PagedQueries(*(jnp.asarray(a, jnp.int32) for a in (range(5), [512, 512, 500, 300], [[*range(8)]] * 4)))
    in_fp8 = [FP8Pages(*quantised(jnp.asarray(pages, jnp.float32))) for pages in (keys, values)]
    found = whole(paged_attention)(jnp.asarray(q[:4], jnp.float32), *in_fp8, rows, scale=width**-0.5)
    k, v = (pages.swapaxes(0, 1).reshape(2, 512, width)[np.arange(8) // 4] for pages in (keys, values))
    scores = np.einsum("qhd,hkd->qhk", q[:4], k) * width**-0.5
    scores[np.arange(512) >= np.asarray(rows.num_keys)[:, None, None].repeat(8, 1)] = -np.inf
    p = np.exp(scores)
    expected = np.einsum("qhk,hke->qhe", p / p.sum(axis=2, keepdims=True), v)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert 0.03 < error < 0.05


def test_latents_are_refused():
    latents = FP8Pages(jnp.zeros((3, 1, PAGE_SIZE, 192), jnp.float8_e4m3fn), jnp.zeros((3, 1, PAGE_SIZE), jnp.uint8))
    queries = PagedQueries(jnp.array([0, 1]), jnp.array([1]), jnp.zeros((1, 1), jnp.int32))
    with pytest.raises(ValueError, match="pages in FP8 hold keys and values; got values None"):
        paged_attention(jnp.zeros((1, 4, 192), jnp.bfloat16), latents, None, queries, scale=1.0, value_dim=128)
