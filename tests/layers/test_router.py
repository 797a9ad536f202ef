"""Routing and its losses equal their formulas, with their gradients."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.config.specs import TINY, RouterRule
from moe_jax.layers.balance import Sequences
from moe_jax.layers.router import (
    balanced_expert_ids,
    load_balancing_loss,
    load_balancing_loss_per_layer,
    route,
    route_by_groups,
    router_z_loss,
    sequence_balance_loss,
)
from moe_jax.layers.router_sums import RouterSums
from tests.helpers import seeds
from tests.helpers.compiled_steps import whole

DEEPSEEK = RouterRule("sigmoid", added_to_sum=TINY)


def statistics(logits, k, valid):
    """Sums of a stack of layers' logits [layers, tokens, experts]."""
    compiled = jax.jit(route, static_argnums=(1, 2))
    sums = RouterSums.stack([compiled(jnp.asarray(layer, jnp.float32), k, True, valid).sums for layer in logits])
    assert sums.num_tokens == (logits.shape[1] if valid is None else valid.sum()) and sums.num_sequences == 0
    return sums


@pytest.mark.parametrize(
    "num_layers, tokens, experts, k",
    [(1, 1, 2, 1), (3, 9, 6, 2), (2, 5, 3, 3)],
    ids=["one token", "a few of the experts", "all experts"],
)
@settings(max_examples=7, deadline=None)
@given(preferred=st.sampled_from([0.0, 5.0]), seed=st.integers(0, 2**31))
def test_losses(num_layers, tokens, experts, k, preferred, seed):
    """They equal their formulas written as loops, also where all tokens prefer one expert and some expert has no token."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_layers, tokens, experts))
    logits[:, :, -1] += preferred
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
    np.testing.assert_allclose(stats.entropy_sum, entropy, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(stats.expert_load.sum(1), [valid.sum() * k] * num_layers)


def test_balancing_gradient():
    """The gradient equals the gradient of the probabilities under fixed choices."""
    rng = seeds.rng()
    logits = jnp.asarray(rng.normal(size=(1, 12, 5)), jnp.float32)
    gradient = jax.jit(jax.grad(lambda x: load_balancing_loss(RouterSums.stack([route(x[0], 2, True).sums]))))(logits)
    load = np.asarray(statistics(logits, 2, None).expert_load[0], np.float64) / 12
    p = np.asarray(jax.nn.softmax(logits[0]), np.float64)
    expected = 5 / 12 * p * (load - (p * load).sum(1, keepdims=True))
    np.testing.assert_allclose(gradient[0], expected, atol=1e-6)
    assert np.abs(expected).max() > 1e-4


def test_even_load_gives_k():
    stats = replace(statistics(np.zeros((2, 12, 4)), 2, None), expert_load=jnp.full((2, 4), 6))
    assert float(load_balancing_loss(stats)) == 2.0


def test_weights():
    """Weights are the softmax over all experts, and sum to 1 only if asked."""
    logits = jnp.asarray(seeds.rng().normal(size=(7, 6)), jnp.bfloat16)
    plain, normed = (whole(route)(logits, 3, norm) for norm in (False, True))
    p = jax.nn.softmax(logits.astype(jnp.float32))
    np.testing.assert_array_equal(plain.weights, jax.lax.top_k(p, 3)[0])
    np.testing.assert_allclose(normed.weights.sum(1), 1, rtol=1e-6)
    assert plain.weights.dtype == jnp.float32


def test_replay():
    """Replay weights the given experts by the live logits."""
    logits = jnp.asarray(seeds.rng().normal(size=(5, 6)), jnp.float32)
    chosen = jnp.asarray([[5, 0]] * 5)
    replayed = whole(route)(logits, 2, False, expert_ids=chosen)
    np.testing.assert_array_equal(replayed.weights, jax.nn.softmax(logits)[:, jnp.array([5, 0])])
    np.testing.assert_array_equal(replayed.sums.expert_load, [5, 0, 0, 0, 0, 5])


@pytest.mark.parametrize("rule, norm", [(None, True), (DEEPSEEK, True), (replace(DEEPSEEK, scoring_func="softmax"), False)])
def test_replayed_ids_of_no_expert_add_nothing(rule, norm, rng):
    """The weights, the load and the gradient equal those for the token's other ids, and zeros without any."""
    logits, factors = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32), jnp.asarray(rng.normal(size=(4, 2)), jnp.float32)

    def replayed(logits, ids):
        if rule is None:
            return route(logits, 2, norm, expert_ids=ids)
        return route_by_groups(logits, 2, replace(rule, norm_topk_prob=norm), expert_ids=ids)

    @jax.jit
    def results(ids):
        def of(logits):
            routing = replayed(logits, ids)
            return jnp.sum(factors[:, : ids.shape[1]] * routing.weights), routing

        of_logits, routing = jax.grad(of, has_aux=True)(logits)
        return routing.weights, routing.sums.expert_load, of_logits

    single, _, of_single = results(jnp.asarray([[2], [1], [0], [5]]))
    pair, _, of_pair = results(jnp.asarray([[0, 1], [3, 1], [0, 1], [0, 1]]))
    for outside in (-1, -6, 6, 2**31 - 1):
        weights, load, of_logits = results(jnp.asarray([[2, outside], [3, 1], [outside, outside], [5, outside]]))
        np.testing.assert_array_equal(load, [0, 1, 1, 1, 0, 1])
        np.testing.assert_allclose(weights, [[single[0, 0], 0], pair[1], [0, 0], [single[3, 0], 0]], rtol=1e-6)
        wanted = jnp.stack([of_single[0], of_pair[1], jnp.zeros(6), of_single[3]])
        # The only weight of a token is 1 for all logits: its gradient is 0 but for the rounding of products near 1.
        np.testing.assert_allclose(of_logits, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint32"])
def test_replayed_ids_have_any_integer_dtype(dtype):
    logits = jnp.asarray(seeds.rng().normal(size=(3, 128)), jnp.float32)
    ids = np.asarray([[0, 127], [5, 6], [127, 1]])
    for f, how in ((route, True), (route_by_groups, DEEPSEEK)):
        routing = whole(f)(logits, 2, how, expert_ids=jnp.asarray(ids, dtype))
        np.testing.assert_array_equal(routing.experts, ids)
        assert routing.experts.dtype == jnp.int32 and int(routing.sums.expert_load[127]) == 2


@pytest.mark.parametrize("tokens, k, experts", [(16, 3, 8), (5, 2, 7), (1, 4, 4), (128, 8, 128)])
def test_balanced_ids(tokens, k, experts):
    """They are distinct for a token, and even over experts."""
    ids = np.asarray(balanced_expert_ids(tokens, k, experts))
    assert all(len(set(row)) == k for row in ids)
    load = np.bincount(ids.ravel(), minlength=experts)
    assert load.max() - load.min() <= 1


def test_the_losses_take_one_layers_routing():
    logits = jnp.asarray(seeds.rng().normal(size=(9, 5)), jnp.float32)
    valid = jnp.arange(9) < 7
    routing = whole(route)(logits, 2, True, valid)
    stats = RouterSums.stack([routing.sums])
    assert stats.num_tokens == 7
    for loss in (load_balancing_loss, load_balancing_loss_per_layer, router_z_loss, sequence_balance_loss):
        np.testing.assert_allclose(loss(routing), loss(stats), rtol=1e-6)
        np.testing.assert_array_equal(loss(routing), loss(routing.sums))
    assert float(whole(route)(logits, 2, True).sums.num_tokens) == 9


def test_sums_of_micro_batches_add_up():
    """Adding two halves gives the sums of the whole, field by field; so does `psum`, and adding stacked layers."""
    logits = jnp.asarray(seeds.rng().normal(size=(10, 5)), jnp.float32)
    ids = jnp.asarray([[1, 1, 2, 2, 2], [3, 3, 3, 0, 0]])
    sums_of = jax.jit(lambda logits, ids: route(logits, 2, True, Sequences.of(ids)).sums)
    halves, all_sums = [sums_of(logits[5 * i : 5 * i + 5], ids[i : i + 1]) for i in range(2)], sums_of(logits, ids)
    # Each call made one round of its own.
    all_sums = replace(all_sums, num_rounds=jnp.int32(2))
    close = partial(np.testing.assert_allclose, rtol=1e-5)
    close(all_sums.num_sequences, 3)
    assert all_sums.num_tokens == 8 and all_sums.sequence_balance_sum > 0
    jax.tree.map(close, halves[0] + halves[1], all_sums)
    stacks = [RouterSums.stack([half, half]) for half in halves]
    jax.tree.map(close, stacks[0] + stacks[1], RouterSums.stack([all_sums, all_sums]))
    on_devices = jax.tree.map(lambda *a: jnp.stack(a), *halves)
    summed = jax.jit(jax.vmap(lambda sums: sums.psum("device"), axis_name="device"))(on_devices)
    jax.tree.map(close, jax.tree.map(lambda a: a[0], summed), all_sums)


def test_stages_layers_are_joined():
    """The counts of the call stay single numbers; all else has the layers of both stages."""
    logits = jnp.asarray(seeds.rng().normal(size=(3, 6, 5)), jnp.float32)
    layers = [whole(route)(layer, 2, True).sums for layer in logits]
    joined = RouterSums.concatenate([RouterSums.stack(layers[:1]), RouterSums.stack(layers[1:])])
    jax.tree.map(np.testing.assert_array_equal, joined, RouterSums.stack(layers))
    assert joined.expert_load.shape == (3, 5) and joined.num_tokens.shape == ()


def test_sums_of_no_layer():
    """A model without experts has the counts alone."""
    none, one = RouterSums.of_no_layer(3), whole(route)(jnp.zeros((3, 5)), 2, True).sums
    none = none.with_counts(jnp.array([True, False, True]), None)
    assert none.num_tokens == 2 and none.num_sequences == 0 and none.expert_load.shape == (0, 0)
    assert load_balancing_loss(none) == 0 and router_z_loss(none) == 0
    for a, b in zip(jax.tree.leaves(none)[:-2], jax.tree.leaves(one)[:-2], strict=True):
        assert a.dtype == b.dtype and a.shape[0] == 0 and a.ndim == b.ndim + 1
