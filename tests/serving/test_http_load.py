"""Many clients at once, floods, clients that leave or read slowly, and the end of the server."""

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import httpx
import openai
import pytest
import served
from fake_engine import LIMITS, FakeEngine

from moe_jax.serving.request import EngineLimits

LONG = dict(model="tiny", prompt="abcdefgh", max_tokens=400)


def slow_engine(**limits) -> FakeEngine:
    """An engine that answers without an end, 100 tokens a second."""
    chosen = EngineLimits(**{**vars(LIMITS), **limits})
    return FakeEngine(chosen, repeats=1000, step_seconds=0.01)


@pytest.mark.parametrize("requests", [256, pytest.param(1000, marks=pytest.mark.thorough)])
def test_64_clients(requests):
    limits = EngineLimits(**{**vars(LIMITS), "max_sequences": 16, "max_waiting": 400})
    with served.serve(FakeEngine(limits)) as running:
        client = running.openai()

        def work(number: int) -> bool:
            prompt = f"request {number}: " + "x" * (number % 30)
            options = dict(model="tiny", max_tokens=100, seed=number)
            if number % 4 == 0:
                messages = [{"role": "user", "content": prompt}]
                found = client.chat.completions.create(messages=messages, **options)
                return found.choices[0].message.content == f"user\n{prompt}"
            if number % 4 == 1:
                pieces = client.completions.create(prompt=prompt, stream=True, **options)
                return "".join(piece.choices[0].text for piece in pieces) == prompt
            if number % 4 == 2:
                found = client.completions.create(prompt=prompt, n=2, stop=["q"], **options)
                return [choice.text for choice in found.choices] == ["re", "re"]
            with pytest.raises(openai.BadRequestError):
                client.completions.create(prompt=prompt, **options | {"max_tokens": 9999})
            return True

        with ThreadPoolExecutor(64) as pool:
            assert all(pool.map(work, range(requests)))
        assert served.is_idle(running)
        assert f'path="/v1/completions",status="200"}} {requests // 2}.0' in running.get("/metrics").text


def test_more_texts_than_ever_wait_are_refused_for_good():
    with served.serve(slow_engine(max_sequences=2, max_tokens_per_step=2, max_waiting=4)) as running:
        with pytest.raises(openai.BadRequestError, match="n times the number of prompts must be at most 6"):
            running.openai().completions.create(model="tiny", prompt=["x"] * 7)


def test_a_flood_gets_429_and_hurts_no_other_request():
    with served.serve(slow_engine(max_sequences=4, max_tokens_per_step=4, max_waiting=4)) as running:
        client = running.openai()
        first = client.completions.create(**LONG | {"max_tokens": 100}, stream=True)
        text = next(first).choices[0].text

        def work(_) -> int:
            try:
                client.completions.create(**LONG | {"max_tokens": 20})
            except openai.RateLimitError as error:
                assert error.response.headers["retry-after"] == "1" and error.code == "queue_full"
                return 429
            return 200

        with ThreadPoolExecutor(40) as pool:
            statuses = Counter(pool.map(work, range(100)))
        assert statuses[429] > 20 and statuses[200] >= 7 and statuses.total() == 100
        text += "".join(piece.choices[0].text for piece in first)
        # Each time through the prompt is followed by an end that this request did not ask to ignore.
        assert text == ("abcdefgh" * 13)[:100]
        assert served.comes_true(lambda: served.is_idle(running))


def test_several_prompts_are_taken_whole_or_not_at_all():
    with served.serve(slow_engine(max_sequences=2, max_tokens_per_step=2, max_waiting=2)) as running:
        first = running.openai().completions.create(**LONG, stream=True)
        next(first)
        with pytest.raises(openai.RateLimitError):
            running.openai().completions.create(**LONG | {"prompt": ["a"] * 4})
        assert served.comes_true(lambda: sum(handle.completions[0] is None for handle in running.engine.handles) == 1)
        first.response.close()
        assert served.comes_true(lambda: served.is_idle(running))
        assert running.openai().completions.create(**LONG | {"max_tokens": 3}).choices[0].text == "abc"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(stream, caplog):
    caplog.set_level("INFO", "moe_jax.serving")
    with served.serve(slow_engine()) as running:
        if stream:
            pieces = running.openai().completions.create(**LONG | {"n": 3}, stream=True)
            next(pieces)
            pieces.response.close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(running.url + "/v1/completions", json=LONG | {"n": 3}, timeout=0.3)
        assert served.comes_true(lambda: served.is_idle(running))
        assert all(handle.completions[0].finish_reason == "abort" for handle in running.engine.handles)
        assert len(running.engine.handles[0].completions[0].tokens) < 200
        assert served.comes_true(lambda: "POST /v1/completions 499" in caplog.text)


def test_a_stop_text_frees_the_place_of_its_choice_alone():
    with served.serve(slow_engine()) as running:
        found = running.openai().completions.create(
            **LONG | {"prompt": ["abc", "xyz"], "stop": "ca", "max_tokens": 30},
            extra_body={"ignore_eos": True, "stop_token_ids": []},
        )
        assert [choice.finish_reason for choice in found.choices] == ["stop", "length"]
        assert running.engine.stats().num_tokens < 30 + 15


def test_readers_that_do_not_read_hold_nobody_up():
    engine = FakeEngine(EngineLimits(**{**vars(LIMITS), "max_length": 300_000, "num_pages": 10_000}), repeats=1)
    with served.serve(engine, request_seconds=3) as running:
        body = {"prompt": "a" * 3000, "max_tokens": 200_000, "ignore_eos": True, "stream": True, "n": 8}
        with running.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(served.request_bytes(body))
            assert served.comes_true(lambda: engine.stats().running == 8)
            begun = time.monotonic()
            assert running.openai().completions.create(model="tiny", prompt="b").choices[0].text == "b"
            assert time.monotonic() - begun < 2
            # Its time ends although it never reads.
            assert served.comes_true(lambda: served.is_idle(running))


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends_with_504(stream):
    with served.serve(slow_engine(), request_seconds=0.3) as running:
        if stream:
            with pytest.raises(openai.APIError, match="the request took longer than 0.3 seconds"):
                list(running.openai().completions.create(**LONG, stream=True))
        else:
            with pytest.raises(openai.InternalServerError, match="longer than 0.3 seconds") as error:
                running.openai().completions.create(**LONG)
            assert error.value.status_code == 504
        assert served.comes_true(lambda: served.is_idle(running))


def test_broken_connections_and_noise_leave_nothing_behind():
    with served.serve(slow_engine()) as running:
        whole = served.request_bytes(LONG | {"stream": True})
        for sent in (b"", b"\x00\xff" * 50, b"GET", whole[:50], whole[:-3], whole, whole + whole):
            for _ in range(5):
                with running.connect() as connection:
                    connection.sendall(sent)
        assert served.comes_true(lambda: served.is_idle(running))
        assert running.get("/health").status_code == 200


def test_connections_on_which_no_request_comes_are_closed(monkeypatch):
    """Silent ones, and those whose head comes byte by byte; one that works is not, whenever its head and its body come."""
    monkeypatch.setattr("moe_jax.serving.http.server.KEEP_ALIVE_SECONDS", 0.4)
    whole = served.request_bytes(LONG | {"max_tokens": 20})
    with served.serve(FakeEngine(repeats=100, step_seconds=0.03)) as running, contextlib.ExitStack() as stack:
        silent, dripping, behind, slow = (stack.enter_context(running.connect()) for _ in range(4))
        behind.sendall(served.request_bytes({"prompt": "a", "max_tokens": 1}))
        assert behind.recv(10_000).startswith(b"HTTP/1.1 200")
        behind.sendall(b"GET /health")
        slow.sendall(whole[:20])
        for byte in whole[:3]:
            dripping.sendall(bytes([byte]))
            time.sleep(0.1)
        slow.sendall(whole[20:-3])
        assert [silent.recv(1), dripping.recv(1), behind.recv(1)] == [b""] * 3
        slow.sendall(whole[-3:])
        assert b"200 OK" in slow.recv(10_000)
        assert not [each for each in running.server.server_state.connections if each._deadline is not None]


@pytest.mark.thorough
def test_idle_connections_outlive_those_of_clients():
    """httpx drops a connection that was idle for 5 seconds; a server that closes it then would lose its next request."""
    with served.serve() as running, contextlib.closing(HTTPConnection(running.url.removeprefix("http://"))) as connection:
        connection.request("GET", "/health")
        connection.getresponse().read()
        time.sleep(5.5)
        # It raises if the server has closed the connection.
        connection.request("GET", "/health")
        assert connection.getresponse().read()


def test_nothing_is_kept_of_requests_that_have_ended():
    with served.serve() as running:
        client = running.openai()

        def objects() -> int:
            running.engine.handles.clear()
            running.engine.submitted.clear()
            gc.collect()
            return len(gc.get_objects())

        def some(number: int) -> None:
            for _ in range(number):
                client.completions.create(model="tiny", prompt="hello", max_tokens=3)
                list(client.completions.create(model="tiny", prompt="hello", max_tokens=3, stream=True))
                running.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"})

        some(10)
        before = objects()
        some(30)
        # A request that stayed would keep dozens of objects.
        assert objects() - before < 60


def test_running_requests_finish_before_a_stop(caplog):
    caplog.set_level("INFO", "moe_jax.serving")
    with served.serve(slow_engine(), shutdown_seconds=20) as running:
        pieces = running.openai().completions.create(**LONG | {"max_tokens": 100}, stream=True)
        text = next(pieces).choices[0].text
        # Open before the end begins: later ones find no server.
        with httpx.Client(base_url=running.url) as client:
            client.get("/health")
            running.stop()
            text += "".join(piece.choices[0].text for piece in pieces)
        assert len(text) == 100
        running.thread.join(20)
    assert running.engine.closed
    messages = [record.getMessage() for record in caplog.records]
    assert "stopping: 1 running requests have 20 seconds to finish" in messages
    assert messages[-1] == "stopped: 1 requests finished, 0 were aborted"


@pytest.mark.parametrize("twice", [False, True])
def test_the_deadline_or_a_second_signal_aborts(twice, caplog):
    caplog.set_level("INFO", "moe_jax.serving")
    with served.serve(slow_engine(), shutdown_seconds=100 if twice else 0.3) as running:
        pieces = running.openai().completions.create(**LONG, stream=True)
        next(pieces)
        running.stop()
        if twice:
            running.stop()
        with pytest.raises(openai.APIError, match="the request was aborted"):
            list(pieces)
        running.thread.join(20)
    assert caplog.records[-1].getMessage() == "stopped: 0 requests finished, 1 were aborted"


SCRIPT = """
import logging, sys
sys.path[:0] = [{tests!r}, {tests!r} + "/serving", {tests!r} + "/train"]
import served
from fake_engine import FakeEngine
from moe_jax.serving.http.server import Server, bind
from moe_jax.serving.http.service import Service
from moe_jax.serving.http.service import ServerSettings
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
engine = FakeEngine(repeats=1000, step_seconds=0.01)
settings = ServerSettings("tiny", shutdown_seconds={seconds})
Server(Service(engine, served.DEFAULTS, settings)).run([bind("127.0.0.1", 0)])
print("left", engine.closed)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_a_signal_ends_the_process_cleanly(number):
    tests = str(Path(__file__).parents[1])
    script = SCRIPT.format(tests=tests, seconds=20)
    environment = os.environ | {"PYTHONPATH": str(Path(tests).parent)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as process:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        pieces = client.completions.create(**LONG | {"max_tokens": 60}, stream=True)
        text = next(pieces).choices[0].text
        threading.Timer(0.1, process.send_signal, [number]).start()
        text += "".join(piece.choices[0].text for piece in pieces)
        output = process.stdout.read()
    assert len(text) == 60 and process.returncode == 0
    assert "stopping: 1 running requests have 20 seconds to finish" in output
    assert output.splitlines()[-2:] == ["stopped: 1 requests finished, 0 were aborted", "left True"]
