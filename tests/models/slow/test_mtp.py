"""Modules that predict further tokens: values and every gradient of the paper's equations, and documents kept apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.layers.router import ExpertBias
from moe_jax.layers.segments import has_successor, shift_left
from moe_jax.models.execution import Execution
from moe_jax.models.forward import Carry, PerLayer, layer_inputs, run_stage
from moe_jax.train import LossWeights, loss
from tests.helpers import seeds, tiny

SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 2, 0], [3, 3, 3, 3, 3, 3, 3, 3]])


def make_batch(rng):
    positions = np.array([[0, 1, 2, 3, 4, 0, 1, 0], np.arange(8)])
    tokens = rng.integers(0, 264, SEGMENTS.shape)
    # The token after the second row's last token is not in the row.
    labels = np.append(tokens[:, 1:], rng.integers(0, 264, (2, 1)), axis=1)
    mask = np.append(SEGMENTS[:, 1:] == SEGMENTS[:, :-1], [[False], [True]], axis=1) & (SEGMENTS != 0)
    mask &= rng.random(mask.shape) < 0.8
    arrays = dict(tokens=tokens, labels=labels, loss_mask=mask, positions=positions, segment_ids=SEGMENTS)
    return {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}


def rms_norm(x, weight, eps=1e-6):
    return weight * x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def chain_by_hand(model, batch):
    """The mean over modules of equation 24 times the labels, by document; only the decoder layers come from the model."""
    embedding, head = model.embed_tokens.weight[...], model.head_weight
    main = model.hidden_states(batch["tokens"], batch["positions"], batch["segment_ids"]).hidden
    total = 0.0
    for row in range(2):
        for document in sorted({*SEGMENTS[row]} - {0}):
            at = np.flatnonzero(SEGMENTS[row] == document)
            tokens, labels, mask = (batch[name][row, at] for name in ("tokens", "labels", "loss_mask"))
            hidden = main[row, at]
            for k in (1, 2):
                if len(at) <= k:
                    break
                module = jax.tree.map(lambda x: x[0], nnx.state(predictor(model, k)))
                weight = {name: module[name]["weight"][...] for name in ("enorm", "hnorm", "eh_proj", "norm")}
                # Equation 21 for i = 1 to T - k, with the embedding in front as in the published weights.
                e = rms_norm(embedding[tokens[k:]], weight["enorm"])
                h = rms_norm(hidden[:-1], weight["hnorm"])
                joined = jnp.concatenate([e, h], axis=1) @ weight["eh_proj"].T
                hidden = rms_norm(layer_alone(model, k, joined), weight["norm"])
                log_probabilities = jax.nn.log_softmax(hidden @ head.T)
                picked = jnp.take_along_axis(log_probabilities, labels[k:, None], axis=1)[:, 0]
                total -= (mask[k:] * picked).sum() / 2
    return total


def predictor(model, k):
    return model.stages[len(model.config.stages) + k - 1]


def layer_alone(model, k, x):
    """The decoder layer of module k on one document [seq, hidden]."""
    ids = jnp.ones((1, len(x)), jnp.int32)
    inputs = layer_inputs(model.config, None, ids, ids != 0)
    carry, _ = run_stage(predictor(model, k).block, 0, inputs, PerLayer(jnp.zeros(1, int)), Carry(x[None], None), Execution())
    return carry.x[0]


def with_random_norms(model, rng):
    """Norms that are not 1, so that swapping them would show."""
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if "norm" in str(path[-2]):
            leaf[...] = jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), leaf.dtype)
    return model


@pytest.mark.thorough
def test_two_modules():
    """Value and every gradient equal the paper's equations, for labels that have weights."""
    rng = seeds.rng()
    with jax.enable_x64(True):
        batch = make_batch(rng)
        batch["loss_mask"] = jnp.asarray(batch["loss_mask"] * rng.uniform(0.1, 3, SEGMENTS.shape), jnp.float32)
        model = with_random_norms(tiny.deepseek(mtp=2, layers=1, dtype=jnp.float64), rng)
        graph, params, biases = nnx.split(model, nnx.Param, ExpertBias)

        def ours(params):
            model = nnx.merge(graph, params, biases)
            model.execution = Execution(remat=True)
            total, parts = loss(model, batch, LossWeights(mtp_loss_coef=0.3))
            return parts.mtp_cross_entropy, (total, parts)

        def by_hand(params):
            return chain_by_hand(nnx.merge(graph, params, biases), batch)

        (value, (total, parts)), gradients = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
        expected, expected_gradients = jax.jit(jax.value_and_grad(by_hand))(params)
        np.testing.assert_allclose(value, expected, rtol=1e-10)
        np.testing.assert_allclose(
            total, (parts.cross_entropy + 0.3 * value) / np.float64(batch["loss_mask"]).sum(), rtol=1e-12
        )
        # The shared embedding and head and the model's own layers are among these.
        for (path, a), b in zip(nnx.to_flat_state(gradients), jax.tree.leaves(expected_gradients), strict=True):
            assert np.abs(b).max() > 0, path
            np.testing.assert_allclose(a[...], b, rtol=1e-6, atol=1e-11, err_msg=str(path))
        counted = [has_successor(jnp.asarray(SEGMENTS), k).sum() for k in (1, 2)]
        np.testing.assert_array_equal(parts.router.expert_load.sum(axis=1), 2 * np.array(counted))


def test_documents_are_apart():
    """Another document's tokens change nothing."""
    rng = seeds.rng()
    batch, model = make_batch(rng), tiny.deepseek(mtp=2, layers=1)
    other = {**batch, "tokens": jnp.where(SEGMENTS == 2, rng.integers(0, 264, SEGMENTS.shape), batch["tokens"])}

    @jax.jit
    def further(batch):
        arguments = batch["tokens"], batch["positions"], batch["segment_ids"]
        return model.mtp_hidden_states(model.hidden_states(*arguments).hidden, *arguments)

    for k, (one, two) in enumerate(zip(further(batch), further(other), strict=True), start=1):
        counted = np.asarray(has_successor(jnp.asarray(SEGMENTS), k))
        others = counted & (SEGMENTS != 2)
        np.testing.assert_array_equal(one.hidden[others], two.hidden[others])
        assert one.router.num_tokens == counted.sum() and one.router.expert_load.sum() == 2 * counted.sum()


def test_without_a_factor_modules_are_not_run():
    batch = make_batch(seeds.rng())
    graph, state = nnx.split(nnx.eval_shape(lambda: tiny.deepseek(mtp=2)))
    for factor, layers in ((0.0, 2), (0.1, 4)):
        weights = LossWeights(mtp_loss_coef=factor)
        _, parts = jax.eval_shape(lambda state, weights=weights: loss(nnx.merge(graph, state), batch, weights), state)
        assert parts.router.expert_load.shape == (layers, 8)


def test_shift_left_and_has_successor():
    ids = jnp.array([[7, 7, 7, 8, 8, 7, 7, 0, 0]])
    np.testing.assert_array_equal(shift_left(ids, 2), [[7, 8, 8, 7, 7, 0, 0, 0, 0]])
    np.testing.assert_array_equal(has_successor(ids, 1), np.array([[1, 1, 0, 1, 0, 1, 0, 0, 0]], bool))
    np.testing.assert_array_equal(has_successor(ids, 2), np.array([[1, 0, 0, 0, 0, 0, 0, 0, 0]], bool))
    assert not has_successor(jnp.ones((1, 3), jnp.int32), 4).any()


def test_a_module_that_is_not_there_is_named():
    model = tiny.deepseek(mtp=1)
    with pytest.raises(ValueError, match="module must be from 1 to the 1 modules that this model has; got 2"):
        model.predict(2, jnp.zeros((1, 3, 16)), jnp.zeros((1, 3), jnp.int32))
