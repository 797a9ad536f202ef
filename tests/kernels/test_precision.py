"""The order of sums."""

import jax
import numpy as np
import pytest

from moe_jax.kernels.precision import sum_in_order


@pytest.mark.parametrize("shape, axis", [((1, 8, 2048), 1), ((2, 8, 2048), 1), ((150, 3, 5), 1), ((12, 70), 0)])
def test_sum_in_order(rng, shape, axis):
    """Terms are added from the first to the last."""
    terms = rng.normal(size=shape).astype(np.float32)
    expected = np.zeros_like(terms.sum(axis))
    for term in np.moveaxis(terms, axis, 0):
        expected += term
    np.testing.assert_array_equal(jax.jit(sum_in_order, static_argnums=1)(terms, axis), expected)


def test_sum_of_no_terms():
    np.testing.assert_array_equal(sum_in_order(np.zeros((3, 0, 4), np.float32), 1), np.zeros((3, 4)))
