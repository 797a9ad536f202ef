"""DeepSeek's routing equals its definition written as a loop; the bias chooses and does nothing else."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.config.specs import TINY, RouterRule
from moe_jax.layers.moe import MoE
from moe_jax.layers.router import ExpertBias, route_by_groups
from tests.helpers import seeds
from tests.helpers.compiled_steps import whole

DEEPSEEK = RouterRule("sigmoid", added_to_sum=TINY, choice_bias=True)


def definition(logits, k, rule, bias):
    """(weights, experts) of one token, as sets have no order: sorted by expert."""
    scores = 1 / (1 + np.exp(-logits)) if rule.scoring_func == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    preference = scores + bias
    groups = np.split(np.arange(len(logits)), rule.num_groups)
    group_scores = [np.sort(preference[group])[::-1][: rule.group_score_size].sum() for group in groups]
    best = np.argsort(group_scores)[::-1][: rule.groups_per_token]
    allowed = np.concatenate([groups[g] for g in best])
    experts = np.sort(allowed[np.argsort(preference[allowed])[::-1][:k]])
    weights = scores[experts]
    if rule.norm_topk_prob:
        weights = weights / weights.sum()
    return weights * rule.routed_scaling_factor, experts


@pytest.mark.parametrize(
    "num_groups, of_group, groups_per_token, group_score_size, k",
    [(1, 12, 1, 2, 3), (3, 4, 3, 1, 3), (4, 3, 2, 2, 5), (4, 3, 1, 1, 3)],
    ids=["one group", "all groups", "a few of the groups", "all experts of one of the groups"],
)
@settings(max_examples=4, deadline=None)
@given(
    scoring_func=st.sampled_from(["sigmoid", "softmax"]),
    norm_topk_prob=st.booleans(),
    factor=st.sampled_from([1.0, 2.5]),
    size_of_bias=st.sampled_from([0, 0.3]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_definition(
    num_groups, of_group, groups_per_token, group_score_size, k, scoring_func, norm_topk_prob, factor, size_of_bias, seed
):
    rule = RouterRule(scoring_func, num_groups, groups_per_token, group_score_size, norm_topk_prob, factor, TINY)
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(6, num_groups * of_group)).astype(np.float32)
    bias = rng.normal(size=logits.shape[1]).astype(np.float32) * size_of_bias
    valid = rng.random(6) < 0.7
    routing = route_by_groups(jnp.asarray(logits), k, rule, jnp.asarray(bias), jnp.asarray(valid))
    load = np.zeros(logits.shape[1], int)
    for t in range(6):
        weights, experts = definition(logits[t].astype(np.float64), k, rule, bias)
        order = np.argsort(routing.experts[t])
        np.testing.assert_array_equal(routing.experts[t][order], experts)
        np.testing.assert_allclose(routing.weights[t][order], weights, rtol=1e-5)
        load[experts] += valid[t]
    np.testing.assert_array_equal(routing.sums.expert_load, load)
    # Eq. 18 of the DeepSeek-V3 paper: for any scores, a token's probabilities sum to one.
    np.testing.assert_allclose(routing.sums.probability_sum.sum(), valid.sum(), rtol=1e-5, atol=1e-6)


def test_gradients():
    """Gradients reach the logits of the chosen experts alone."""
    rule = replace(DEEPSEEK, num_groups=2, groups_per_token=1, routed_scaling_factor=2.5)
    rng = seeds.rng()
    logits, direction = jnp.asarray(rng.normal(size=(5, 8)), jnp.float32), jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)

    def projected(logits, bias):
        return (route_by_groups(logits, 3, rule, bias).weights * direction).sum()

    of_logits, of_bias = jax.jit(jax.grad(projected, argnums=(0, 1)))(logits, jnp.zeros(8))
    routing = whole(route_by_groups)(logits, 3, rule)
    s = np.asarray(jax.nn.sigmoid(jnp.take_along_axis(logits, routing.experts, axis=1)), np.float64)
    d, total = np.asarray(direction, np.float64), s.sum(1, keepdims=True)
    of_scores = 2.5 * (d / total - (d * s).sum(1, keepdims=True) / total**2)
    expected = np.zeros((5, 8))
    np.put_along_axis(expected, np.asarray(routing.experts), of_scores * s * (1 - s), axis=1)
    np.testing.assert_allclose(of_logits, expected, atol=1e-6)
    np.testing.assert_array_equal(of_bias, 0)


def test_bias_changes_choices_only():
    """A bias changes the choice, and not the weights of a choice."""
    logits = jnp.asarray(seeds.rng().normal(size=(64, 8)), jnp.float32)
    bias = jnp.zeros(8).at[3].set(2.0)
    biased = whole(route_by_groups)(logits, 2, DEEPSEEK, bias)
    assert int(biased.sums.expert_load[3]) == 64
    replayed = whole(route_by_groups)(logits, 2, DEEPSEEK, expert_ids=biased.experts)
    np.testing.assert_array_equal(biased.weights, replayed.weights)


def test_saturated_scores_stay_finite():
    @jax.jit
    @jax.value_and_grad
    def projected(logits):
        routing = route_by_groups(logits, 2, DEEPSEEK)
        return routing.weights.sum() + routing.sums.probability_sum.sum()

    for logit in (-40.0, 200.0):
        assert all(np.isfinite(a).all() for a in projected(jnp.full((3, 4), logit)))


def test_layer():
    """A layer adds its shared experts, and keeps its bias out of the parameters."""
    rule = replace(DEEPSEEK, num_groups=4, groups_per_token=2)
    moe = MoE(16, 8, 8, 2, rule=rule, shared_intermediate_size=24, rngs=nnx.Rngs(1))
    x = jax.random.normal(jax.random.key(seeds.integer()), (5, 16))

    @jax.jit
    def found_and_expected(x):
        y, routing = moe(x)
        return y, moe.experts(x, routing.weights, routing.experts) + moe.shared_experts(x)

    np.testing.assert_allclose(*found_and_expected(x), rtol=1e-6, atol=1e-8)
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(moe, nnx.Param))}
    assert "router.weight" in paths and "router.expert_bias" not in paths
    assert [path for path, _ in nnx.to_flat_state(nnx.state(moe, ExpertBias))] == [("router", "expert_bias")]
