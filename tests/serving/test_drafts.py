"""An engine with drafts has the tokens of one without, greedy and drawn, and takes fewer steps."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import seeds
import tiny

from moe_jax.serving import Engine, EngineLimits, SamplingOptions

LIMITS = EngineLimits(
    max_sequences=3, max_tokens_per_step=40, max_chunks_per_step=3, max_length=192, num_pages=6, max_waiting=50
)


@pytest.fixture(scope="module")
def model():
    """A model of few tokens, so that drafts are right by chance."""
    model = tiny.deepseek(mtp=1, layers=2, vocab_size=6)
    rng = seeds.rng()
    for weight in (model.embed_tokens.weight, model.lm_head.weight):
        weight[...] = jnp.asarray(rng.normal(0, 1, weight.shape), jnp.float32)
    return model


@pytest.fixture(scope="module")
def engines(model):
    made = [Engine(model, limits=LIMITS, drafts=drafts, keep_experts=True) for drafts in (0, 1)]
    yield made
    for engine in made:
        stats = engine.stats()
        assert stats.owned_pages == stats.running == stats.waiting == 0
        engine.close()


OPTIONS = [
    SamplingOptions(),
    SamplingOptions(temperature=1.0, seed=1, n=2, logprobs=0),
    SamplingOptions(temperature=0.8, top_p=0.9, top_k=4, seed=2, logprobs=2),
    SamplingOptions(presence_penalty=0.3, frequency_penalty=0.1, repetition_penalty=1.2, temperature=0.5, seed=3),
    SamplingOptions(stop_token_ids=(2,), return_experts=True),
    SamplingOptions(prompt_logprobs=1, return_experts=True),
]


def test_tokens_are_those_without_drafts(model, engines):
    """Prompts in several chunks, with common beginnings, too few pages, and ends behind a draft."""
    rng = seeds.rng()
    beginning = rng.integers(0, 6, 130).tolist()
    prompts, options = [], []
    for number in range(24):
        length = int(rng.integers(1, 130))
        prompts.append(beginning[:length] if number % 2 else rng.integers(0, 6, length).tolist())
        new = int(rng.integers(1, 60))
        options.append(dataclasses.replace(OPTIONS[number % len(OPTIONS)], max_new_tokens=new, ignore_eos=True))
    plain, drafted = (engine.generate(prompts, options) for engine in engines)
    for each, same in zip(plain, drafted, strict=True):
        for one, other in zip(each, same, strict=True):
            assert (other.tokens, other.finish_reason) == (one.tokens, one.finish_reason)
            assert_close(other.logprobs, one.logprobs)
            if one.prompt_logprobs is not None:
                assert_close(
                    [*map(min, map(dict.values, other.prompt_logprobs[1:]))],
                    [*map(min, map(dict.values, one.prompt_logprobs[1:]))],
                )
            if one.experts is not None:
                np.testing.assert_array_equal(np.sort(other.experts), np.sort(one.experts))
    before, after = (engine.stats() for engine in engines)
    assert before.num_preemptions and after.num_preemptions
    assert before.num_drafted == 0 and after.num_tokens == before.num_tokens
    assert 0 < after.num_accepted < after.num_drafted and after.acceptance_rate < 1


def assert_close(found, expected):
    assert (found is None) == (expected is None)
    if expected is not None:
        np.testing.assert_allclose(found, expected, atol=1e-4)
