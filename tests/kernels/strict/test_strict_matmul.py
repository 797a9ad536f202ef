"""A row's product with a matrix has the same bits beside any number of rows."""

import jax.numpy as jnp
import numpy as np
import pytest
import seeds

from moe_jax.kernels.strict.matmul import matmul

K, N = 192, 144


def operands():
    rng = seeds.rng()
    return tuple(jnp.asarray(rng.normal(size=(size, K)), jnp.bfloat16) for size in (200, N))


def test_bits_of_a_row():
    x, w = operands()
    expected = np.asarray(matmul(x, w, out_dtype=jnp.float32))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(expected, exact, rtol=1e-5, atol=1e-4)
    for rows in (1, 3, 64, 65):
        np.testing.assert_array_equal(matmul(x[:rows], w, out_dtype=jnp.float32), expected[:rows])
    # At other places, beside other rows.
    order = seeds.rng().permutation(200)
    np.testing.assert_array_equal(matmul(x[order], w, out_dtype=jnp.float32), expected[order])


def test_rounded_once():
    x, w = operands()
    expected = matmul(x[:9], w, out_dtype=jnp.float32).astype(jnp.bfloat16)
    np.testing.assert_array_equal(matmul(x[:9], w, out_dtype=jnp.bfloat16), expected)


def test_several_matrices():
    x, w = operands()
    expected = matmul(x[:9], w, out_dtype=jnp.float32)
    np.testing.assert_array_equal(matmul(x[:9], w[:64], w[64:96], w[96:], out_dtype=jnp.float32), expected)


@pytest.mark.parametrize(("k", "n", "dtype"), [(100, N, jnp.bfloat16), (K, 100, jnp.bfloat16), (K, N, jnp.float32)])
def test_refused(k, n, dtype):
    with pytest.raises(ValueError, match="must"):
        matmul(jnp.zeros((2, k), dtype), jnp.zeros((n, k), dtype), out_dtype=jnp.float32)
