"""GShard's options against algorithm 1 of its paper, written as a loop."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.experimental.gshard import drop_over_capacity, gshard_loss, random_second_expert
from moe_jax.layers.router import route
from tests.helpers import seeds

compiled_route = jax.jit(route, static_argnums=(1, 2))
compiled_drop = jax.jit(drop_over_capacity, static_argnames=("num_groups", "capacity"))


def routing_of(k=2, valid=None):
    """A routing of 24 random tokens that prefer low ones of 4 experts, and its logits."""
    logits = seeds.rng().normal(size=(24, 4)) - np.arange(4)
    return compiled_route(jnp.asarray(logits, jnp.float32), k, True, valid), logits


@pytest.mark.parametrize("k", [1, 2, 3])
def test_capacity(k):
    """Experts take first choices before second ones, and no more than their capacity."""
    valid = seeds.rng().random(24) < 0.8
    before, _ = routing_of(k=k, valid=jnp.asarray(valid))
    after = compiled_drop(before, num_groups=3, capacity=2, valid=jnp.asarray(valid))
    expected, load, dropped = np.array(before.weights), np.zeros(4, int), 0
    for group in range(3):
        taken = np.zeros(4, int)
        for choice in range(k):
            for t in range(8 * group, 8 * group + 8):
                expert = int(before.experts[t, choice])
                if not valid[t]:
                    continue
                if taken[expert] == 2:
                    expected[t, choice] = 0
                    dropped += 1
                    continue
                taken[expert] += 1
        load += taken
    np.testing.assert_array_equal(after.weights, expected)
    np.testing.assert_array_equal(after.sums.expert_load, load)
    assert after.sums.num_dropped == dropped > 0
    np.testing.assert_array_equal(after.experts, before.experts)


def test_second_expert():
    """A second expert is taken with twice its weight as probability."""
    weights = jnp.tile(jnp.asarray([[0.6, 0.4], [0.9, 0.1], [0.5, 0.5], [0.75, 0.25]]), (2000, 1))
    before = routing_of()[0]._replace(weights=weights, experts=jnp.tile(jnp.asarray([[1, 0]]), (8000, 1)))
    before = before._replace(sums=replace(before.sums, expert_load=jnp.asarray([8000, 8000, 0, 0])))
    after = jax.jit(random_second_expert)(before, jax.random.key(0))
    taken = np.asarray(after.weights[:, 1] > 0).reshape(2000, 4)
    np.testing.assert_allclose(taken.mean(axis=0), [0.8, 0.2, 1, 0.5], atol=0.04)
    np.testing.assert_array_equal(after.weights, jnp.where(after.weights > 0, weights, 0))
    np.testing.assert_array_equal(after.weights[:, 0], weights[:, 0])
    np.testing.assert_array_equal(after.sums.expert_load, [taken.sum(), 8000, 0, 0])


def test_a_second_expert_left_out_takes_no_place():
    before = routing_of()[0]._replace(weights=jnp.tile(jnp.asarray([[1.0, 0.0]]), (24, 1)))
    before = before._replace(experts=jnp.tile(jnp.asarray([[1, 0]]), (24, 1)))
    after = compiled_drop(before, num_groups=1, capacity=24)
    np.testing.assert_array_equal(after.weights, before.weights)
    assert after.sums.num_dropped == 0


def test_the_loss_counts_first_choices():
    valid = seeds.rng().random(24) < 0.7
    routing, logits = routing_of(valid=jnp.asarray(valid))
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    c = np.bincount(np.argmax(p[valid], axis=1), minlength=4) / valid.sum()
    np.testing.assert_allclose(gshard_loss(routing, jnp.asarray(valid)), (c * p[valid].mean(axis=0)).mean(), rtol=1e-5)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="2 experts per token; got 3"):
        random_second_expert(routing_of(k=3)[0], jax.random.key(0))
    with pytest.raises(ValueError, match="num_groups=5 must divide the 24 tokens"):
        drop_over_capacity(routing_of()[0], num_groups=5, capacity=1)
    with pytest.raises(ValueError, match="capacity must be at least 1; got 0"):
        drop_over_capacity(routing_of()[0], num_groups=1, capacity=0)
