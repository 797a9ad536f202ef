"""Experts that change places change nothing else: logits, losses and the next steps stay."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.layers.router import ExpertBias
from moe_jax.train import LossWeights, NextToken, init_state, make_optimizer, make_train_step
from moe_jax.train.rebalance import move_experts, rebalance
from tests.helpers import seeds, tiny
from tests.train.slow.test_step import make_batch

CONFIG = nnx.eval_shape(tiny.model).config


def start(dtype="float32"):
    """(graph, optimizer, state before the first step)."""
    model, optimizer = tiny.model(param_dtype=dtype), make_optimizer(1e-2)
    return nnx.graphdef(model), optimizer, init_state(model, optimizer)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
def test_training_goes_on_as_if_nothing_had_happened(dtype):
    graph, optimizer, state = start(dtype)
    step = make_train_step(graph, optimizer, NextToken(LossWeights(z_loss_coef=0.1)))
    batch = make_batch(seeds.rng())
    state, _ = step(state, batch)
    rng = seeds.rng()
    orders = np.stack([rng.permutation(4) for _ in range(2)])
    moved = move_experts(jax.tree.map(lambda x: x.copy(), state), CONFIG, orders)
    state, metrics = step(state, batch)
    moved, moved_metrics = step(moved, batch)
    np.testing.assert_allclose(moved_metrics["total_loss"], metrics["total_loss"], rtol=1e-5)
    np.testing.assert_allclose(moved_metrics["grad_norm"], metrics["grad_norm"], rtol=1e-4)
    load = np.take_along_axis(np.asarray(metrics["expert_load"]), orders, axis=1)
    np.testing.assert_array_equal(moved_metrics["expert_load"], load)
    back = move_experts(moved, CONFIG, np.argsort(orders, axis=1))
    for ours, theirs in zip(jax.tree.leaves(back.params), jax.tree.leaves(state.params), strict=True):
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        # AdamW divides a gradient by its own size: where it is next to nothing, f32's noise moves the weight by a step.
        assert np.linalg.norm(ours - theirs) < 1e-2 * np.linalg.norm(theirs)


def test_rebalance_evens_out_the_devices():
    state = start()[2]
    gate_up = np.asarray(state.params["stages"][0]["mlp"]["experts"]["gate_up_proj"])
    state, orders = rebalance(state, CONFIG, np.asarray([[9, 8, 1, 2], [9, 8, 1, 2]]), 2)
    np.testing.assert_array_equal(orders, [[0, 2, 1, 3], [1, 3, 0, 2]])
    moved = np.asarray(state.params["stages"][0]["mlp"]["experts"]["gate_up_proj"])
    np.testing.assert_array_equal(moved, np.take_along_axis(gate_up, orders[:, :, None, None], axis=1))


@pytest.mark.parametrize("devices", [4, 8])
def test_busiest_experts_are_spread(monkeypatch, devices):
    """The busiest experts of all layers do not meet in one place."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=4, num_experts=16)
    monkeypatch.setattr("moe_jax.train.rebalance.move_experts", lambda state, *_: state)
    load = np.tile(1 / np.arange(1, 17), (4, 1))
    _, orders = rebalance(None, config, load, devices)
    places = np.argmax(np.take_along_axis(load, orders, axis=1), axis=1)
    assert len(set(places * devices // 16)) == 4


def test_a_layer_that_is_even_stays_as_it_is(monkeypatch):
    monkeypatch.setattr("moe_jax.train.rebalance.move_experts", lambda state, *_: state)
    _, orders = rebalance(None, CONFIG, np.asarray([[9, 8, 1, 2], [1, 2, 2, 1]]), 2)
    np.testing.assert_array_equal(orders, [[0, 2, 1, 3], [0, 1, 2, 3]])


@pytest.mark.parametrize("load", [np.ones(4), np.ones((0, 4)), np.ones((2, 6))])
def test_loads_of_another_model_are_refused(load):
    with pytest.raises(ValueError, match=r"expert_load must be \[moe_layers, experts\] = \[2, 4\]; got"):
        rebalance(None, CONFIG, load, 2)


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="the model has no experts"):
        rebalance(None, tiny.dense().config, np.ones((0, 0)), 2)


def test_groups_and_mtp_modules_compute_the_same():
    model, tokens = tiny.deepseek(mtp=1), jnp.arange(16)[None]
    graph, config, logits = nnx.graphdef(model), model.config, nnx.jit(lambda model: model(tokens).logits)
    before = logits(model)
    assert len(config.routed_layers) == 3
    load = seeds.rng().integers(0, 100, (3, 8))
    state, orders = rebalance(init_state(model, make_optimizer(1e-2)), config, load, 2)
    moved = nnx.merge(graph, state.params, state.expert_bias)
    np.testing.assert_allclose(logits(moved), before, atol=1e-5)
    back = move_experts((state.params, state.expert_bias), config, np.argsort(orders, axis=1))
    began = tiny.deepseek(mtp=1)
    began = nnx.state(began, nnx.Param), nnx.state(began, ExpertBias)
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(began), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "orders, message",
    [
        ([[0, 1, 2, 3]], r"must be \[moe_layers, experts\] = \[2, 4\]; got \[1, 4\]"),
        ([[0, 0, 1, 2]] * 2, "permutation"),
        ([[0.0, 1.0, 2.0, 3.0]] * 2, "permutation of the experts, in integers"),
    ],
)
def test_wrong_orders_are_refused(orders, message):
    state = start()[2]
    with pytest.raises(ValueError, match=message):
        move_experts(state, CONFIG, np.asarray(orders))


def test_orders_that_part_a_group_are_refused():
    model = tiny.deepseek()
    with pytest.raises(ValueError, match="experts of each of the router's 4 groups must stay neighbours"):
        move_experts(nnx.state(model), model.config, np.asarray([[0, 2, 1, 3, 4, 5, 6, 7]] * 2))
