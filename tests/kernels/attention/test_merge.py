"""The merge of splits weighs each by its share of the sum, and reads no split without pages."""

import jax.numpy as jnp
import numpy as np

from moe_jax.kernels.attention.paged.blocks import QueryBlocks, Splits
from moe_jax.kernels.attention.paged.mosaic import merge_splits
from tests.helpers import seeds


def test_merge_splits():
    rng = seeds.rng()
    out, lse = rng.normal(size=(3, 7, 2, 8, 128)), 30 * rng.normal(size=(3, 7, 2, 64))
    num_pages = np.asarray([16, 56, 3])
    lse[0, 1] = -np.inf
    expected = np.zeros((3, 2, 8, 128))
    for block, splits in enumerate(-(-num_pages // 8)):
        weights = 2.0 ** (lse[block, :splits, :, :8] - lse[block, :splits, :, :8].max(axis=0))
        expected[block] = (weights[..., None] * out[block, :splits]).sum(axis=0) / weights.sum(axis=0)[..., None]
        out[block, splits:] = lse[block, splits:] = np.nan
    f32, pages = jnp.float32, jnp.asarray(num_pages, jnp.int32)
    blocks = QueryBlocks(None, None, 64 * pages - 1, pages, None)
    found = merge_splits(jnp.asarray(out, f32), jnp.asarray(lse, f32), blocks, None, rows=8, splits=Splits(7, 8), dtype=f32)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
