"""Preference losses in a training step: the reference with adapters off, micro-batches, packing, and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from moe_jax.adapters import without_adapter
from moe_jax.preferences import Preference, PreferenceSettings, reference_log_probs
from moe_jax.preferences.objective import answer_log_probs
from moe_jax.train import init_state, make_train_step
from tests.helpers.adapted_models import small_model, with_adapters
from tests.helpers.examples import make_answers, make_pairs, packed_batch

DPO = PreferenceSettings("dpo", beta=0.3)


@pytest.fixture(scope="module")
def adapted():
    return with_adapters(small_model("qwen3"), targets=("attention",))


def one_step(model, batch, settings, **options):
    """Returns (metrics, gradients as the updates of SGD) of a step that leaves the model's arrays alone."""
    model = nnx.merge(nnx.graphdef(model), jax.tree.map(jnp.copy, nnx.state(model)))
    state = init_state(model, optax.sgd(1.0))
    before = jax.tree.map(np.array, state.params)
    after, metrics = step_of(nnx.graphdef(model), settings, **options)(state, batch)
    return metrics, jax.tree.map(lambda a, b: b - np.asarray(a), after.params, before)


@functools.cache
def step_of(graphdef, settings, **options):
    """Returns a step, traced once for all tests that take it."""
    return make_train_step(graphdef, optax.sgd(1.0), Preference(settings), **options)


def assert_same(one, other, tolerance=1e-5):
    (metrics, gradients), (other_metrics, other_gradients) = one, other
    assert metrics.keys() == other_metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(value, other_metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(other_gradients), strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b) and np.linalg.norm(b) > 0


@pytest.fixture(scope="module")
def pairs():
    return make_pairs()


@pytest.fixture(scope="module")
def batch(pairs):
    """Five pairs; the rows have different numbers of them. Tests with this batch share a program."""
    made = packed_batch(pairs, rows=2, max_examples=3)
    counts = (made["example"] >= 0).sum(axis=1)
    assert counts[0] != counts[1]
    return made


@pytest.mark.parametrize("loss", ["dpo", pytest.param("kto", marks=pytest.mark.thorough)])
def test_adapters_off_are_the_reference(adapted, batch, loss):
    """The step equals one whose batch holds the log-probabilities of the model without adapters."""
    settings = PreferenceSettings(loss, beta=0.3)
    batch = batch if settings.of_pairs else packed_batch(make_answers())
    stored = batch | {"reference_log_probs": nnx.jit(reference_log_probs)(without_adapter(adapted), batch)}
    found = one_step(adapted, batch, settings)
    assert abs(float(found[0]["reward_margin"])) > 1e-4
    assert_same(found, one_step(adapted, stored, settings))


@pytest.mark.parametrize("loss", ["dpo", pytest.param("orpo", marks=pytest.mark.thorough)])
def test_micro_batches(adapted, batch, loss):
    """Two micro-batches with different numbers of pairs give the means over all pairs of the batch."""
    settings = PreferenceSettings(loss, beta=0.3)
    assert_same(one_step(adapted, batch, settings, gradient_accumulation=2), one_step(adapted, batch, settings), 2e-5)


def test_divergence_of_tokens(adapted, batch):
    """`kl` is the mean of log p/p_ref over all tokens of chosen and rejected answers, of all micro-batches."""
    answers = 2 * batch["example"].shape[1]

    @nnx.jit
    def both(model):
        return answer_log_probs(model, batch, answers), reference_log_probs(model, batch)

    policy, reference = both(adapted)
    expected = float((policy.reshape(reference.shape) - reference).sum() / batch["loss_mask"].sum())
    found, _ = one_step(adapted, batch, DPO, gradient_accumulation=2)
    np.testing.assert_allclose(found["kl"], expected, rtol=1e-4)


def test_packing(adapted, pairs, batch):
    """Pairs in rows of their own give what packed pairs give."""
    alone = packed_batch(pairs, rows=5, max_examples=1)
    assert_same(one_step(adapted, alone, DPO), one_step(adapted, batch, DPO))


@pytest.mark.thorough
def test_margin_rises():
    """A few steps of AdamW on adapters of experts part the answers of the same pairs."""
    model = with_adapters(small_model("qwen3_moe"), targets=("attention", "experts"))
    optimizer, batch = optax.adamw(3e-3), packed_batch(make_pairs(4))
    state = init_state(model, optimizer)
    step = make_train_step(nnx.graphdef(model), optimizer, Preference(DPO))
    found = []
    for _ in range(12):
        state, metrics = step(state, batch)
        found.append(metrics)
    assert found[-1]["loss"] < found[0]["loss"] - 0.05
    assert found[-1]["reward_margin"] > found[0]["reward_margin"] + 0.1 and found[-1]["reward_accuracy"] == 1


@pytest.mark.thorough
def test_each_token_of_the_pairs_counts_in_the_load_of_experts():
    """Padding, and the pass of the reference, do not."""
    model, batch, objective = with_adapters(small_model("qwen3_moe")), packed_batch(make_pairs(4)), Preference(DPO)
    load = nnx.jit(lambda model, batch: objective(model, objective.prepare(batch, 1.0))[1]["expert_load"])(model, batch)
    experts, tokens = model.config.experts, (np.asarray(batch["segment_ids"]) != 0).sum()
    assert load.shape == (len(model.config.routed_layers), experts.num_experts)
    assert (load.sum(axis=1) == tokens * experts.num_experts_per_tok).all() and 0 < tokens < batch["segment_ids"].size


def test_refusals(adapted):
    plain, pairs, answers = small_model("qwen3"), packed_batch(make_pairs(2)), packed_batch(make_answers((1, 0)))
    with pytest.raises(ValueError, match=r"compares with a reference model: train adapters .*, or put\s+batch\["):
        one_step(plain, pairs, DPO)
    with pytest.raises(ValueError, match=r"for loss='kto' needs the array\(s\) desirable, kl_tokens"):
        one_step(plain, pairs, PreferenceSettings("kto"))
    with pytest.raises(ValueError, match="needs pairs of answers; the batch has single ones"):
        one_step(adapted, answers, DPO)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(loss="ppo"), "loss='ppo' must be one of dpo, ipo, hinge, orpo, simpo, kto"),
        (dict(beta=0.0), "beta=0.0 must be a number greater than 0"),
        (dict(label_smoothing=0.5), "must be at least 0 and less than 0.5"),
        (dict(loss="ipo", label_smoothing=0.1), "label_smoothing=0.1 is read by loss='dpo' alone, and loss='ipo'"),
        (dict(loss="dpo", desirable_weight=2.0), "desirable_weight=2.0 is read by loss='kto' alone"),
        (dict(aux_loss_coef=-1.0), "aux_loss_coef=-1.0 must be a number of at least 0"),
    ],
)
def test_settings(options, message):
    with pytest.raises(ValueError, match=message):
        PreferenceSettings(**options)
