"""The engine's tokens equal `generate`, for any mix of requests; requests end, fail and are refused alone."""

import asyncio
import gc
import re
import threading
import time
import weakref
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
from moe_jax.serving import device
from moe_jax.serving.engine import GREEDY, Engine
from moe_jax.serving.handle import as_completed
from moe_jax.serving.loop import QueueFull
from moe_jax.serving.request import EngineLimits, SamplingOptions, seeds_of
from tests.helpers import compilations, seeds, served, tiny
from tests.helpers.hf_reference import load_ours, reference

LIMITS = EngineLimits(
    max_sequences=2, max_tokens_per_step=64, max_chunks_per_step=4, max_length=256, num_pages=8, max_waiting=7
)


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


def test_greedy_equals_generate(model, engine):
    prompts = prompts_of(seeds.rng(), 3, 70, 64, 1, 130, 20)
    found = engine.generate(prompts, SamplingOptions(max_new_tokens=9, ignore_eos=True))
    assert [one.tokens for (one,) in found] == greedy(model, prompts, 9)
    assert {one.finish_reason for (one,) in found} == {"length"}


def test_a_prefix_is_found_and_changes_nothing(model, engine):
    rng = seeds.rng()
    (prompt,) = prompts_of(rng, 150)
    options = SamplingOptions(max_new_tokens=5, ignore_eos=True, return_experts=True)
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
    (prompt,), options = prompts_of(seeds.rng(), 70), SamplingOptions(max_new_tokens=6, ignore_eos=True, logprobs=0)
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


def test_stop_texts_end_each_continuation_alone(model, engine):
    """Tokens, text and all that belongs to tokens end with the stop text; requests before and after it are untouched."""
    first, second = prompts_of(seeds.rng(), 9, 70)
    options = SamplingOptions(max_new_tokens=30, ignore_eos=True, temperature=3.0, seed=1, n=2, logprobs=1, return_experts=True)
    ((_, whole), (greedy_one,)) = engine.generate(
        [second, first], [options, SamplingOptions(max_new_tokens=60, ignore_eos=True)]
    )
    stop = whole.text[8:11]
    begin = whole.text.index(stop)
    before = engine.stats().num_tokens
    found = engine.generate(
        [first, second], [replace(GREEDY, max_new_tokens=60, ignore_eos=True), replace(options, stop=(stop,))]
    )
    assert found[0][0] == greedy_one
    stopped = found[1][1]
    num = len(stopped.tokens)
    assert (stopped.text, stopped.finish_reason) == (whole.text[:begin], "stop")
    assert stop in text_of(engine, stopped.tokens) and stop not in text_of(engine, stopped.tokens[:-1])
    assert stopped.tokens == whole.tokens[:num]
    # Other rows stood in the batch: bits may differ.
    np.testing.assert_allclose(stopped.logprobs, whole.logprobs[:num], rtol=1e-5)
    np.testing.assert_array_equal(stopped.experts, whole.experts[: len(second) + num - 1])
    assert engine.stats().num_tokens - before < 60 + 30 + 30
    events = list(engine.submit(second, replace(options, stop=(stop,))).events())
    assert "".join(event.text for event in events if event.index == 1) == stopped.text
    assert [event.token for event in events if event.index == 1] == [*stopped.tokens, None]


def test_an_end_token_has_no_text(model, engine):
    (prompt,) = prompts_of(seeds.rng(), 5)
    options = SamplingOptions(max_new_tokens=9, ignore_eos=True)
    ((whole,),) = engine.generate([prompt], options)
    end = whole.tokens[4]
    ((found,),) = engine.generate([prompt], replace(options, stop_token_ids=(end,)))
    num = whole.tokens.index(end)
    assert found.tokens == whole.tokens[: num + 1]
    assert found.text == text_of(engine, whole.tokens[:num])


def test_continuations_share_the_prompt(model, engine):
    """Full pages are computed once, and log-probabilities of the prompt too."""
    (prompt,) = prompts_of(seeds.rng(), 150)
    options = SamplingOptions(max_new_tokens=3, ignore_eos=True, temperature=1.0, seed=5, prompt_logprobs=2)
    (three,) = engine.generate([prompt], replace(options, n=3))
    ((alone,),) = engine.generate([prompt], options)
    assert [one.cached_tokens for one in three] == [0, 128, 128]
    assert len(alone.prompt_logprobs) == len(prompt)
    assert all(one.prompt_logprobs == alone.prompt_logprobs for one in three)
    assert three[0].tokens == alone.tokens != three[1].tokens


def test_pages_run_out_and_every_request_ends(model, engine):
    """Two sequences of four pages do not fit into seven: the younger waits, and begins again."""
    prompts = prompts_of(seeds.rng(), 180, 185, 188, 10)
    before = engine.stats().num_preemptions
    found = engine.generate(prompts, SamplingOptions(max_new_tokens=20, ignore_eos=True))
    assert [one.tokens for (one,) in found] == greedy(model, prompts, 20)
    assert engine.stats().num_preemptions > before


def test_options_are_each_requests_own(model, engine):
    """Greedy requests next to drawn ones, with penalties and alternatives, keep their tokens; a seed gives its tokens again."""
    rng = seeds.rng()
    plain, biased, drawn = prompts_of(rng, 20, 12, 30)
    options = [
        SamplingOptions(max_new_tokens=8, ignore_eos=True),
        SamplingOptions(max_new_tokens=4, ignore_eos=True, logit_bias={5: 100.0}, logprobs=3),
        SamplingOptions(max_new_tokens=8, ignore_eos=True, temperature=1.0, top_p=0.9, seed=3, n=2, logprobs=0),
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


def test_requests_of_several_threads_keep_their_tokens(engine):
    """They come and are aborted at random."""
    rng = seeds.rng()
    options = [
        SamplingOptions(max_new_tokens=24, ignore_eos=True, prompt_logprobs=0),
        SamplingOptions(max_new_tokens=24, ignore_eos=True, temperature=0.7, top_p=0.9, seed=2, n=2, logprobs=2),
        SamplingOptions(max_new_tokens=24, ignore_eos=True, temperature=1.3, top_k=20, repetition_penalty=1.2, seed=3),
    ]
    requests = list(zip(prompts_of(rng, 180, 3, 170), options, strict=True))
    alone = [[one.tokens for one in engine.submit(*request).result()] for request in requests]

    def client(rng):
        for number in rng.permutation(3):
            handles = [engine.submit(*requests[number]) for _ in range(2)]
            time.sleep(rng.exponential(0.01))
            handles[1].abort()
            whole, aborted = ([one.tokens for one in handle.result()] for handle in handles)
            assert whole == alone[number]
            assert aborted == [tokens[: len(some)] for some, tokens in zip(aborted, alone[number], strict=True)]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(client, rng.spawn(2)))


def test_log_probabilities_of_prompts(model, engine, monkeypatch):
    """Prompts come in several chunks and pieces, next to other requests; a sequence is preempted and begins again."""
    monkeypatch.setattr("moe_jax.serving.prompts.PIECE_TOKENS", 24)
    prompts = prompts_of(seeds.rng(), 180, 185, 188, 1, 70)
    options = [
        SamplingOptions(max_new_tokens=20, ignore_eos=True, prompt_logprobs=wanted, n=n)
        for wanted, n in ((3, 1), (None, 1), (20, 1), (0, 1), (0, 2))
    ]
    before = engine.stats().num_preemptions
    found = engine.generate(prompts, options)
    assert engine.stats().num_preemptions > before
    assert [[one.tokens for one in each] for each in found[:4]] == [[tokens] for tokens in greedy(model, prompts[:4], 20)]
    assert found[1][0].prompt_logprobs is None
    for prompt, of_prompt, each in zip(prompts, options, found, strict=True):
        for one in each if of_prompt.prompt_logprobs is not None else ():
            assert len(one.prompt_logprobs) == len(prompt) and one.prompt_logprobs[0] is None
            assert one.cached_tokens == 0 or one is not each[0]
            expected = jax.nn.log_softmax(whole_pass(model, prompt)[0])
            for token, logprobs, wanted in zip(prompt[1:], one.prompt_logprobs[1:], np.asarray(expected), strict=False):
                tops = np.argsort(-wanted)[: of_prompt.prompt_logprobs].tolist()
                assert logprobs.keys() == {token, *tops}
                assert logprobs == pytest.approx({one: wanted[one] for one in logprobs}, abs=2e-3)


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


def test_an_end_token_ends(model, engine):
    (prompt,) = prompts_of(seeds.rng(), 17)
    expected = greedy(model, [prompt], 8)[0]
    end = expected[3]
    ((found,),) = engine.generate([prompt], SamplingOptions(max_new_tokens=8, ignore_eos=True, stop_token_ids=(end,)))
    assert found.tokens == expected[: expected.index(end) + 1]
    assert found.finish_reason == "stop"


def test_events_come_one_by_one_in_a_loop_and_aborts_end_them(model, engine):
    prompt, other = prompts_of(seeds.rng(), 9, 11)
    options = SamplingOptions(max_new_tokens=200, ignore_eos=True)

    async def first_three():
        handle, tokens = engine.submit(prompt, options), []
        async for event in handle:
            tokens.append(event.token)
            if len(tokens) == 3:
                handle.abort()
            last = event
        return tokens, last

    async def both():
        return await asyncio.gather(first_three(), first_three())

    (tokens, last), (same, _) = asyncio.run(both())
    assert tokens[:3] == same[:3] == greedy(model, [prompt], 3)[0]
    assert last.finish_reason == "abort" and len(tokens) < 200
    assert [one.tokens for one in engine.submit(other, SamplingOptions(max_new_tokens=3, ignore_eos=True)).result()] == greedy(
        model, [other], 3
    )


def test_a_full_queue_refuses_and_a_pause_holds(engine):
    (prompt,) = prompts_of(seeds.rng(), 5)
    engine.pause()
    handles = [engine.submit(prompt, SamplingOptions(max_new_tokens=2)) for _ in range(9)]
    with pytest.raises(QueueFull, match="9 sequences run or wait"):
        engine.submit(prompt)
    assert all(completion is None for handle in handles for completion in handle.completions)
    engine.resume()
    assert all(len(handle.result()[0].tokens) <= 2 for handle in handles)


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ([], {}, "the prompt is empty"),
        ([1, 97], {}, "outside the vocabulary"),
        ([1] * 200, {}, "exceed the engine's max_length"),
        ([1], {"stop": [""]}, "stop must be"),
        ([1], {"top_p": 2.0, "n": 0}, "top_p must be .*; n must be"),
    ],
)
def test_bad_requests_are_refused(engine, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, SamplingOptions(**options))


def test_a_request_beyond_the_models_positions_warns_once(engine, caplog, monkeypatch):
    monkeypatch.setattr("moe_jax.generation.request._warned_of", set())
    monkeypatch.setattr(engine, "config", replace(engine.config, max_position_embeddings=6))
    for new, warnings in ((3, 0), (4, 1), (4, 1)):
        engine.generate([[1, 2, 3]], SamplingOptions(max_new_tokens=new))
        assert caplog.text.count("more than the model's max_position_embeddings of 6") == warnings


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        *(
            (prompts, GREEDY, f"prompts must be a list of lists of token ids; got {re.escape(repr(prompts))}; for text see")
            for prompts in ("text", ["text"], [1, 2, 3], None)
        ),
        ([[1]], None, "options must be SamplingOptions; got None"),
        ([[1], [2]], {"max_new_tokens": 4}, "options must be SamplingOptions; got {'max_new_tokens': 4}"),
        ([[1], [2]], [GREEDY], "options must be one for all prompts, or one for each of 2; got 1"),
    ],
)
def test_other_types_than_prompts_and_options_are_refused(engine, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, options)


def test_other_types_than_models_and_limits_are_refused(model, engine):
    with pytest.raises(ValueError, match=r"model must be a Decoder, as moe_jax.from_pretrained\(folder\) returns; got str"):
        Engine("folder")
    with pytest.raises(ValueError, match="model must be a Decoder, .*; got NoneType"):
        engine.update(None)
    with pytest.raises(ValueError, match="limits must be EngineLimits; got {'max_length': 8}"):
        Engine(model, limits={"max_length": 8})
    half = moe_jax.from_config(model.config, dtype=jnp.float16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match='kv_dtype="fp8" needs a model in bfloat16 or float32; got float16'):
        Engine(half, limits=replace(LIMITS, kv_dtype="fp8"))


def test_a_failed_device_ends_everything(model, monkeypatch):
    """Requests that run and that wait, an abort and a call that come meanwhile, later requests, and `close`."""
    engine = Engine(model, limits=LIMITS, lazy=True)
    (prompt,) = prompts_of(seeds.rng(), 5)
    assert not engine.failed
    launch, failing, aborted = engine._loop.device.launch, threading.Event(), threading.Event()

    def fail_at_last(plans):
        if len(plans[0].decodes) < LIMITS.max_sequences:
            return launch(plans)
        failing.set()
        aborted.wait(30)
        raise ValueError("a defect")

    monkeypatch.setattr(engine._loop.device, "launch", fail_at_last)
    handles = [engine.submit(prompt, SamplingOptions(max_new_tokens=100, ignore_eos=True)) for _ in range(5)]
    assert failing.wait(300)
    handles[1].abort()
    handles[4].abort()
    caller = threading.Thread(target=engine.pause, daemon=True)
    caller.start()
    time.sleep(0.1)
    aborted.set()
    for handle in handles:
        with pytest.raises(RuntimeError, match="the engine failed: ValueError: a defect"):
            handle.result()
    caller.join(30)
    assert engine.failed and not caller.is_alive()
    for call in (lambda: engine.submit(prompt), lambda: engine.generate([prompt]), engine.resume):
        with pytest.raises(RuntimeError, match="the engine failed: ValueError: a defect"):
            call()
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


def test_new_weights_take_over(model, engine):
    """Nothing of the old weights' cache is found again."""
    other = nnx.clone(model)
    other.lm_head.weight[...] = other.lm_head.weight[...][::-1]
    (prompt,) = prompts_of(seeds.rng(), 70)
    options = SamplingOptions(max_new_tokens=4, ignore_eos=True)
    ((before,),) = engine.generate([prompt], options)
    engine.update(other)
    ((found,),) = engine.generate([prompt], options)
    with pytest.raises(ValueError, match="the new weights must be .*: num_hidden_layers is 2; the engine has 1"):
        engine.update(moe_jax.from_config(replace(model.config, num_hidden_layers=2), dtype=model.dtype, rngs=nnx.Rngs(0)))
    engine.update(model)
    expected = greedy(other, [prompt], 4)[0]
    assert (found.tokens, found.weights_version, found.cached_tokens) == (expected, before.weights_version + 1, 0)
    assert found.tokens != before.tokens == greedy(model, [prompt], 4)[0]


def test_gaps_are_left_when_ready_and_after_an_update(model, engine, monkeypatch):
    of_engine = engine._loop.device
    monkeypatch.setattr(device, "leave_gaps", lambda of_device: [of_device])
    for renew in (lambda: engine._loop.call(of_engine.warm_up), lambda: engine.update(model)):
        of_engine._gaps = []
        renew()
        assert of_engine._gaps == list(of_engine.placement.devices)
    # They have no memory to free.
    of_engine._gaps = []


def test_an_engine_without_a_tokenizer_and_one_that_is_closed(model):
    engine, prompt = Engine(model, limits=LIMITS, lazy=True), [1]
    with pytest.raises(ValueError, match="stop texts need .*tokenizer"):
        engine.submit(prompt, SamplingOptions(stop=("x",)))
    engine.submit(prompt, SamplingOptions(max_new_tokens=2, ignore_eos=True)).result()
    for _ in range(2):
        engine.close()
    for call in (lambda: engine.submit(prompt), lambda: engine.generate([prompt]), engine.pause, lambda: engine.update(model)):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            call()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.owned_pages, stats.num_tokens) == (0, 0, 0, 2)
    assert engine.capacity == 9 and not engine.failed


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_engines_in_a_row_free_their_memory(model):
    """An old engine has its variable until the new one is made; objects of the user's that nobody holds are freed too."""

    class Cycle:
        def __init__(self):
            self.itself = self

    Engine(model, limits=LIMITS, lazy=True).close()
    before, engine = live_bytes(), None
    for _ in range(3):
        cycle, old = weakref.ref(Cycle()), engine and weakref.ref(engine)
        engine = Engine(model, limits=LIMITS, keep_experts=True, lazy=True)
        handle = engine.submit([1, 2, 3], SamplingOptions(max_new_tokens=2))
        assert live_bytes() > before
        handle.result()
        engine.close()
        # The engine and its handle are still there.
        assert live_bytes() == before and cycle() is None and (old is None or old() is None)


def test_an_engine_that_nobody_holds_ends(model):
    """Once its requests have ended: their handles hold it."""
    before, engine = live_bytes(), Engine(model, limits=LIMITS, lazy=True)
    handle = engine.submit([1, 2, 3], SamplingOptions(max_new_tokens=5, ignore_eos=True))
    thread = engine._loop._thread
    del engine
    gc.collect()
    assert len(handle.result()[0].tokens) == 5
    del handle
    assert served.comes_true(lambda: live_bytes() == before and not thread.is_alive())


def copy_of(model):
    """Returns a model with arrays of its own; `nnx.clone` would share them."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(jnp.copy, state))


def donated(model):
    """Returns a model of the same numbers, in other arrays; the model's own are deleted, as by a step of training."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.jit(partial(jax.tree.map, jnp.copy), donate_argnums=0)(state))


def test_results_come_when_their_request_ends(engine):
    """Short answers come first; a closed iterator aborts the others."""
    prompts = prompts_of(seeds.rng(), 3, 9, 5)
    each = [SamplingOptions(max_new_tokens=new, ignore_eos=True) for new in (200, 4, 30)]
    coming = engine.as_completed(prompts, each)
    assert [next(coming)[0] for _ in range(2)] == [1, 2]
    coming.close()
    assert served.comes_true(lambda: not engine._loop._open)
    handles = [engine.submit(prompt, options) for prompt, options in zip(prompts, each, strict=True)]
    assert [index for index, _ in as_completed(handles)] == [1, 2, 0]
    assert [index for index, _ in as_completed(handles)] == [0, 1, 2]


def test_a_completions_seed_draws_it_alone(engine):
    (prompt,) = prompts_of(seeds.rng(), 9)
    options = SamplingOptions(max_new_tokens=8, ignore_eos=True, temperature=2.0, n=2)
    (found,) = engine.generate([prompt], options)
    ((alone,),) = engine.generate([prompt], replace(options, seed=found[1].seed, n=1))
    assert alone.tokens == found[1].tokens
    assert [one.seed for one in found] == seeds_of(replace(options, seed=found[0].seed))


def test_an_engine_sleeps_while_its_model_is_trained(model):
    """Memory is freed, requests are refused, and the update starts with empty pages and compiles nothing."""
    before = live_bytes()
    engine, prompt = Engine(own := copy_of(model), limits=LIMITS, keep_experts=True, lazy=True), [1, 2, 3] * 30
    options = SamplingOptions(max_new_tokens=5, ignore_eos=True, return_experts=True, presence_penalty=1.0)
    with closing(engine):
        (expected,) = engine.generate([prompt], options)[0]
        engine.pause()
        handle = engine.submit(prompt, options)
        with pytest.raises(RuntimeError, match="sleeps only without requests; 1 sequences run or wait"):
            engine.sleep()
        engine.resume()
        assert handle.result()[0].cached_tokens == 64
        pages = sum(array.nbytes for array in jax.tree.leaves(engine._loop.device.state))
        for version in (1, 2):
            for _ in range(2):
                engine.sleep()
            kept = live_bytes() - before - sum(array.nbytes for array in jax.tree.leaves(nnx.state(own)))
            # The results of the last steps stay.
            assert kept < pages / 10
            engine.drop_prefixes()
            for call in (lambda: engine.submit(prompt), lambda: engine.generate([prompt])):
                with pytest.raises(RuntimeError, match="the engine sleeps: call engine.update"):
                    call()
            own = donated(own)
            with compilations.counted() as compiled:
                engine.update(own)
                (found,) = engine.generate([prompt], options)[0]
            assert not compiled and found.tokens == expected.tokens
            np.testing.assert_array_equal(found.experts, expected.experts)
            assert (found.weights_version, found.cached_tokens) == (version, 0)
        engine.sleep()
        with pytest.raises(ValueError, match="the new weights must be .*: num_hidden_layers is 2; the engine has 1"):
            engine.update(moe_jax.from_config(replace(model.config, num_hidden_layers=2), dtype=model.dtype, rngs=nnx.Rngs(0)))
        with pytest.raises(RuntimeError, match="the engine sleeps"):
            engine.submit(prompt)


def test_an_engine_is_closed_while_it_sleeps(model):
    before, engine = live_bytes(), Engine(model, limits=LIMITS, lazy=True)
    engine.sleep()
    engine.close()
    assert live_bytes() == before


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_training_step_that_donates_the_model(model, monkeypatch, meanwhile):
    """Requests that run are told, later ones too, and an update revives the engine; also if a step was just being started."""
    engine, prompt = Engine(own := copy_of(model), limits=LIMITS, lazy=True), [1, 2, 3]
    options = SamplingOptions(max_new_tokens=5, ignore_eos=True)
    before = engine.generate([prompt], options)[0][0].tokens
    trained, launch = [], engine._loop.device.launch

    def launch_after_donation(plans):
        if not trained:
            trained.append(donated(own))
        return launch(plans)

    engine.pause()
    running = [engine.submit(prompt, SamplingOptions(max_new_tokens=200)) for _ in range(3)]
    if meanwhile:
        monkeypatch.setattr(engine._loop.device, "launch", launch_after_donation)
    else:
        trained.append(donated(own))
    engine.resume()
    for handle in running:
        with pytest.raises(RuntimeError, match="most likely because a training step donated them: call engine.update"):
            handle.result()
    for call in (lambda: engine.submit(prompt), lambda: engine.generate([prompt])):
        with pytest.raises(RuntimeError, match="call engine.update"):
            call()
    with pytest.raises(ValueError, match="model has arrays that were deleted"):
        engine.update(own)
    assert not engine.failed and engine.stats().owned_pages == 0
    engine.update(trained[0])
    assert engine.generate([prompt], options)[0][0].tokens == before
    engine.close()


def test_a_training_step_in_a_pause(model):
    """Requests that run continue after the update."""
    engine, prompt = Engine(own := copy_of(model), limits=LIMITS, lazy=True), [1, 2, 3]
    options = SamplingOptions(max_new_tokens=60, ignore_eos=True)
    expected = engine.generate([prompt], options)[0][0].tokens
    handle = engine.submit(prompt, options)
    next(handle.events())
    engine.pause()
    engine.update(donated(own))
    engine.resume()
    assert handle.result()[0].tokens == expected
    engine.close()


def test_an_interrupted_call_aborts_its_requests(model, monkeypatch):
    engine = Engine(model, limits=LIMITS, lazy=True)
    options = SamplingOptions(max_new_tokens=200, ignore_eos=True)

    def interrupt(handles):
        assert len(handles) == len(engine._loop._open) == 6
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_jax.serving.engine.as_completed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3]] * 6, options)
    assert served.comes_true(lambda: not engine._loop._open)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.owned_pages) == (0, 0, 0) and not engine.failed
    engine.close()


def test_a_lazy_engine_compiles_what_requests_need(model, caplog):
    caplog.set_level("INFO", "moe_jax")
    engine = Engine(model, limits=LIMITS, lazy=True)
    assert "each of 4 programs is compiled when a request first needs it" in caplog.text
    assert "compiled program" not in caplog.text
    engine.generate([[1, 2, 3]], SamplingOptions(max_new_tokens=3, ignore_eos=True))
    told = [line for line in caplog.messages if line.startswith("compiled program")]
    assert len(told) == len(engine._loop.device._programs) == 2
    engine.close()
