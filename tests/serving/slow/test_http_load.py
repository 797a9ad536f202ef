"""Many clients at once, slow readers, and what is left of requests that have ended."""

import contextlib
import gc
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import openai
import pytest

from moe_jax.serving.request import EngineLimits
from tests.helpers import served
from tests.helpers.fake_engine import LIMITS, FakeEngine


def test_64_clients():
    requests = 256
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
