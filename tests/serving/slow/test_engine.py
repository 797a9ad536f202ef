"""The engine's tokens equal `generate`, for any mix of requests and options."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.kernels.attention.paged.fp8 import power_of_two, quantised
from moe_jax.layers.attend import Attend
from moe_jax.serving.engine import Engine
from moe_jax.serving.handle import as_completed
from moe_jax.serving.request import EngineLimits, SamplingOptions, seeds_of
from tests.helpers import compilations, seeds, served, tiny
from tests.helpers.hf_reference import load_ours, reference

LIMITS = EngineLimits(
    max_sequences=2, max_tokens_per_step=64, max_chunks_per_step=2, max_length=256, num_pages=8, max_waiting=7
)
FREE = SamplingOptions(ignore_eos=True)
"""Texts of `max_new_tokens` tokens."""

LONGEST = 190
"""Tokens of the longest prompt; `greedy` and `whole_pass` have one program each, for rows of as many."""


@pytest.fixture(scope="module")
def model():
    return load_ours(reference("qwen3_moe", 0, num_hidden_layers=1, max_position_embeddings=512))


@pytest.fixture(scope="module")
def engine(model):
    engine = Engine(model, limits=LIMITS, tokenizer=tiny.tokenizer(), keep_experts=True)
    yield engine
    stats = engine.stats()
    assert stats.owned_pages == stats.running == stats.waiting == 0
    engine.close()


def prompts_of(rng, *lengths):
    return [rng.integers(0, 97, length).tolist() for length in lengths]


def greedy(model, prompts, max_new_tokens):
    rows = [*prompts, *[[1] * LONGEST] * (7 - len(prompts))]
    return [tokens[:max_new_tokens] for tokens in moe_jax.generate(model, rows, max_new_tokens=20)[: len(prompts)]]


def whole_pass(model, tokens):
    """Returns the model's logits, and the experts of each layer, for one sequence."""
    padded = np.zeros((1, LONGEST + 10), np.int32)
    padded[0, : len(tokens)] = tokens
    logits, experts = _whole_pass(nnx.graphdef(model), nnx.state(model), padded)
    return np.asarray(logits)[0, : len(tokens)], np.asarray(experts)[:, 0, : len(tokens)]


@partial(jax.jit, static_argnums=0)
def _whole_pass(graph, state, tokens):
    output = nnx.merge(graph, state)(tokens)
    return output.logits, output.expert_ids


def text_of(engine, tokens):
    return engine.tokenizer.decode(tokens, skip_special_tokens=True)


def test_nothing_is_compiled_while_requests_run(engine):
    """Every program is compiled before the engine is ready, also for the rarest options."""
    prompts = prompts_of(seeds.rng(), 70, 3, 20)
    options = [
        SamplingOptions(max_new_tokens=4, return_experts=True),
        SamplingOptions(max_new_tokens=5, temperature=0.7),
        SamplingOptions(max_new_tokens=6, top_p=0.5, temperature=1.0, presence_penalty=1.0, logprobs=2, prompt_logprobs=2),
    ]
    with compilations.counted() as compiled:
        engine.generate(prompts, options)
        assert not compiled
        jax.jit(lambda x: x + len(prompts))(1.5)
        assert len(compiled) == 1


def test_greedy_tokens_and_log_probabilities_of_prompts(model, engine, monkeypatch):
    """Prompts come in several chunks and pieces, next to other requests; a sequence is preempted and begins again."""
    monkeypatch.setattr("moe_jax.serving.prompts.PIECE_TOKENS", 24)
    prompts = prompts_of(seeds.rng(), 180, 185, 188, 1, 64, 130)
    options = [
        replace(FREE, max_new_tokens=20, prompt_logprobs=wanted, n=n)
        for wanted, n in ((3, 1), (None, 1), (20, 1), (0, 1), (None, 1), (0, 2))
    ]
    before = engine.stats().num_preemptions
    found = engine.generate(prompts, options)
    assert engine.stats().num_preemptions > before
    assert [each[0].tokens for each in found] == greedy(model, prompts, 20)
    assert {one.finish_reason for each in found for one in each} == {"length"} and found[1][0].prompt_logprobs is None
    for prompt, of_prompt, each in zip(prompts, options, found, strict=True):
        for one in each if of_prompt.prompt_logprobs is not None else ():
            assert len(one.prompt_logprobs) == len(prompt) and one.prompt_logprobs[0] is None
            assert one.cached_tokens == 0 or one is not each[0]
            expected = np.asarray(jax.nn.log_softmax(whole_pass(model, prompt)[0]))
            for token, logprobs, wanted in zip(prompt[1:], one.prompt_logprobs[1:], expected, strict=False):
                tops = np.argsort(-wanted)[: of_prompt.prompt_logprobs].tolist()
                assert logprobs.keys() == {token, *tops}
                assert logprobs == pytest.approx({one: wanted[one] for one in logprobs}, abs=2e-3)


def test_a_prefix_is_found_and_changes_nothing(model, engine):
    rng = seeds.rng()
    (prompt,) = prompts_of(rng, 150)
    options = replace(FREE, max_new_tokens=5, return_experts=True)
    ((first,),) = engine.generate([prompt], options)
    ((second,),) = engine.generate([prompt], options)
    engine.drop_prefixes()
    ((third,),) = engine.generate([prompt], options)
    assert [each.cached_tokens for each in (first, second, third)] == [0, 128, 0]
    assert first.weights_version == third.weights_version
    assert first.tokens == second.tokens == third.tokens == greedy(model, [prompt], 5)[0]
    expected = whole_pass(model, prompt + first.tokens[:-1])[1].transpose(1, 0, 2)
    for found in (first.experts, second.experts):
        np.testing.assert_array_equal(np.sort(found), np.sort(expected))


def test_pages_in_fp8(model, monkeypatch):
    """Tokens equal `generate` with keys and values rounded in the same way. A cached prefix changes nothing."""
    (prompt,), options = prompts_of(seeds.rng(), 70), replace(FREE, max_new_tokens=6, logprobs=0)
    with closing(Engine(model, limits=replace(LIMITS, kv_dtype="fp8"), lazy=True)) as engine:
        assert {leaf.dtype.name for leaf in jax.tree.leaves(engine._loop.device.state.pages)} == {"float8_e4m3fn", "uint8"}
        ((first,),), ((second,),) = (engine.generate([prompt], options) for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 64)
    assert first.tokens == second.tokens
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-5)
    attend = Attend.__call__

    def rounded(heads):
        codes, exponents = quantised(heads)
        return codes.astype(heads.dtype) * power_of_two(exponents.astype(jnp.int32))[..., None]

    def rounds(self, q, kept, *rest, **scale):
        return attend(self, q, tuple(map(rounded, kept)), *rest, **scale)

    monkeypatch.setattr(Attend, "__call__", rounds)
    assert moe_jax.generate(model, prompt, max_new_tokens=6) == first.tokens


def test_stop_texts_end_each_continuation_alone(engine):
    """Tokens, text and all that belongs to tokens end with the stop text; requests before and after it are untouched."""
    first, second = prompts_of(seeds.rng(), 9, 70)
    options = replace(FREE, max_new_tokens=30, temperature=3.0, seed=1, n=2, logprobs=1, return_experts=True)
    long = replace(FREE, max_new_tokens=60)
    ((_, whole), (alone,)) = engine.generate([second, first], [options, long])
    stop = whole.text[8:11]
    stops = replace(options, stop=(stop,))
    before = engine.stats().num_tokens
    (other,), (_, stopped) = engine.generate([first, second], [long, stops])
    assert engine.stats().num_tokens - before < 60 + 30 + 30
    num = len(stopped.tokens)
    assert (stopped.text, stopped.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert stop in text_of(engine, stopped.tokens) and stop not in text_of(engine, stopped.tokens[:-1])
    assert stopped.tokens == whole.tokens[:num] and other == alone
    # Other rows stood in the batch: bits may differ.
    np.testing.assert_allclose(stopped.logprobs, whole.logprobs[:num], rtol=1e-5)
    np.testing.assert_array_equal(stopped.experts, whole.experts[: len(second) + num - 1])
    events = [event for event in engine.submit(second, stops).events() if event.index == 1]
    assert "".join(event.text for event in events) == stopped.text
    assert [event.token for event in events] == [*stopped.tokens, None]


def test_an_end_token_ends_and_has_no_text(engine):
    (prompt,) = prompts_of(seeds.rng(), 5)
    ((whole,),) = engine.generate([prompt], replace(FREE, max_new_tokens=9))
    end = whole.tokens[4]
    ((found,),) = engine.generate([prompt], replace(FREE, max_new_tokens=9, stop_token_ids=(end,)))
    num = whole.tokens.index(end)
    assert (found.tokens, found.finish_reason) == (whole.tokens[: num + 1], "stop")
    assert found.text == text_of(engine, whole.tokens[:num])


def test_continuations_share_the_prompt(model, engine):
    """Full pages are computed once, and log-probabilities of the prompt too."""
    (prompt,) = prompts_of(seeds.rng(), 150)
    options = replace(FREE, max_new_tokens=3, temperature=1.0, seed=5, prompt_logprobs=2)
    (three,) = engine.generate([prompt], replace(options, n=3))
    ((alone,),) = engine.generate([prompt], options)
    assert [one.cached_tokens for one in three] == [0, 128, 128]
    assert len(alone.prompt_logprobs) == len(prompt)
    assert all(one.prompt_logprobs == alone.prompt_logprobs for one in three)
    assert three[0].tokens == alone.tokens != three[1].tokens


def test_options_are_each_requests_own(model, engine):
    """Greedy requests next to drawn ones, with penalties and alternatives, keep their tokens; a seed gives its tokens again."""
    rng = seeds.rng()
    plain, biased, drawn = prompts_of(rng, 20, 12, 30)
    options = [
        replace(FREE, max_new_tokens=8),
        replace(FREE, max_new_tokens=4, logit_bias={5: 100.0}, logprobs=3),
        replace(FREE, max_new_tokens=8, temperature=1.0, top_p=0.9, seed=3, n=2, logprobs=0),
    ]
    first = engine.generate([plain, biased, drawn], options)
    again = engine.generate([drawn, plain], [options[2], options[0]])
    assert first[0][0].tokens == greedy(model, [plain], 8)[0]
    assert first[1][0].tokens == [5] * 4
    assert [one.tokens for one in again[0]] == [one.tokens for one in first[2]]
    assert first[2][0].tokens != first[2][1].tokens
    logits = whole_pass(model, biased)[0][-1].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert first[1][0].logprobs[0] == pytest.approx(logprobs[5], abs=1e-3)
    assert list(first[1][0].top_logprobs[0]) == np.argsort(-logprobs)[:3].tolist()


def test_a_completions_seed_draws_it_alone(engine):
    (prompt,) = prompts_of(seeds.rng(), 9)
    options = replace(FREE, max_new_tokens=8, temperature=2.0, n=2)
    (found,) = engine.generate([prompt], options)
    ((alone,),) = engine.generate([prompt], replace(options, seed=found[1].seed, n=1))
    assert alone.tokens == found[1].tokens
    assert [one.seed for one in found] == seeds_of(replace(options, seed=found[0].seed))


@pytest.mark.parametrize("disturbed", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_requests_of_several_threads_keep_their_tokens(model, engine, disturbed):
    """They come and are aborted at random. Disturbances are pauses, and updates to the same weights."""
    rng, over = seeds.rng(), threading.Event()
    options = [
        replace(FREE, max_new_tokens=24, prompt_logprobs=0),
        replace(FREE, max_new_tokens=24, temperature=0.7, top_p=0.9, seed=2, n=2, logprobs=2),
        replace(FREE, max_new_tokens=24, temperature=1.3, top_k=20, repetition_penalty=1.2, seed=3),
    ]
    requests = list(zip(prompts_of(rng, 180, 3, 170), options, strict=True))
    alone = [[one.tokens for one in engine.submit(*request).result()] for request in requests]

    def client(rng):
        for number in rng.permutation(60 if disturbed else 3) % 3:
            handles = [engine.submit(*requests[number]) for _ in range(2)]
            time.sleep(rng.exponential(0.01))
            handles[1].abort()
            whole, aborted = ([one.tokens for one in handle.result()] for handle in handles)
            assert whole == alone[number]
            assert aborted == [tokens[: len(some)] for some, tokens in zip(aborted, alone[number], strict=True)]

    def disturb(rng):
        while not over.wait(rng.exponential(0.05)):
            engine.pause()
            if rng.random() < 0.5:
                engine.update(model)
            time.sleep(rng.exponential(0.01))
            engine.resume()

    with ThreadPoolExecutor(3) as pool:
        disturbing = pool.submit(disturb, rng.spawn(1)[0]) if disturbed else None
        try:
            list(pool.map(client, rng.spawn(2)))
        finally:
            over.set()
    assert disturbing is None or disturbing.exception() is None


def test_events_come_one_by_one_in_a_loop_and_aborts_end_them(model, engine):
    (prompt,) = prompts_of(seeds.rng(), 9)

    async def first_three():
        handle, tokens = engine.submit(prompt, replace(FREE, max_new_tokens=200)), []
        async for event in handle:
            tokens.append(event.token)
            if len(tokens) == 3:
                handle.abort()
        return tokens, event.finish_reason

    async def both():
        return await asyncio.gather(first_three(), first_three())

    for tokens, reason in asyncio.run(both()):
        assert tokens[:3] == greedy(model, [prompt], 3)[0]
        assert reason == "abort" and len(tokens) < 200


def test_results_come_when_their_request_ends(engine):
    """Short answers come first; a closed iterator aborts the others."""
    prompts = prompts_of(seeds.rng(), 3, 9, 5)
    each = [replace(FREE, max_new_tokens=new) for new in (200, 4, 30)]
    coming = engine.as_completed(prompts, each)
    assert [next(coming)[0] for _ in range(2)] == [1, 2]
    coming.close()
    assert served.comes_true(lambda: not engine._loop._open)
    handles = [engine.submit(prompt, options) for prompt, options in zip(prompts, each, strict=True)]
    assert [index for index, _ in as_completed(handles)] == [1, 2, 0]
    assert [index for index, _ in as_completed(handles)] == [0, 1, 2]
