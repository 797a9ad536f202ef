"""The loss and the step: masks, accumulation, the balancing losses' gradients, the schedule, what decays."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moe_jax
from moe_jax.layers.router import load_balancing_loss, router_z_loss
from moe_jax.train import LossWeights, NextToken, init_state, loss, make_optimizer, make_train_step, put_batch, warmup_cosine
from tests.helpers import seeds, tiny


def make_batch(rng, rows=4, length=12):
    segments = np.repeat([[1] * 5 + [2] * 4 + [0] * 3], rows, axis=0)
    labelled = np.repeat([[1] * 4 + [0] + [1] * 3 + [0] * 4], rows, axis=0) * (rng.random((rows, length)) < 0.8)
    positions = np.repeat([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]], rows, axis=0)
    arrays = dict(tokens=rng.integers(0, 264, (rows, length)), labels=rng.integers(0, 264, (rows, length)))
    arrays |= dict(loss_mask=labelled, positions=positions, segment_ids=segments)
    return {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}


def loss_and_gradients(batch, aux=0.0, z=0.0):
    graph, params = nnx.split(tiny.model(), nnx.Param)
    return _loss_and_gradients(params, batch, graph, jnp.float32(aux), jnp.float32(z))


@partial(jax.jit, static_argnums=2)
def _loss_and_gradients(params, batch, graph, aux, z):
    """Compiled once for all coefficients."""

    def total(params):
        return loss(nnx.merge(graph, params), batch, LossWeights(aux_loss_coef=aux, z_loss_coef=z))

    return jax.value_and_grad(total, has_aux=True)(params)


@jax.jit
def by_hand(params, batch):
    """Returns sum(weight * loss) / sum(weight) over all logits, and its gradients; compiled once for all weights."""

    def total(params):
        logits = nnx.merge(nnx.graphdef(tiny.model()), params)(batch["tokens"], batch["positions"], batch["segment_ids"]).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return (batch["loss_mask"] * losses).sum() / batch["loss_mask"].sum()

    return jax.value_and_grad(total)(params)


def weighted(batch):
    """The batch with a random weight for each label."""
    weights = batch["loss_mask"] * seeds.rng().uniform(0.01, 0.1, batch["loss_mask"].shape)
    return {**batch, "loss_mask": jnp.asarray(weights, jnp.float32)}


def test_weights_of_labels():
    """The loss and all gradients equal sum(weight * loss) / sum(weight), here with a sum below 1 and all logits."""
    batch = weighted(make_batch(seeds.rng()))
    batch["loss_mask"] /= 2 * batch["loss_mask"].sum()
    (actual, _), gradients = loss_and_gradients(batch)
    expected, expected_gradients = by_hand(nnx.state(tiny.model(), nnx.Param), batch)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), gradients, expected_gradients)


def test_equal_weights_are_no_weights():
    """Weights of 1, and of 2 on all labels, give the bits of a mask of integers."""
    batch = make_batch(seeds.rng())
    (expected, _), expected_gradients = loss_and_gradients(batch, aux=0.5)
    for weight in (1, 2):
        weights = (weight * batch["loss_mask"]).astype(jnp.float32)
        (actual, _), gradients = loss_and_gradients({**batch, "loss_mask": weights}, aux=0.5)
        assert actual == expected
        jax.tree.map(np.testing.assert_array_equal, gradients, expected_gradients)


def test_padding_reaches_neither_loss_nor_any_gradient():
    batch = make_batch(seeds.rng())
    other = {**batch, "tokens": jnp.where(batch["segment_ids"] == 0, 7, batch["tokens"])}
    (one, _), one_gradients = loss_and_gradients(batch, aux=0.5, z=0.1)
    (two, _), two_gradients = loss_and_gradients(other, aux=0.5, z=0.1)
    np.testing.assert_allclose(one, two, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(one_gradients), jax.tree.leaves(two_gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_router_gradient_of_balancing_losses():
    """The router's gradients of both balancing losses equal finite differences."""
    batch = make_batch(seeds.rng())
    batch["loss_mask"] = jnp.zeros_like(batch["loss_mask"])  # nothing but the balancing loss is left
    arguments = (batch["tokens"], batch["positions"], batch["segment_ids"])
    for coefficients, balancing in ((dict(aux=1.0), load_balancing_loss), (dict(z=1.0), router_z_loss)):
        _, gradients = loss_and_gradients(batch, **coefficients)
        gradient = gradients["stages"][0]["mlp"]["router"]["weight"][...]
        assert float(jnp.abs(gradient[1]).max()) > 1e-5
        direction = gradient / jnp.linalg.norm(gradient)
        # The loss near the weights, with fixed choices of experts: they jump, and have no gradient.
        chosen = _states(arguments, None, jnp.zeros_like(gradient)).expert_ids
        above, below = (float(balancing(_states(arguments, chosen, step * direction).router)) for step in (1e-2, -1e-2))
        np.testing.assert_allclose((above - below) / 2e-2, jnp.linalg.norm(gradient), rtol=0.05)


@jax.jit
def _states(arguments, expert_ids, shift):
    """The model's states, with its router's weights shifted."""
    model = tiny.model()
    weight = model.stages[0].mlp.router.weight
    weight.set_value(weight[...] + shift)
    return model.hidden_states(*arguments, expert_ids=expert_ids)


def step_of(**options):
    """Returns a step of plain descent; options as for `make_train_step`."""
    return make_train_step(nnx.graphdef(tiny.model()), optax.sgd(1.0), **options)


def test_micro_batches_without_remat_sum_to_the_big_batch():
    batch = weighted(make_batch(seeds.rng()))
    whole, expected = step_of()(init_state(tiny.model(), optax.sgd(1.0)), batch)
    state, metrics = step_of(gradient_accumulation=4, remat=False)(init_state(tiny.model(), optax.sgd(1.0)), batch)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    assert metrics["num_labels"] == (batch["loss_mask"] != 0).sum()
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-5)
    np.testing.assert_array_equal(metrics["expert_load"], expected["expert_load"])
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_modules_for_further_tokens_must_learn_too():
    model, optimizer = tiny.deepseek(mtp=1), make_optimizer(1e-3)
    step = make_train_step(nnx.graphdef(model), optimizer, NextToken(LossWeights(mtp_loss_coef=0)))
    with pytest.raises(ValueError, match="mtp_loss_coef=0 would leave the model's MTP modules .* give them a factor"):
        step(init_state(model, optimizer), make_batch(seeds.rng()))


@pytest.mark.parametrize("mtp", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_gradients_of_experts_are_added_up_unrounded(mtp):
    """Covers bf16 experts of stages and of a module that predicts further tokens. Their gradients would be rounded to bf16."""
    batch = make_batch(seeds.rng())
    keeps_gradients = optax.GradientTransformation(lambda params: params, lambda grads, state, params: (grads, grads))

    def gradients(model, parts):
        graph = nnx.graphdef(model)
        step = make_train_step(graph, keeps_gradients, gradient_accumulation=parts, remat=False)
        state, _ = step(init_state(model, keeps_gradients), batch)
        return nnx.to_flat_state(state.opt_state)

    config = tiny.deepseek_config(
        num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=4, n_group=1, topk_group=1, num_nextn_predict_layers=mtp
    )
    narrow, wide = (
        moe_jax.from_config(config, rngs=nnx.Rngs(0), dtype=jnp.float32, param_dtype=dtype)
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    nnx.update(wide, jax.tree.map(lambda p: p.astype(jnp.float32), nnx.state(narrow, nnx.Param)))
    experts = 0
    for (path, exact), (_, actual) in zip(gradients(wide, 1), gradients(narrow, 2), strict=True):
        if "experts" in path:
            experts += 1
            size = jnp.linalg.norm(exact[...])
            assert size > 0 and jnp.linalg.norm(actual[...] - exact[...]) < 1e-5 * size, path
            of_chosen_experts = actual[actual[...] != 0]
            assert (of_chosen_experts != of_chosen_experts.astype(jnp.bfloat16)).mean() > 0.5, path
    assert experts == 2 * (1 + mtp)


@pytest.mark.thorough
def test_expert_gradients_in_f64():
    """A model that computes in f64 adds up its experts' gradients in f64."""
    batch, optimizer = make_batch(seeds.rng()), optax.sgd(1.0)
    with jax.enable_x64(True):
        model = tiny.biased_model(dtype=jnp.float64, param_dtype=jnp.float32)
        step = make_train_step(nnx.graphdef(model), optimizer, gradient_accumulation=2, remat=False)
        state, metrics = step(init_state(model, optimizer), batch)
    assert np.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0
    assert {p.dtype.name for p in jax.tree.leaves(state.params)} == {"float32"}


def test_the_schedule_warms_up_and_decays_to_its_floor():
    schedule = warmup_cosine(2.2, steps=110, warmup_steps=10, min_ratio=0.1)
    np.testing.assert_allclose(
        [schedule(0), schedule(4), schedule(10), schedule(60), schedule(110)], [0.2, 1.0, 2.2, 1.21, 0.22]
    )
    np.testing.assert_allclose(warmup_cosine(2.0, steps=10)(0), 2.0)


def test_matrices_decay_and_norms_do_not():
    _, params = nnx.split(tiny.model(), nnx.Param)
    optimizer = make_optimizer(1.0, weight_decay=0.5)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    for path, update in nnx.to_flat_state(updates):
        moved = bool(jnp.abs(update[...]).max() > 0)
        assert moved == (not any("norm" in str(part) for part in path)), path


@pytest.mark.parametrize("other", [np.zeros(()), np.zeros((3, 2))], ids=["no rows", "others"])
def test_arrays_of_a_batch_have_the_same_rows(other):
    with pytest.raises(ValueError, match="all arrays of a batch must be .* the same number of rows; got the shapes"):
        put_batch({"tokens": np.zeros((4, 2), np.int32), "other": other}, nnx.state(tiny.dense()))
