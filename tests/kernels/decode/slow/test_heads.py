"""Heads of new tokens are normed and rotated as the modules do it, and go into their pages, which change in no other place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import HeadsSpec
from moe_jax.kernels.attention.paged.fp8 import FP8Pages, quantised
from moe_jax.kernels.decode.heads import HeadNorms, NewTokens, chunk_heads_to_pages, heads_to_pages
from moe_jax.layers.linear import rms_norm
from moe_jax.layers.rope import RopeTables, apply_rope
from moe_jax.serving.fused import tables_of_heads
from tests.helpers import seeds
from tests.helpers.compiled_steps import whole
from tests.helpers.h200 import needs_compiler, run_script

HEADS, KV_HEADS, EPS = 4, 2, 1e-6


def _check(found, projections, norms, cos, sin, page, offset, keys, values, interleaved=False):
    """Compares with the modules. Places that no token takes are as before."""
    found_q, found_keys, found_values = found
    heads = projections.reshape(1, len(page), -1, 128)
    rope = RopeTables(cos[None], sin[None])

    @whole
    def rotated(heads, weight, rope):
        normed = heads if weight is None else rms_norm(heads, weight, EPS)
        rotated = apply_rope(normed, rope, interleaved=interleaved)[0]
        # The module's result has all first numbers of pairs, then all second ones.
        return rotated.reshape(*rotated.shape[:2], 2, -1).swapaxes(2, 3).reshape(rotated.shape) if interleaved else rotated

    q_norm, k_norm, _ = norms
    q, k = rotated(heads[:, :, :HEADS], q_norm, rope), rotated(heads[:, :, HEADS:-KV_HEADS], k_norm, rope)
    for got, expected in ((found_q, q), (found_keys, keys.at[page, :, offset].set(k))):
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        np.testing.assert_allclose(got, expected, rtol=2**-7, atol=2**-6)
    np.testing.assert_array_equal(found_values, values.at[page, :, offset].set(heads[0, :, -KV_HEADS:]))
    written = np.zeros((len(keys), 64), bool)
    written[page, offset] = True
    np.testing.assert_array_equal(np.asarray(found_keys).swapaxes(1, 2)[~written], np.asarray(keys).swapaxes(1, 2)[~written])


def _make(rng, tokens):
    """Returns projections in f32, the norms, cos and sin, and pages."""
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    projections = jnp.asarray(rng.normal(size=(2, tokens, (HEADS + 2 * KV_HEADS) * 128)), jnp.float32)
    angles = jnp.asarray(rng.normal(size=(tokens, 64)), jnp.float32)
    pages = normal(6, KV_HEADS, 64, 128), normal(6, KV_HEADS, 64, 128)
    return projections, HeadNorms(normal(128), normal(128)), jnp.cos(angles), jnp.sin(angles), pages


def _new_tokens(cos, sin, page, offset, interleaved=False):
    heads = HeadsSpec(heads=1, kv_heads=1, key_dim=128, value_dim=128, rotary_dim=2 * cos.shape[1], interleaved=interleaved)
    return NewTokens(*tables_of_heads(RopeTables(cos[None], sin[None]), heads), page, offset)


def test_heads_to_pages():
    """A head of zeros, and one of large numbers, are among them."""
    splits, norms, cos, sin, pages = _make(seeds.rng(), 5)
    splits = splits.at[:, 3, -256:-128].set(0).at[:, 4, -128:].multiply(1e30)
    page, offset = jnp.asarray([3, 1, 1, 2, 0], jnp.int32), jnp.asarray([5, 0, 1, 63, 0], jnp.int32)
    arguments = splits, norms, _new_tokens(cos, sin, page, offset)
    found = whole(heads_to_pages)(*arguments, *pages, dtype=jnp.bfloat16, eps=EPS)
    _check(found, splits.sum(axis=0).astype(jnp.bfloat16), norms, cos, sin, page, offset, *pages)
    in_fp8 = whole(heads_to_pages)(*arguments, *map(_rounded, pages), dtype=jnp.bfloat16, eps=EPS)
    _check_rounded(in_fp8, found)


def _rounded(pages):
    return FP8Pages(*quantised(pages))


def _check_rounded(in_fp8, found):
    """Pages in FP8 are the pages in the model's dtype, rounded."""
    np.testing.assert_array_equal(in_fp8[0], found[0])
    for one, wide in zip(in_fp8[1:], found[1:], strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, _rounded(wide))


@pytest.mark.parametrize("rotated, interleaved", [(128, True), pytest.param(64, False, marks=pytest.mark.thorough)])
def test_families(rotated, interleaved):
    """Biases, heads without norms, and rope on the first numbers of a head or on neighbors."""
    rng = seeds.rng()
    splits, _, cos, sin, pages = _make(rng, 5)
    cos, sin = cos[:, : rotated // 2], sin[:, : rotated // 2]
    bias = jnp.asarray(rng.normal(size=splits.shape[2]), jnp.bfloat16)
    page, offset = jnp.asarray([3, 1, 1, 2, 0], jnp.int32), jnp.asarray([5, 0, 1, 63, 0], jnp.int32)
    new, distance = _new_tokens(cos, sin, page, offset, interleaved), 1 if interleaved else rotated // 2
    options = dict(dtype=jnp.bfloat16, eps=EPS, distance=distance)
    found = whole(heads_to_pages)(splits, HeadNorms(bias=bias), new, *pages, **options)
    projections = (splits.sum(axis=0) + bias).astype(jnp.bfloat16)
    _check(found, projections, HeadNorms(), cos, sin, page, offset, *pages, interleaved)


@pytest.mark.parametrize("rotated, normed", [(64, True), pytest.param(128, False, marks=pytest.mark.thorough)])
def test_chunk_heads_to_pages(rotated, normed):
    """The tokens of two chunks, which begin inside their pages; all but 6 tokens of the second block are in the first too."""
    splits, norms, cos, sin, pages = _make(seeds.rng(), 70)
    norms, cos, sin = norms if normed else HeadNorms(), cos[:, : rotated // 2], sin[:, : rotated // 2]
    places = jnp.concatenate([5 * 64 + jnp.arange(7, 57), 2 * 64 + jnp.arange(60, 80)]).astype(jnp.int32)
    page, offset = places // 64, places % 64
    projections = splits[0].astype(jnp.bfloat16)
    new = _new_tokens(cos, sin, page, offset)
    options = dict(eps=EPS, distance=rotated // 2)
    found = whole(chunk_heads_to_pages)(projections, norms, new, *pages, **options)
    _check(found, projections, norms, cos, sin, page, offset, *pages)
    if normed:
        _check_rounded(whole(chunk_heads_to_pages)(projections, norms, new, *map(_rounded, pages), **options), found)


SLICED = """
import re
from moe_jax.kernels.decode.heads import HeadNorms, NewTokens, heads_to_pages

def written(splits, norms, page):
    empty = jnp.zeros((5, 1, 64, 128), bf16)
    angles = jnp.zeros((300, 128), f32)
    new = NewTokens(angles, angles, page, page)
    return heads_to_pages(splits[:, :300], HeadNorms(*norms), new, empty, empty, dtype=bf16, eps=1e-6)

text = compile(written, ((1, 304, 512), f32), ((2, 128), bf16), ((300,), i32)).as_text()
computations = re.split(r"\\n(?=%|ENTRY)", text)
in_place = [text.split()[0] for text in computations if "mosaic_gpu" in text and "output_to_operand_aliasing" in text]
assert in_place == ["ENTRY"], in_place
"""


@needs_compiler
def test_slices():
    """XLA would fuse the kernel with slices of its inputs, and make one array of keys and values that begin alike."""
    run_script(SLICED)
