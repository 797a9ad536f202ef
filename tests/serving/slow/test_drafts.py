"""An engine with drafts has the tokens of one without, greedy and drawn, and takes fewer steps."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.generation import generate_with_drafts
from moe_jax.layers.cache import init_cache
from moe_jax.serving import Engine, EngineLimits, SamplingOptions
from tests.helpers import seeds, tiny

LIMITS = EngineLimits(
    max_sequences=2, max_tokens_per_step=8, max_chunks_per_step=2, max_length=192, num_pages=5, max_waiting=50
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
    """One without drafts, which computes one sequence at a time, and one with drafts."""
    sizes = (replace(LIMITS, max_sequences=1, max_chunks_per_step=1), 0), (LIMITS, 1)
    made = [Engine(model, limits=limits, drafts=drafts, keep_experts=True, lazy=True) for limits, drafts in sizes]
    yield made
    for engine in made:
        stats = engine.stats()
        assert stats.owned_pages == stats.running == stats.waiting == 0
        engine.close()


# Without the variant "plain": tests/serving/slow/test_drawing.py has its draws with drafts.
OPTIONS = [
    SamplingOptions(),
    SamplingOptions(temperature=1.0, top_p=0.99, seed=1, n=2, logprobs=1),
    SamplingOptions(temperature=0.8, top_p=0.9, top_k=4, seed=2, logprobs=2),
    SamplingOptions(presence_penalty=0.3, frequency_penalty=0.1, repetition_penalty=1.2, temperature=0.5, seed=3),
    SamplingOptions(stop_token_ids=(2,), return_experts=True),
    SamplingOptions(prompt_logprobs=1, return_experts=True),
]


def test_tokens_are_those_without_drafts(model, engines):
    """Prompts in several chunks, with common beginnings, too few pages, and ends after a draft."""
    rng = seeds.rng()
    beginning = rng.integers(0, 6, 130).tolist()
    prompts, options = [], []
    for number in range(14):
        # The first two run together and need three pages each, and there are four.
        length, new = (3, 170) if number < 2 else (int(rng.integers(1, 130)), int(rng.integers(1, 40)))
        prompts.append(beginning[:length] if number % 2 and number > 2 else rng.integers(0, 6, length).tolist())
        options.append(replace(OPTIONS[number % len(OPTIONS)], max_new_tokens=new, ignore_eos=True))
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
    assert after.num_preemptions and before.num_drafted == 0 and after.num_tokens == before.num_tokens
    assert 0 < after.num_accepted < after.num_drafted and after.acceptance_rate < 1


@pytest.mark.thorough
def test_the_module_drafts_as_in_a_batch_of_its_own(model, engines):
    """Chunks, steps and new weights change no draft; after the last token the engine drafts nothing."""
    engine, rng = engines[1], seeds.rng()
    engine.update(model)
    for length in (3, 100, 64):
        # Without token 1, which pads.
        prompt = rng.integers(2, 6, length).tolist()
        before = engine.stats()
        ((found,),) = engine.generate([prompt], SamplingOptions(max_new_tokens=60, ignore_eos=True))
        tokens, drafts = generate_with_drafts(model, prompt, max_new_tokens=60)
        after = engine.stats()
        assert found.tokens == tokens
        assert drafts.drafted - 1 <= after.num_drafted - before.num_drafted <= drafts.drafted
        assert drafts.accepted - 1 <= after.num_accepted - before.num_accepted <= drafts.accepted


def test_the_modules_pages_are_those_of_a_whole_pass(model, engines):
    """The module reads with each token also the next one: in its chunk, in the next chunk, or drawn."""
    prompt = seeds.rng().integers(0, 6, 21).tolist()
    ((found,),) = engines[1].generate([prompt], SamplingOptions(max_new_tokens=30, ignore_eos=True, temperature=9.0, seed=1))
    device, queues = engines[1]._loop.device, engines[1]._loop.queues[0]
    page = device.state.page_table[queues.free_slots[-1], 0]
    tokens = np.array([prompt + found.tokens])
    rooms = [init_cache(config, 1, 64, jnp.float32) for config in (model.config, replace(model.config, num_hidden_layers=1))]
    positions = np.arange(tokens.size - 1)[None]

    @nnx.jit
    def kept(model, rooms):
        hidden = model.hidden_states(tokens[:, :-1], positions, cache=rooms[0]).hidden
        return model.predict(1, hidden, tokens[:, 1:], positions, cache=rooms[1]).cache.kept[0][0, 0, : tokens.size - 1]

    expected = kept(model, rooms)
    np.testing.assert_allclose(device.state.drafting.pages[0][page, 0, : tokens.size - 1], expected, atol=1e-4)


def test_nearly_uniform_draws_are_drafted_right(engines):
    """Model and module draw with the same keys: equal distributions give equal tokens, where chance would give one in six."""
    before = engines[1].stats()
    engines[1].generate([[3, 4]], SamplingOptions(max_new_tokens=80, ignore_eos=True, temperature=1000.0, top_p=1.0))
    after = engines[1].stats()
    assert after.num_accepted - before.num_accepted > 0.8 * (after.num_drafted - before.num_drafted) > 20


def test_drafts_that_cannot_be_are_refused(model):
    for drafts, limits, message in (
        (2, LIMITS, "must be 0 or 1, 'module', or 'lookup:N' with N from 1 to 8; got 2"),
        ("lookup", LIMITS, "got 'lookup'"),
        ("lookup:0", LIMITS, "got 'lookup:0'"),
        ("lookup:9", LIMITS, "got 'lookup:9'"),
        (1, replace(LIMITS, max_tokens_per_step=3), "at least 2 times max_sequences; got 3 and 2"),
        ("lookup:3", replace(LIMITS, max_tokens_per_step=7), "at least 4 times max_sequences; got 7 and 2"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(model, limits=limits, drafts=drafts)
    with pytest.raises(ValueError, match="num_nextn_predict_layers"):
        Engine(tiny.deepseek(layers=2), limits=LIMITS, drafts=1)


def assert_close(found, expected):
    assert (found is None) == (expected is None)
    if expected is not None:
        np.testing.assert_allclose(found, expected, atol=1e-4)
