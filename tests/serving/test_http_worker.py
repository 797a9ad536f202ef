"""A tokenizer or a device that does not end holds up neither its client for ever, nor the end of the server."""

import asyncio
import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, models

from moe_jax.serving.http.service import LONG_BODY, Worker
from tests.helpers import served
from tests.helpers.fake_engine import FakeEngine


@pytest.fixture
def endless(monkeypatch):
    """POST /tokenize does not end while the test runs."""
    ended = threading.Event()
    monkeypatch.setattr("moe_jax.serving.http.app.completion_tokens", lambda *_: ended.wait(60))
    yield
    ended.set()


def test_a_tokenizer_that_does_not_end_holds_up_no_stop(endless, caplog):
    """Its client, and one that waits for the tokenizer, get an error when the time to finish is over."""
    with served.serve(shutdown_seconds=0.2) as running, ThreadPoolExecutor(2) as pool:
        answers = []
        for count, path in enumerate(("/tokenize", "/v1/completions"), 1):
            answers.append(pool.submit(running.post, path, json={"prompt": "x"}))
            # The second would end if it came to the tokenizer first.
            assert served.comes_true(lambda count=count: len(running.service._waits) == count)
        running.stop()
        running.thread.join(10)
        assert not running.thread.is_alive()
        assert all(answer.result().status_code == 503 for answer in answers)
    assert "the tokenizer still works on a text that nobody waits for" in caplog.text


def test_a_tokenizer_that_does_not_end_is_given_up(endless):
    with served.serve(request_seconds=0.2) as running:
        assert running.post("/tokenize", json={"prompt": "x"}).status_code == 504


def test_a_long_text_holds_up_no_short_one(monkeypatch):
    """The tokenizer needs seconds for megabytes."""
    may_end, begun = threading.Event(), threading.Event()
    tokenize = served.tokenizer().__class__.__call__

    def slow_at_long_texts(tokenizer, text, **options):
        if len(text) > LONG_BODY:
            begun.set()
            may_end.wait(30)
        return tokenize(tokenizer, text, **options)

    monkeypatch.setattr(served.tokenizer().__class__, "__call__", slow_at_long_texts)
    with served.serve() as running, ThreadPoolExecutor(1) as pool:
        long = pool.submit(running.post, "/tokenize", json={"prompt": "a" * 2 * LONG_BODY})
        assert begun.wait(20)
        answer = running.post("/v1/completions", json={"prompt": "ab"})
        may_end.set()
        assert answer.json()["choices"][0]["text"] == "ab"
        assert long.result(30).json()["count"] == 2 * LONG_BODY


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": ["a", "b" * 100_000]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "b" * 100_000}]}),
    ],
)
def test_a_text_that_cannot_fit_is_never_tokenized(monkeypatch, path, body):
    def tokenize(tokenizer, *_, **__):
        raise AssertionError("tokenized")

    with served.serve() as running:
        monkeypatch.setattr(served.tokenizer().__class__, "__call__", tokenize)
        answer = running.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded" and error["param"] in body
    assert re.fullmatch(r"the text has at least \d+ tokens, which exceed the 512 of a request", error["message"])


def test_a_tokenizer_without_letters_is_served():
    raw = Tokenizer(models.BPE({"0": 0, "1": 1}, []))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
    with served.serve(FakeEngine(tokenizer=tokenizer)) as running:
        assert running.post("/tokenize", json={"prompt": "01"}).json()["tokens"] == [0, 1]


def test_a_device_that_hangs_holds_up_no_stop(monkeypatch, caplog):
    monkeypatch.setattr("moe_jax.serving.http.service.CLOSE_SECONDS", 0.1)
    engine, ended = FakeEngine(), threading.Event()
    engine.close = lambda drain: ended.wait(60)
    with served.serve(engine) as running:
        running.stop()
        running.thread.join(10)
        assert not running.thread.is_alive()
    ended.set()
    assert "a step of the engine does not end: after 0.1 seconds the server stops without it" in caplog.text


def test_a_cancelled_call_is_not_kept():
    """After a function that does not end it would stay, with all that it holds."""
    may_end, worker = threading.Event(), Worker("worker")

    class Body:
        """Data that a call holds."""

    def holding(body):
        return lambda: body

    async def cancel_one():
        first = asyncio.create_task(worker.run(may_end.wait))
        body = Body()
        kept, second = weakref.ref(body), asyncio.create_task(worker.run(holding(body)))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        assert second.cancelled()
        del body, second
        gc.collect()
        assert kept() is None
        may_end.set()
        assert await first

    asyncio.run(cancel_one())
    assert worker.close(10)


def test_a_process_ends_whatever_its_worker_does():
    script = """
import asyncio, time
from moe_jax.serving.http.service import Worker
async def main():
    worker = Worker("worker")
    assert await worker.run(lambda: 7) == 7
    try:
        await asyncio.wait_for(worker.run(lambda: time.sleep(60)), 0.1)
    except TimeoutError:
        print("ended", worker.close(0.1))
asyncio.run(main())
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=30)
    assert (found.returncode, found.stdout, found.stderr) == (0, "ended False\n", "")
