"""Requests over HTTP to an engine with a model: each gets `generate`'s tokens, next to any others, and none stays."""

import asyncio
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import jax
import numpy as np
import openai
import pytest
import torch
import transformers

import moe_jax
from moe_jax.serving.engine import Engine
from moe_jax.serving.request import EngineLimits
from tests.helpers import served, tiny
from tests.helpers.hf_reference import reference

LIMITS = EngineLimits(
    max_sequences=16, max_tokens_per_step=64, max_chunks_per_step=4, max_length=300, num_pages=40, max_waiting=48
)
NEW_TOKENS = 80
"""Longest answer."""

LENGTHS = 5, 40, 60, 100, 125, 180
"""Lengths of prompts, in tokens: each is a character, because the vocabulary ends after printable ASCII."""

TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}>"
GREEDY = dict(model="tiny", temperature=0, extra_body={"ignore_eos": True})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("served")
    reference("qwen3_moe", 0, num_hidden_layers=2, max_position_embeddings=512).save_pretrained(made)
    tiny.tokenizer(TEMPLATE).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def model(folder):
    return moe_jax.from_pretrained(folder, dtype="float32")


@pytest.mark.thorough
@pytest.mark.timeout(150)
def test_a_thousand_requests_of_64_clients(model):
    """Good, wrong, slow, broken and far too many ones. Pages, requests and memory are free at the end."""
    engine = Engine(model, limits=LIMITS, tokenizer=tiny.tokenizer(TEMPLATE))
    clients = Clients(known_answers(model, engine.tokenizer))
    with served.serve(engine) as running:
        asyncio.run(clients.send(running.url, range(250)))
        assert served.comes_true(lambda: served.is_idle(running))
        before, arrays = resident_bytes(), len(jax.live_arrays())
        asyncio.run(clients.send(running.url, range(250, 1000)))
        assert served.comes_true(lambda: served.is_idle(running))
        after, stats = resident_bytes(), engine.stats()
        assert len(jax.live_arrays()) == arrays
        metrics = running.get("/metrics").text
    print(clients.counts, stats, f"memory {before / 1e6:.0f} MB, then {after / 1e6:.0f} MB")
    assert stats.owned_pages == 0 and stats.free_pages + stats.cached_pages == LIMITS.num_pages - 1
    assert "moe_jax_engine_running 0.0" in metrics and "moe_jax_engine_waiting 0.0" in metrics
    # A request that stayed would keep its prompt, handle and answer: 20 kB and more.
    assert after - before < 20e6
    # Else the mix has missed its purpose.
    assert clients.counts["429"] > 100 and clients.counts["left"] > 50


@pytest.mark.thorough
def test_sigterm_lets_running_and_waiting_requests_end(folder, model):
    sizes = "--max-sequences 4 --max-tokens-per-step 64 --max-length 300 --num-pages 24".split()
    command = [sys.executable, "-m", "moe_jax.cli", "serve", str(folder), "--port", "0", "--name", "tiny", *sizes]
    options = "--dtype float32 --shutdown-seconds 60".split()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    answers = known_answers(model, tiny.tokenizer(TEMPLATE))

    async def stream(client, prompt, first_came):
        pieces = await client.completions.create(prompt=prompt, max_tokens=NEW_TOKENS, stream=True, **GREEDY)
        text = ""
        async for piece in pieces:
            text += piece.choices[0].text
            first_came.set()
        return text

    async def all_streams(url, process):
        first_came = asyncio.Event()
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            prompts = [prompt for prompt in answers if isinstance(prompt, str)] * 2
            streams = [asyncio.create_task(stream(client, prompt, first_came)) for prompt in prompts]
            await first_came.wait()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.gather(*streams) == [text_of(answers[prompt]) for prompt in prompts]
            return len(prompts)

    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment) as process:
        url = next(found[0] for line in process.stderr if (found := re.search(r"http://\S+", line)))
        count = asyncio.run(all_streams(url, process))
        log = process.stderr.read()
    assert process.returncode == 0
    assert f"stopping: {count} running requests have 60 seconds" in log
    assert f"stopped: {count} running requests finished, 0 were aborted" in log


def test_scores_are_those_of_transformers(folder, model):
    """A continuation's log-probability, as lm-eval asks for it, and the same request with ids instead of a text."""
    engine = Engine(model, limits=LIMITS, tokenizer=tiny.tokenizer(TEMPLATE), lazy=True)
    text = "The-answer-is-blue,as-it-was."
    ids = engine.tokenizer(text)["input_ids"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
    with served.serve(engine) as running:
        client = running.openai()
        options = dict(model="tiny", temperature=0, echo=True, logprobs=1, extra_body={"return_token_ids": True})
        found = [client.completions.create(**options, prompt=prompt, max_tokens=1).choices[0] for prompt in (text, ids)]
        scored = client.completions.create(**options, prompt=ids, max_tokens=0).choices[0]
    for choice in (*found, scored):
        assert choice.prompt_token_ids == ids
        new = [choice.logprobs.token_logprobs[len(ids)]] if choice is not scored else []
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(
            [*expected[range(len(ids) - 1), ids[1:]], *(expected[-1].max() for _ in new)], abs=2e-4
        )
        likeliest = [max(tops.values()) for tops in choice.logprobs.top_logprobs[1 : len(ids)]]
        assert likeliest == pytest.approx(expected[:-1].max(-1), abs=2e-4)


class Clients:
    """Clients that send a mix of requests, and check each answer.

    `answers`: the result of `known_answers`.
    """

    def __init__(self, answers):
        self.answers = answers
        self.drawn = {}
        self.counts = Counter()

    async def send(self, url, numbers):
        """Sends a request for each number, 64 at a time."""
        work = iter(numbers)
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=100) as self.client,
            httpx.AsyncClient(base_url=url, timeout=100) as self.raw,
        ):
            async with asyncio.TaskGroup() as group:
                for _ in range(64):
                    group.create_task(self._send_each(work))
        # Connections that were told to close do so in the loop's next turns.
        await asyncio.sleep(0.2)

    async def _send_each(self, work):
        kinds = [self.whole] * 4 + [self.streamed] * 5 + [self.chat] * 3 + [self.several, self.draw, self.slow]
        kinds += [self.leave_stream, self.leave_answer, self.malformed, self.wrong, self.flood]
        for number in work:
            rng = np.random.default_rng(number)
            await kinds[number % len(kinds)](rng)
            self.counts["requests"] += 1

    async def whole(self, rng):
        prompt, count = self._pick(rng)
        found = await self._taken(lambda: self.client.completions.create(prompt=prompt, max_tokens=count, **GREEDY))
        self._check(found.choices[0].text, prompt, count)
        assert found.usage.completion_tokens == count and found.choices[0].finish_reason == "length"

    async def streamed(self, rng, pause=0.0):
        prompt, count = self._pick(rng)
        options = dict(prompt=prompt, max_tokens=count, stream=True, stream_options={"include_usage": True})
        pieces = await self._taken(lambda: self.client.completions.create(**options, **GREEDY))
        text = ""
        async for piece in pieces:
            text += piece.choices[0].text if piece.choices else ""
            await asyncio.sleep(pause)
        self._check(text, prompt, count)
        assert piece.usage.completion_tokens == count

    async def slow(self, rng):
        await self.streamed(rng, pause=0.03)

    async def chat(self, rng):
        (message, count), streams = self._pick(rng, tuple), rng.random() < 0.5
        options = dict(messages=[{"role": "user", "content": message[0]}], max_tokens=count, stream=streams)
        found = await self._taken(lambda: self.client.chat.completions.create(**options, **GREEDY))
        if streams:
            text = "".join([piece.choices[0].delta.content or "" async for piece in found])
        else:
            text = found.choices[0].message.content
        self._check(text, message, count)

    async def several(self, rng):
        (first, count), (second, _) = self._pick(rng), self._pick(rng)
        options = dict(prompt=[first, second], n=2, max_tokens=count)
        found = await self._taken(lambda: self.client.completions.create(**options, **GREEDY))
        for choice, prompt in zip(found.choices, (first, first, second, second), strict=True):
            self._check(choice.text, prompt, count)

    async def draw(self, rng):
        prompt, count = self._pick(rng)
        seed = int(rng.integers(2))
        options = GREEDY | dict(prompt=prompt, max_tokens=count, temperature=1.0, seed=seed)
        text = (await self._taken(lambda: self.client.completions.create(**options))).choices[0].text
        known = self.drawn.setdefault((prompt, seed), text)
        assert text.startswith(known) or known.startswith(text)
        self.drawn[prompt, seed] = max(text, known, key=len)
        self.counts["drawn"] += 1

    async def leave_stream(self, rng):
        prompt, _ = self._pick(rng)
        options = dict(prompt=prompt, max_tokens=NEW_TOKENS, stream=True, n=2)
        pieces = await self._taken(lambda: self.client.completions.create(**options, **GREEDY))
        await anext(pieces)
        await pieces.close()
        self.counts["left"] += 1

    async def leave_answer(self, rng):
        prompt, _ = self._pick(rng)
        try:
            async with asyncio.timeout(rng.uniform(0, 0.2)):
                await self.client.completions.create(prompt=prompt, max_tokens=NEW_TOKENS, **GREEDY)
        except TimeoutError:
            self.counts["left"] += 1
        except openai.RateLimitError:
            self.counts["429"] += 1

    async def malformed(self, rng):
        content = [b"{", b"", b"\xff\x00", b'{"prompt": "a"', b"[1]", b'{"prompt": NaN}'][rng.integers(6)]
        answer = await self.raw.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
        self.counts["400"] += 1

    async def wrong(self, rng):
        kinds = [({"temperature": "hot"}, 400), ({"n": [1]}, 400), ({"prompt": "a" * 300}, 400), ({"model": "gpt"}, 404)]
        changed, status = kinds[rng.integers(len(kinds))]
        with pytest.raises(openai.APIStatusError) as error:
            await self.client.completions.create(**GREEDY | {"prompt": "a", "max_tokens": 5} | changed)
        assert error.value.status_code == status
        assert error.value.code == {"prompt": "context_length_exceeded", "model": "model_not_found"}.get(*changed)
        self.counts[str(status)] += 1

    async def flood(self, rng):
        """Sends more requests at once than may run and wait, now and then."""
        if rng.random() < 0.9:
            return await self.whole(rng)

        async def one():
            prompt, count = self._pick(rng)
            with contextlib.suppress(openai.RateLimitError):
                found = await self.client.completions.create(prompt=prompt, max_tokens=count, **GREEDY)
                self._check(found.choices[0].text, prompt, count)
                return 200
            return 429

        statuses = Counter(await asyncio.gather(*(one() for _ in range(100))))
        assert statuses[429] >= 100 - LIMITS.max_sequences - LIMITS.max_waiting
        self.counts["flooding"] += 100
        self.counts["429"] += statuses[429]

    async def _taken(self, send):
        """Sends a request until the queue has room for it."""
        while True:
            with contextlib.suppress(openai.RateLimitError):
                return await send()
            self.counts["429"] += 1
            await asyncio.sleep(1)

    def _pick(self, rng, kind=str):
        prompts = [prompt for prompt in self.answers if isinstance(prompt, kind)]
        return prompts[rng.integers(len(prompts))], int(rng.choice([NEW_TOKENS, rng.integers(1, 20)], p=[0.1, 0.9]))

    def _check(self, text, prompt, count):
        assert text == text_of(self.answers[prompt][:count])
        self.counts["checked"] += 1


def known_answers(model, tokenizer):
    """Returns the tokens of `generate` after each prompt, and after the message (a tuple of one) of each conversation.

    Half of the prompts begin alike.
    """
    rng = np.random.default_rng(0)
    letters = np.array([chr(ord("!") + i) for i in range(94)])
    prompts = ["".join(rng.choice(letters, length)) for length in LENGTHS]
    prompts += [prompts[-1][: length - 2] + "".join(rng.choice(letters, 2)) for length in LENGTHS]
    messages = [(prompt,) for prompt in prompts[1:4]]
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for (text,) in messages
    ]
    ids = [tokenizer(text)["input_ids"] for text in [*prompts, *rendered]]
    found = moe_jax.generate(model, ids, max_new_tokens=NEW_TOKENS)
    return dict(zip([*prompts, *messages], found, strict=True))


def text_of(tokens):
    return served.tokenizer().decode(tokens, skip_special_tokens=True)


def resident_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
