"""With `strict=True` a token has the same bits in every batch, and the bits of a forward pass over whole sequences."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moe_jax
from moe_jax.serving.engine import Engine
from moe_jax.serving.fused import strict_refusal
from moe_jax.serving.request import EngineLimits, SamplingOptions
from moe_jax.serving.strict_log_probs import strict_log_probs
from tests.helpers import seeds
from tests.serving.slow.test_fused import CONFIG as FUSED_CONFIG
from tests.serving.slow.test_fused import FAMILIES
from tests.serving.slow.test_fused import ONE_LAYER as FUSED_LAYER
from tests.serving.slow.test_fused import _model as random_model

CONFIG = replace(FUSED_CONFIG, vocab_size=128, num_attention_heads=4)
ONE_LAYER = replace(FUSED_LAYER, vocab_size=128, num_attention_heads=4)
"""Thorough tests have both layers of CONFIG. The four heads' output is multiplied in two parts."""


@pytest.fixture(scope="module")
def model():
    return moe_jax.from_config(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def one_layer():
    return moe_jax.from_config(ONE_LAYER, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


@pytest.mark.thorough
def test_whole_sequences(one_layer):
    """A sequence has the same bits next to others and as a prefix, and about the model's log-probabilities."""
    tokens = jnp.asarray(seeds.rng().integers(0, CONFIG.vocab_size, (2, 70)), jnp.int32)
    found = np.asarray(strict_log_probs(one_layer, tokens))
    expected = log_probs_of_modules(one_layer, tokens)
    # Some tokens choose another expert.
    assert np.abs(found - expected).mean() < 0.03
    np.testing.assert_array_equal(strict_log_probs(one_layer, tokens[1:, :8]), found[1:, :7])


@pytest.mark.thorough
def test_many_tokens(model):
    """More tokens than a decoding step has: their plan is another, their bits are not."""
    tokens = jnp.asarray(seeds.rng().integers(0, CONFIG.vocab_size, (4, 70)), jnp.int32)
    found = np.asarray(strict_log_probs(model, tokens))
    np.testing.assert_array_equal(strict_log_probs(model, tokens[3:]), found[3:])


@pytest.mark.thorough
def test_engine(model):
    """Prompts in chunks next to decoding rows: tokens of prompts and new ones have the bits of whole sequences."""
    rng = seeds.rng()
    prompts = [rng.integers(0, CONFIG.vocab_size, length).tolist() for length in (66, 7, 30)]
    with closing(small_engine(model, sequences=2)) as engine:
        check_bits(model, engine, prompts, scores_prompts=True)


@nnx.jit
def log_probs_of_modules(model, tokens):
    return jnp.take_along_axis(nnx.log_softmax(model(tokens).logits[:, :-1]), tokens[:, 1:, None], axis=2)[..., 0]


def small_engine(model, *, sequences, **sizes):
    """With one sequence it has three programs to compile, with two four."""
    limits = EngineLimits(
        max_sequences=sequences,
        max_tokens_per_step=24,
        max_chunks_per_step=2,
        max_length=128,
        num_pages=8,
        max_waiting=4,
        **sizes,
    )
    return Engine(model, limits=limits, strict=True, lazy=True)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "qwen2_moe", "minimax_m2", "ernie4_5_moe"])
def test_families(one_layer, family):
    """A shared expert with and without a gate, biases, one norm for all heads, part of a head's rope, rope of neighbors.

    Each token of a prompt in chunks, and each new token, has the bits of the whole sequence.
    """
    others = {name: replace(FAMILIES[name], vocab_size=128, num_experts=32) for name in FAMILIES}
    model = random_model(0, False, others[family]) if family in others else one_layer
    prompt = seeds.rng().integers(0, CONFIG.vocab_size, 30).tolist()
    options = SamplingOptions(max_new_tokens=2, ignore_eos=True, temperature=1.0, seed=0, logprobs=0, prompt_logprobs=0)
    with closing(small_engine(model, sequences=1)) as engine:
        ((answer,),) = engine.generate([prompt], options)
    of_prompt = [scores[token] for scores, token in zip(answer.prompt_logprobs[1:], prompt[1:], strict=True)]
    tokens = jnp.asarray([prompt + answer.tokens], jnp.int32)
    found = np.float32(of_prompt + answer.logprobs)
    np.testing.assert_array_equal(found, nnx.jit(strict_log_probs)(model, tokens)[0])
    # Some tokens may choose another expert.
    assert np.median(np.abs(found - log_probs_of_modules(model, tokens)[0])) < 0.03


@pytest.mark.thorough
def test_pages_in_fp8(one_layer):
    """Prompts in chunks, new tokens and a cached prefix have the bits of the whole sequence, which has other pages."""
    prompt = seeds.rng().integers(0, CONFIG.vocab_size, 70).tolist()
    options = SamplingOptions(max_new_tokens=2, ignore_eos=True, temperature=1.0, seed=0, logprobs=0)
    with closing(small_engine(one_layer, sequences=1, kv_dtype="fp8")) as engine:
        ((answer,),), ((again,),) = (engine.generate([prompt], options) for _ in range(2))
    assert again.cached_tokens == 64 and again.logprobs == answer.logprobs
    tokens = jnp.asarray([prompt + answer.tokens], jnp.int32)
    in_fp8, whole = (nnx.jit(partial(strict_log_probs, kv_dtype=dtype))(one_layer, tokens)[0] for dtype in ("fp8", "model"))
    np.testing.assert_array_equal(np.float32(answer.logprobs), in_fp8[len(prompt) - 1 :])
    assert not np.array_equal(in_fp8, whole)


# Gradients are compared in test_strict_gradients.py.
@pytest.mark.thorough
def test_update(one_layer):
    """An update by the gradient at a ratio of exactly 1 makes a drawn answer likelier, to the updated model's bits."""
    prompt = seeds.rng().integers(0, CONFIG.vocab_size, 6).tolist()
    options = SamplingOptions(max_new_tokens=2, ignore_eos=True, temperature=1.0, seed=0, logprobs=0)
    with closing(small_engine(one_layer, sequences=1)) as engine:
        ((answer,),) = engine.generate([prompt], options)
        tokens, sampled = jnp.asarray([prompt + answer.tokens], jnp.int32), jnp.asarray(answer.logprobs, jnp.float32)

        # Compiled, like a step of training: its operations alone are hundreds of programs.
        @nnx.jit
        @nnx.value_and_grad
        def objective(model):
            return jnp.exp(strict_log_probs(model, tokens)[0, len(prompt) - 1 :] - sampled).mean()

        ratio, gradients = objective(one_layer)
        assert ratio == 1
        graphdef, params = nnx.split(one_layer)
        # A step of a fixed length: a longer one may overshoot.
        rate = 0.3 / optax.tree.norm(gradients)
        updated = nnx.merge(graphdef, jax.tree.map(lambda p, g: p + (rate * g).astype(p.dtype), params, gradients))
        engine.update(updated)
        ((scored,),) = engine.generate([tokens[0].tolist()], replace(options, max_new_tokens=1, prompt_logprobs=0))
    found = np.float32([scores[int(t)] for scores, t in zip(scored.prompt_logprobs[1:], tokens[0, 1:], strict=True)])
    # In a program of its own the strict pass runs alone, without that of training.
    np.testing.assert_array_equal(found, nnx.jit(strict_log_probs)(updated, tokens)[0])
    # A token or two may choose another expert.
    assert np.median(np.abs(found - log_probs_of_modules(updated, tokens)[0])) < 0.03
    assert found[len(prompt) - 1 :].mean() > sampled.mean() + 0.01


@pytest.mark.thorough
def test_hits_and_preemption(model):
    """Pages of an earlier prompt, and tokens computed a second time because pages ran out, have the same bits."""
    limits = EngineLimits(
        max_sequences=2, max_tokens_per_step=80, max_chunks_per_step=2, max_length=192, num_pages=6, max_waiting=4
    )
    rng = seeds.rng()
    shared, *ends = (rng.integers(0, CONFIG.vocab_size, length).tolist() for length in (64, 62, 61))
    with closing(Engine(model, limits=limits, strict=True)) as engine:
        check_bits(model, engine, [shared + ends[0]])
        assert [one.cached_tokens for one in check_bits(model, engine, [shared + end for end in ends])] == [64, 64]
        preempted = engine.stats().num_preemptions
        others = [rng.integers(0, CONFIG.vocab_size, length).tolist() for length in (127, 126)]
        check_bits(model, engine, others, new_tokens=8)
        assert engine.stats().num_preemptions > preempted


def check_bits(model, engine, prompts, *, new_tokens=4, scores_prompts=False):
    scored = {"prompt_logprobs": 0} if scores_prompts else {}
    options = SamplingOptions(max_new_tokens=new_tokens, ignore_eos=True, temperature=1.0, seed=0, logprobs=0, **scored)
    completions = [one for (one,) in engine.generate(prompts, options)]
    for prompt, one in zip(prompts, completions, strict=True):
        expected = np.asarray(strict_log_probs(model, jnp.asarray([prompt + one.tokens], jnp.int32)))[0]
        found = list(one.logprobs)
        if scores_prompts:
            found = [scores[token] for scores, token in zip(one.prompt_logprobs[1:], prompt[1:], strict=True)] + found
        np.testing.assert_array_equal(np.float32(found), expected[-len(found) :])
    return completions


REFUSED = {
    "head_dim must be 128": replace(CONFIG, head_dim=64),
    "vocab_size must be a multiple of 128": replace(CONFIG, vocab_size=64),
    "intermediate_size must be a multiple of 128": replace(CONFIG, intermediate_size=64),
    "a bias after attention": replace(CONFIG, attention_bias=True),
    "the number of experts must be a multiple of 16; got 20": replace(FAMILIES["glm4_moe"], vocab_size=128),
    "the width of all shared experts must be a multiple of 128": replace(
        FAMILIES["qwen2_moe"], vocab_size=128, shared_expert_intermediate_size=192
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason):
    assert reason in (strict_refusal(REFUSED[reason], jnp.bfloat16) or "")


def test_refused_model(one_layer):
    assert strict_refusal(CONFIG, jnp.bfloat16) is None
    with pytest.raises(ValueError, match="computes in bfloat16 and float16"):
        Engine(moe_jax.from_config(CONFIG, rngs=nnx.Rngs(0)), strict=True)
    with pytest.raises(ValueError, match="drafts"):
        Engine(one_layer, strict=True, drafts=1)
    with pytest.raises(ValueError, match="strict=True needs drafts=0; got drafts='lookup:3'"):
        Engine(one_layer, strict=True, drafts="lookup:3")
