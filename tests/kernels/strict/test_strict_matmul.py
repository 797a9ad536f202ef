"""A row's product with a matrix has the same bits next to any number of rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels import backends
from moe_jax.kernels.hopper.interpreter import is_interpreted
from moe_jax.kernels.hopper.mainloop import TileShape
from moe_jax.kernels.split_matmul import split_matmul
from moe_jax.kernels.strict import matmul as strict_matmul
from moe_jax.kernels.strict.matmul import is_apart, matmul, matmul_in_parts, parts_of, tile_of
from tests.helpers import seeds

K, N = 832, 80
"""13 steps in parts of 4, 4 and 5."""


def operands(rows):
    rng = seeds.rng()
    return tuple(jnp.asarray(rng.normal(size=(size, K)), jnp.bfloat16) for size in (rows, N))


def test_bits_of_a_row():
    """Parts that the reader adds have the bits of parts that were added in registers, for any number of rows."""
    x, w = operands(300)
    expected = np.asarray(matmul(x, w))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(expected, exact, rtol=1e-5, atol=1e-4)
    for rows in (1, 64, 65):
        np.testing.assert_array_equal(matmul(x[-rows:], w), expected[-rows:])
        parts = split_matmul("strict_matmul", x[:rows], (w,), TileShape(64, 128, 2), 3)
        np.testing.assert_array_equal((parts[0] + parts[1]) + parts[2], expected[:rows])


def test_parts_for_the_reader():
    x, w = operands(65)
    expected = matmul(x, w)
    for rows, number in ((3, 3), (65, 1 if is_interpreted() else 3)):
        parts = matmul_in_parts(x[:rows], w)
        assert len(parts) == number
        np.testing.assert_array_equal(sum(parts[1:], start=parts[0]), expected[:rows])


def test_several_matrices():
    x, w = (array[:, :128] for array in operands(9))
    np.testing.assert_array_equal(matmul(x, w[:32], w[32:64], w[64:]), matmul(x, w))


@pytest.mark.parametrize(("n", "k", "parts"), [(5120, 2048, 3), (2048, 4096, 4), (128, 2048, 8), (151936, 2048, 1), (N, K, 3)])
def test_number_of_parts(n, k, parts):
    """q, k and v; o; router; vocabulary of Qwen3-30B-A3B. A change of these numbers changes bits."""
    assert parts_of(n, k) == parts


@pytest.mark.parametrize(
    ("rows", "sizes", "height", "columns", "apart"),
    [
        (1, (5120, 2048), 64, 128, True),
        (128, (5120, 2048), 128, 128, True),
        (256, (5120, 2048), 128, 128, False),
        (64, (2048, 4096), 64, 64, True),
        (256, (2048, 4096), 128, 128, True),
        (8192, (2048, 4096), 128, 128, False),
        (64, (128, 2048), 64, 16, True),
        (8192, (128, 2048), 128, 64, False),
        (64, (151936, 2048), 64, 256, False),
    ],
)
def test_tiles(monkeypatch, rows, sizes, height, columns, apart):
    """Each part of each tile of few rows has one of an H200's cores."""
    monkeypatch.setattr(backends, "num_cores", lambda: 132)
    monkeypatch.setattr(strict_matmul, "is_interpreted", lambda: False)
    heights, parts = sizes[:1], parts_of(*sizes)
    assert is_apart(rows, heights, parts) == apart
    tile = tile_of(rows, heights, parts, apart=apart)
    assert (tile.rows, tile.columns) == (height, columns)


@pytest.mark.parametrize(("k", "n", "dtype"), [(100, N, jnp.bfloat16), (K, 100, jnp.bfloat16), (K, N, jnp.float32)])
def test_refused(k, n, dtype):
    with pytest.raises(ValueError, match="must"):
        matmul(jnp.zeros((2, k), dtype), jnp.zeros((n, k), dtype))
