"""Partial sums over parts of the summands add up to the product, in f64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels.hopper.mainloop import TileShape
from moe_jax.kernels.split_matmul import split_matmul
from tests.helpers import seeds

CASES = [
    # Three tiles, parts of one and of two steps, and a last matrix that ends within a tile.
    (7, 192, (128, 128, 80), TileShape(64, 128, 2), 2),
    (65, 192, (64, 64, 48), TileShape(128, 64, 2), 3),
]
THOROUGH = [
    (16, 320, (64, 48), TileShape(64, 64, 3), 4),
    (200, 320, (128, 128, 80), TileShape(128, 128, 3), 3),
    (200, 128, (128, 16), TileShape(128, 128, 2), 1),
]


@pytest.mark.parametrize(
    ("rows", "k", "heights", "tile", "splits"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.thorough) for case in THOROUGH)],
)
def test_partial_sums(rows, k, heights, tile, splits):
    rng = seeds.rng()
    x, *weights = (jnp.asarray(rng.normal(size=(n, k)), jnp.bfloat16) for n in (rows, *heights))
    run = jax.jit(lambda x, *weights: split_matmul("split_matmul", x, weights, tile, splits))
    found = np.asarray(run(x, *weights), np.float64)
    w = np.concatenate([np.asarray(w, np.float64) for w in weights])
    ends = [64 * (k // 64 * part // splits) for part in range(splits + 1)]
    for part, first, end in zip(found, ends, ends[1:], strict=False):
        exact = np.asarray(x, np.float64)[:, first:end] @ w[:, first:end].T
        np.testing.assert_allclose(part, exact, rtol=1e-5, atol=1e-4)
    assert len(found) == splits
