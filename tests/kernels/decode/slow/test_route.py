"""The kernel of routing chooses and weighs as `layers.router.route_by_groups`."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.config import RouterRule
from moe_jax.kernels.decode.route import route_rows
from moe_jax.layers.router import route_by_groups
from tests.helpers import seeds
from tests.helpers.compiled_steps import whole

TOKENS, K = 4, 3

RULES = {
    "Qwen3-MoE's": (RouterRule(), 256),
    "GLM's": (RouterRule("sigmoid", routed_scaling_factor=2.5, added_to_sum=1e-20, choice_bias=True), 160),
    "ERNIE's": (RouterRule(least_sum=0.9, choice_bias=True), 4),
}
"""Rules, and numbers of experts."""


@pytest.mark.parametrize("name", RULES)
def test_choice(name):
    (rule, num_experts), rng = RULES[name], seeds.rng()
    splits = rng.integers(-4, 4, size=(2, TOKENS, num_experts)).astype(np.float32)  # many equal sums
    valid = np.asarray([True, True, False, True])
    # Multiples of 2^-4: sums of a score and a bias are equal only if both are.
    bias = rng.integers(-32, 32, num_experts).astype(np.float32) / 16 if rule.choice_bias else None
    found = whole(route_rows)(jnp.asarray(splits), jnp.asarray(valid), bias, k=K, rule=rule)
    expected = whole(route_by_groups)(jnp.asarray(splits.sum(axis=0)), K, rule, bias)
    np.testing.assert_allclose(found.weights[:, :K], expected.weights, rtol=1e-5)
    np.testing.assert_array_equal(found.experts[valid, :K], expected.experts[valid])
    columns = found.experts.shape[1]
    assert columns == 128 * -(-num_experts // 128)
    np.testing.assert_array_equal(found.experts[~valid], columns)
    is_chosen = np.zeros((TOKENS, columns), int)
    np.put_along_axis(is_chosen, np.asarray(expected.experts), 1, axis=1)
    np.testing.assert_array_equal(found.is_chosen, is_chosen * valid[:, None])
