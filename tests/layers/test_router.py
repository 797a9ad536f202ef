"""Routing and its losses equal their formulas, and the gradients are those of the formulas."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.layers.router import (
    RouterStatistics,
    Routing,
    balanced_expert_ids,
    load_balancing_loss,
    load_balancing_loss_per_layer,
    route,
    router_z_loss,
)


def statistics(logits, k, valid):
    """Statistics of a stack of layers' logits [layers, tokens, experts]."""
    compiled = jax.jit(route, static_argnums=(1, 2))
    layers = [compiled(jnp.asarray(layer, jnp.float32), k, True, valid) for layer in logits]
    num_tokens = logits.shape[1] if valid is None else valid.sum()
    return stacked(layers, num_tokens)


def stacked(layers: list[Routing], num_tokens) -> RouterStatistics:
    """The statistics of layers' routings."""
    of_layers = set(Routing._fields) - {"weights", "experts", "num_tokens"}
    sums = {name: jnp.stack([getattr(layer, name) for layer in layers]) for name in of_layers}
    return RouterStatistics(**sums, num_tokens=jnp.float32(num_tokens), num_sequences=jnp.float32(0))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(2, 6), st.data())
def test_the_losses_equal_their_formulas_written_as_loops(num_layers, tokens, experts, data):
    k = data.draw(st.integers(1, experts))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    logits = rng.normal(size=(num_layers, tokens, experts))
    valid = rng.random(tokens) < 0.7
    valid[0] = True
    fractions, means, z, entropy = np.zeros((num_layers, experts)), np.zeros((num_layers, experts)), 0.0, np.zeros(num_layers)
    for layer in range(num_layers):
        for t in np.flatnonzero(valid):
            p = np.exp(logits[layer, t]) / np.exp(logits[layer, t]).sum()
            fractions[layer, np.argsort(-p)[:k]] += 1 / valid.sum()
            means[layer] += p / valid.sum()
            entropy[layer] -= p @ np.log(p)
            z += np.log(np.exp(logits[layer, t]).sum()) ** 2 / (valid.sum() * num_layers)
    stats = statistics(logits, k, jnp.asarray(valid))
    np.testing.assert_allclose(load_balancing_loss(stats), experts * (fractions.mean(0) * means.mean(0)).sum(), rtol=1e-5)
    np.testing.assert_allclose(load_balancing_loss_per_layer(stats), experts * (fractions * means).sum(1), rtol=1e-5)
    np.testing.assert_allclose(router_z_loss(stats), z, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stats.entropy_sum, entropy, rtol=1e-5)
    np.testing.assert_array_equal(stats.expert_load.sum(1), [valid.sum() * k] * num_layers)


def test_the_balancing_gradient_is_that_of_the_probabilities_under_fixed_choices():
    rng = seeds.rng()
    logits = jnp.asarray(rng.normal(size=(1, 12, 5)), jnp.float32)
    gradient = jax.grad(lambda x: load_balancing_loss(statistics(x, 2, None)))(logits)
    load = np.asarray(statistics(logits, 2, None).expert_load[0], np.float64) / 12
    p = np.asarray(jax.nn.softmax(logits[0]), np.float64)
    expected = 5 / 12 * p * (load - (p * load).sum(1, keepdims=True))
    np.testing.assert_allclose(gradient[0], expected, atol=1e-6)
    assert np.abs(expected).max() > 1e-4


def test_a_perfectly_even_load_gives_k():
    stats = replace(statistics(np.zeros((2, 12, 4)), 2, None), expert_load=jnp.full((2, 4), 6))
    assert float(load_balancing_loss(stats)) == 2.0


def test_weights_are_the_softmax_of_all_experts_and_sum_to_one_only_if_asked():
    logits = jnp.asarray(seeds.rng().normal(size=(7, 6)), jnp.bfloat16)
    plain, normed = route(logits, 3, False), route(logits, 3, True)
    p = jax.nn.softmax(logits.astype(jnp.float32))
    np.testing.assert_array_equal(plain.weights, jax.lax.top_k(p, 3)[0])
    np.testing.assert_allclose(normed.weights.sum(1), 1, rtol=1e-6)
    assert plain.weights.dtype == jnp.float32


def test_replay_weights_the_given_experts_by_the_live_logits():
    logits = jnp.asarray(seeds.rng().normal(size=(5, 6)), jnp.float32)
    chosen = jnp.asarray([[5, 0]] * 5)
    replayed = route(logits, 2, False, expert_ids=chosen)
    np.testing.assert_array_equal(replayed.weights, jax.nn.softmax(logits)[:, jnp.array([5, 0])])
    np.testing.assert_array_equal(replayed.expert_load, [5, 0, 0, 0, 0, 5])


@pytest.mark.parametrize("tokens, k, experts", [(16, 3, 8), (5, 2, 7), (1, 4, 4), (128, 8, 128)])
def test_balanced_ids_are_distinct_for_a_token_and_even_over_experts(tokens, k, experts):
    ids = np.asarray(balanced_expert_ids(tokens, k, experts))
    assert all(len(set(row)) == k for row in ids)
    load = np.bincount(ids.ravel(), minlength=experts)
    assert load.max() - load.min() <= 1


def test_the_losses_take_one_layers_routing():
    logits = jnp.asarray(seeds.rng().normal(size=(9, 5)), jnp.float32)
    valid = jnp.arange(9) < 7
    routing = route(logits, 2, True, valid)
    stats = stacked([routing], 7)
    for loss in (load_balancing_loss, load_balancing_loss_per_layer, router_z_loss):
        np.testing.assert_allclose(loss(routing), loss(stats), rtol=1e-6)
    assert float(route(logits, 2, True).num_tokens) == 9
