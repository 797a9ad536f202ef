"""Experts loaded in FP8 and multiplied in FP8: as stored or rounded; logits, generation and the engine."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.kernels import Precision, quantise_matrices
from moe_jax.layers.quantised import BlockScaled, is_quantised
from moe_jax.serving.engine import Engine
from moe_jax.serving.request import EngineLimits, SamplingOptions
from moe_jax.serving.strict_log_probs import strict_log_probs
from tests.helpers import seeds
from tests.helpers.checkpoint_helpers import multiplying_in_fp8, write_checkpoint, write_fp8

LIMITS = EngineLimits(max_sequences=1, max_tokens_per_step=16, max_chunks_per_step=1, max_length=64, num_pages=4)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder whose projections are in FP8."""
    folder = tmp_path_factory.mktemp("stored")
    write_fp8(folder)
    return folder


@pytest.fixture(scope="module")
def model(stored):
    return multiplying_in_fp8(stored)


def _run(model, tokens, expert_ids=None):
    """Returns the logits and the experts of all tokens."""
    found = _pass(*nnx.split(model), tokens, expert_ids)
    return np.asarray(found.logits, np.float32), found.expert_ids


@partial(jax.jit, static_argnums=0)
def _pass(graph, state, tokens, expert_ids):
    return nnx.merge(graph, state)(tokens, expert_ids=expert_ids)


def _experts(model):
    experts = model.stages[0].mlp.experts
    return experts.gate_up_proj, experts.down_proj


def test_experts_are_as_stored(stored, model):
    as_stored = from_pretrained(stored, weights="as stored")
    for ours, theirs in zip(_experts(model), _experts(as_stored), strict=True):
        ours, theirs = ours.get_value(), theirs.get_value()
        assert isinstance(ours, BlockScaled)
        np.testing.assert_array_equal(ours.codes.view(jnp.uint8), theirs.codes.view(jnp.uint8))
        np.testing.assert_array_equal(ours.scales, theirs.scales)
    assert not is_quantised(model.stages[0].self_attn.q_proj.weight.get_value())
    experts = nnx.clone(model.stages[0].mlp.experts)
    experts.precision = Precision()
    assert experts.operands.gate_up.values is None, "codes are multiplied as they are"


def test_other_experts_are_rounded(tmp_path):
    write_checkpoint(tmp_path, hidden_size=128, moe_intermediate_size=128, num_hidden_layers=2)
    whole, rounded = (from_pretrained(tmp_path, weights=weights) for weights in ("whole", "fp8"))
    for ours, weights in zip(_experts(rounded), _experts(whole), strict=True):
        expected = quantise_matrices(weights[...])
        np.testing.assert_array_equal(ours.get_value().codes.view(jnp.uint8), expected.values.view(jnp.uint8))
        np.testing.assert_array_equal(ours.get_value().scales, expected.scales)


def test_logits_are_near_the_dequantised(stored, model):
    """Activations alone are rounded in addition; the same experts are chosen, as some choices are nearly equal."""
    tokens = seeds.rng().integers(0, 61, (2, 16))
    expected, experts = _run(from_pretrained(stored), tokens)
    found, _ = _run(model, tokens, experts)
    # Random weights make the experts nearly all of the residual stream, so their error of 6 % shows and grows with each layer.
    assert 1e-4 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.3


# tests/parallel/eight_devices/test_fp8_inference.py does the same on two devices.
@pytest.mark.thorough
def test_generation_and_the_engine(model):
    """Most greedy tokens have the largest logit of a whole pass. A choice of experts, or of a logit, may be close."""
    prompt = seeds.rng().integers(0, 61, 7).tolist()
    engine = Engine(model, limits=LIMITS)
    ((completion,),) = engine.generate([prompt], SamplingOptions(max_new_tokens=9))
    engine.close()
    for tokens in (completion.tokens, moe_jax.generate(model, prompt, max_new_tokens=9)):
        logits, _ = _run(model, np.array([prompt + tokens[:-1]]))
        expected = logits[0, len(prompt) - 1 :].argmax(axis=1)
        assert (expected == tokens).sum() >= 5, (expected, tokens)


def test_the_engine_refuses(stored, model):
    whole = from_pretrained(stored)
    whole.set_precision(Precision())
    with pytest.raises(ValueError, match="load the model with weights='fp8'"):
        Engine(whole, limits=LIMITS)
    for strict in (partial(Engine, model, limits=LIMITS, strict=True), partial(strict_log_probs, whole, jnp.ones((1, 4), int))):
        with pytest.raises(ValueError, match="this model: it multiplies in FP8; use precision 'bf16'"):
            strict()
    model.set_precision(Precision(dense=("attention",)))
    with pytest.raises(ValueError, match="computes dense matrices in the model's dtype"):
        Engine(model, limits=LIMITS)
    model.set_precision(Precision())
