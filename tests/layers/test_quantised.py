"""Quantised matrices: their values, and what a layer reads of them."""

from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.layers.quantised import NF4_VALUES, BlockScaled, FourBits
from tests.helpers import seeds


def test_values_of_nf4():
    """Quantiles of a normal distribution, seven below zero and eight above, as the paper derives them."""
    quantile, offset = NormalDist().inv_cdf, 0.9677083
    above = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    expected = np.sort([*above, 0, *below]) / max(above)
    np.testing.assert_allclose(NF4_VALUES, expected, atol=2e-7)


def test_nf4_takes_the_nearest_value():
    rng = seeds.rng()
    w = rng.normal(size=(2, 3, 128)).astype(np.float32)
    w[0, 0, :64] = 0
    quantised = FourBits.nf4(jnp.asarray(w), jnp.float32)
    assert quantised.shape == w.shape and quantised.codes.shape == (2, 3, 64) and quantised.size == w.size
    blocks = w.reshape(2, 3, 2, 64)
    scales = np.abs(blocks).max(axis=-1, keepdims=True)
    distance = np.abs(blocks[..., None] - scales[..., None] * np.float32(NF4_VALUES))
    found = np.asarray(quantised[...]).reshape(blocks.shape)
    np.testing.assert_allclose(np.abs(found - blocks), distance.min(axis=-1), atol=1e-6)
    assert (found[0, 0, 0] == 0).all()
    # Values of NF4 stay as they are.
    np.testing.assert_array_equal(FourBits.nf4(quantised[...], jnp.float32)[...], quantised[...])
    with pytest.raises(ValueError, match="no multiple"):
        FourBits.nf4(jnp.ones((2, 65)), jnp.float32)


def test_block_scales():
    """Blocks at the lower and right edges are cut off."""
    rng = seeds.rng()
    codes = jnp.asarray(rng.normal(size=(2, 130, 200)), jnp.float8_e4m3fn)
    scales = jnp.asarray(rng.random((2, 2, 2)), jnp.float32)
    expected = np.array(codes, np.float32)
    for row in range(2):
        for column in range(2):
            part = slice(None), slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            expected[part] *= np.asarray(scales)[:, row : row + 1, column : column + 1]
    matrices = BlockScaled(codes, scales, jnp.dtype(jnp.bfloat16))
    np.testing.assert_array_equal(matrices[...], jnp.asarray(expected, jnp.bfloat16))
    with pytest.raises(IndexError, match="as a whole"):
        matrices[0]


def test_slices_of_layers():
    """A loop over layers dequantises one at a time."""
    w = jnp.asarray(seeds.rng().normal(size=(3, 2, 64)), jnp.float32)
    layers = FourBits.nf4(w, jnp.float32)
    _, found = jax.lax.scan(lambda carry, layer: (carry, layer[...]), 0, layers)
    np.testing.assert_array_equal(found, layers[...])
