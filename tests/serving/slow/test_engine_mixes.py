"""Requests that come at random from several threads, and run short of pages, have the tokens that each has alone."""

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import moe_jax
from moe_jax.serving.engine import Engine
from moe_jax.serving.request import EngineLimits, SamplingOptions
from tests.helpers import seeds
from tests.helpers.hf_reference import load_ours, reference

LIMITS = EngineLimits(
    max_sequences=4, max_tokens_per_step=64, max_chunks_per_step=3, max_length=256, num_pages=6, max_waiting=100
)

NEW_TOKENS = 80
"""Longest answer. Each of the prompts below needs one more page on the way, or two."""

LENGTHS = 3, 60, 120, 170
"""Lengths of prompts: few, because `generate` compiles for each."""

DRAWS = [
    SamplingOptions(temperature=1.0, seed=1),
    SamplingOptions(temperature=0.7, top_p=0.9, seed=2, n=2, logprobs=2),
    SamplingOptions(temperature=1.3, top_k=20, presence_penalty=0.5, repetition_penalty=1.2, seed=3),
]


@pytest.fixture(scope="module")
def model():
    return load_ours(reference("qwen3_moe", 0, num_hidden_layers=1, max_position_embeddings=512))


@pytest.fixture(scope="module")
def engine(model):
    engine = Engine(model, limits=LIMITS)
    yield engine
    engine.close()


@pytest.mark.thorough
@pytest.mark.parametrize("disturbed", [False, True])
def test_a_mix_equals_each_request_alone(model, engine, disturbed):
    """Greedy tokens equal `generate`. Disturbances are pauses, and updates to the same weights."""
    rng = seeds.rng()
    known = known_answers(rng, model, engine)
    before = engine.stats()
    over = threading.Event()
    with ThreadPoolExecutor(5) as pool:
        disturbing = pool.submit(disturb, engine, model, rng.spawn(1)[0], over) if disturbed else None
        clients = [pool.submit(send_and_check, engine, own, known, 30 if disturbed else 12) for own in rng.spawn(4)]
        try:
            num_aborted = sum(client.result(timeout=200) for client in clients)
        finally:
            over.set()
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.owned_pages == 0
    assert stats.free_pages + stats.cached_pages == LIMITS.num_pages - 1
    # Else the mix has missed its purpose.
    assert num_aborted and stats.num_preemptions > before.num_preemptions
    assert disturbing is None or (disturbing.result() and stats.weights_version > before.weights_version)


def known_answers(rng, model, engine):
    """Pairs of (prompt, options) and the tokens of each continuation, computed alone. Half of the prompts begin alike."""
    beginning = rng.integers(0, 97, max(LENGTHS))
    prompts = [rng.integers(0, 97, length) for length in LENGTHS for _ in range(4)]
    for prompt in prompts[::2]:
        prompt[:-2] = beginning[: len(prompt) - 2]
    known = []
    for number, prompt in enumerate(prompt.tolist() for prompt in prompts):
        if number % 4 == 3:
            options = dataclasses.replace(DRAWS[number // 4 % len(DRAWS)], max_new_tokens=NEW_TOKENS, ignore_eos=True)
            known.append((prompt, options, [one.tokens for one in engine.submit(prompt, options).result()]))
        else:
            wanted = 0 if number % 4 == 1 else None
            options = SamplingOptions(max_new_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=wanted)
            known.append((prompt, options, [moe_jax.generate(model, prompt, max_new_tokens=NEW_TOKENS)]))
    return known


def send_and_check(engine, rng, known, num_requests):
    """Sends requests, a few at a time, and checks their tokens; returns how many were aborted before their end."""
    num_aborted = 0
    while num_requests > 0:
        sent = []
        for choice in rng.integers(0, len(known), rng.integers(1, 5)):
            prompt, options, expected = known[choice]
            options = dataclasses.replace(options, max_new_tokens=int(rng.choice([NEW_TOKENS, rng.integers(1, NEW_TOKENS)])))
            sent.append((engine.submit(prompt, options), options, expected, rng.random() < 0.2))
            time.sleep(rng.exponential(0.01))
        for handle, options, expected, aborts in sent:
            if aborts:
                time.sleep(rng.exponential(0.02))
                handle.abort()
            tokens = [[] for _ in expected]
            for event in handle.events():
                tokens[event.index] += [] if event.token is None else [event.token]
            for one, completion, wanted in zip(tokens, handle.completions, expected, strict=True):
                assert completion.finish_reason == "length" or (aborts and completion.finish_reason == "abort")
                assert completion.finish_reason == "abort" or len(one) == options.max_new_tokens
                assert one == completion.tokens == wanted[: len(one)]
                if options.prompt_logprobs is not None and one:
                    # Each token once, in order, also where a preempted sequence was computed again.
                    assert [*map(list, completion.prompt_logprobs[1:])] == [[token] for token in handle.prompt[1:]]
                num_aborted += completion.finish_reason == "abort"
        num_requests -= len(sent)
    return num_aborted


def disturb(engine, model, rng, over):
    """Pauses, resumes and updates until all is over; returns the number of times."""
    num_times = 0
    while not over.wait(rng.exponential(0.05)):
        engine.pause()
        if rng.random() < 0.5:
            engine.update(model)
        time.sleep(rng.exponential(0.01))
        engine.resume()
        num_times += 1
    return num_times
