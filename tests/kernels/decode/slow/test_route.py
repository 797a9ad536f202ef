"""The kernel of routing chooses and weighs as `layers.router.route`."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels.decode.route import route_rows
from moe_jax.layers.router import route
from tests.helpers import seeds
from tests.helpers.compiled_steps import whole

TOKENS, EXPERTS, K = 4, 256, 3


@pytest.mark.parametrize("divide_by_sum", [True, False])
def test_choice(divide_by_sum):
    rng = seeds.rng()
    splits = rng.integers(-4, 4, size=(2, TOKENS, EXPERTS)).astype(np.float32)  # many equal sums
    valid = np.asarray([True, True, False, True])
    found = whole(route_rows)(jnp.asarray(splits), jnp.asarray(valid), k=K, divide_by_sum=divide_by_sum)
    expected = whole(route)(jnp.asarray(splits.sum(axis=0)), K, divide_by_sum)
    np.testing.assert_allclose(found.weights[:, :K], expected.weights, rtol=1e-5)
    np.testing.assert_array_equal(found.experts[valid, :K], expected.experts[valid])
    np.testing.assert_array_equal(found.experts[~valid], EXPERTS)
    is_chosen = np.zeros((TOKENS, EXPERTS), int)
    np.put_along_axis(is_chosen, np.asarray(expected.experts), 1, axis=1)
    np.testing.assert_array_equal(found.is_chosen, is_chosen * valid[:, None])
