"""Biases that balance: moved by the whole batch's load once a step, by nothing else, and kept in checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.checkpoint.training import TrainingCheckpoints
from moe_jax.layers.router import ExpertBias
from moe_jax.train import LossWeights, NextToken, init_state, make_optimizer, make_train_step
from moe_jax.train.objective import move_expert_bias
from moe_jax.train.rebalance import move_experts
from tests.helpers import seeds, tiny
from tests.train.slow.test_step import make_batch

RATE = np.float32(0.01)


@pytest.fixture(scope="module")
def trained():
    """(state, metrics) after a step of four micro-batches that learns of the sequence loss alone."""
    batch, model, optimizer = make_batch(seeds.rng(__name__)), tiny.biased_model(), make_optimizer(1e-2)
    batch["loss_mask"] = jnp.zeros_like(batch["loss_mask"])
    graph, state = nnx.graphdef(model), init_state(model, optimizer)
    objective = NextToken(LossWeights(sequence_loss_coef=0.5), expert_bias_update_rate=float(RATE))
    return make_train_step(graph, optimizer, objective, gradient_accumulation=4, remat=False)(state, batch)


def biases(state) -> np.ndarray:
    """[moe_layers, experts]"""
    return np.concatenate([np.asarray(bias) for bias in jax.tree.leaves(state.expert_bias)])


def test_a_step_moves_each_bias_by_the_sign_of_the_batchs_error(trained):
    state, metrics = trained
    load = np.asarray(metrics["expert_load"], np.float64)
    assert (load.sum(axis=1) == 4 * 9 * 2).all()
    expected = RATE * np.sign(load.mean(axis=1, keepdims=True) - load).astype(np.float32)
    np.testing.assert_array_equal(biases(state), expected)
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(metrics["expert_bias_range"], np.stack([expected.min(axis=1), expected.max(axis=1)], axis=1))


def test_the_sequence_loss_reaches_the_router(trained):
    _, metrics = trained
    # Each of two layers has 1 for an even load.
    assert metrics["sequence_loss"] > 1.5 and metrics["grad_norm"] > 1e-5
    np.testing.assert_allclose(metrics["total_loss"], 0.5 * metrics["sequence_loss"], rtol=1e-6)


def test_experts_that_change_places_take_their_biases_along(trained):
    state, _ = trained
    before, orders = biases(state), np.asarray([[2, 0, 3, 1], [0, 3, 2, 1]])
    moved = move_experts(jax.tree.map(lambda x: x.copy(), state), tiny.biased_model().config, orders)
    np.testing.assert_array_equal(biases(moved), np.take_along_axis(before, orders, axis=1))


def test_a_checkpoint_keeps_them(trained, tmp_path):
    state, _ = trained
    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(1, state, {})
    fresh = init_state(tiny.biased_model(), make_optimizer(1e-2))
    assert not biases(fresh).any()
    np.testing.assert_array_equal(biases(checkpoints.restore(1, fresh)), biases(state))
    checkpoints.close()


def test_they_are_f32_in_a_model_of_bf16():
    model = tiny.biased_model(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    assert biases(init_state(model, make_optimizer(1e-2))).dtype == np.float32


def test_rate_zero_leaves_them_and_a_model_without_has_none(trained):
    state, metrics = trained
    assert move_expert_bias(state.expert_bias, metrics["expert_load"], 0) is state.expert_bias
    without = init_state(tiny.model(), make_optimizer(1e-2))
    assert not jax.tree.leaves(without.expert_bias)
    assert move_expert_bias(without.expert_bias, metrics["expert_load"], 0.1) is without.expert_bias


def test_biases_for_some_of_the_layers_are_refused(trained):
    half = jax.tree.map(lambda bias: bias[:1], trained[0].expert_bias)
    with pytest.raises(ValueError, match="biases for 1 of its 2 layers"):
        move_expert_bias(half, jnp.ones((2, 4), jnp.int32), 0.1)


def test_each_stage_takes_the_load_of_its_own_layers():
    """Twelve stages: in the order of their numbers, not of their names."""
    flat = [(("stages", i, "mlp", "router", "expert_bias"), ExpertBias(jnp.zeros((1, 2)))) for i in range(12)]
    load = np.asarray([[i % 2, 1 - i % 2] for i in range(12)])
    moved = move_expert_bias(nnx.from_flat_state(flat), jnp.asarray(load), 1.0)
    for path, bias in nnx.to_flat_state(moved):
        np.testing.assert_array_equal(bias[...], 1 - 2 * load[path[1]][None])


def test_the_choice_follows_a_bias_and_no_gradient_does():
    tokens = jnp.asarray(seeds.rng().integers(0, 264, (2, 9)))
    graph, params, bias = nnx.split(tiny.biased_model(), nnx.Param, ExpertBias)

    @jax.jit
    def gradient_and_load(bias):
        def total(bias):
            states = nnx.merge(graph, params, bias).hidden_states(tokens)
            return states.hidden.sum(), states.router.expert_load

        return jax.grad(total, has_aux=True)(bias)

    for lift in (0.0, 2.0):
        gradient, load = gradient_and_load(jax.tree.map(lambda b, lift=lift: b.at[:, 3].set(lift), bias))
        assert all(not leaf.any() for leaf in jax.tree.leaves(gradient))
        assert (load[:, 3] == 18).all() == (lift > 0)
