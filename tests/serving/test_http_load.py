"""Many clients at once, floods, clients that leave or read slowly, and the end of the server."""

import contextlib
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from moe_jax.serving.request import EngineLimits
from tests.helpers import served
from tests.helpers.fake_engine import LIMITS, FakeEngine

LONG = dict(model="tiny", prompt="abcdefgh", max_tokens=400)


def slow_engine(**limits) -> FakeEngine:
    """An engine that answers without an end, 100 tokens a second."""
    chosen = EngineLimits(**{**vars(LIMITS), **limits})
    return FakeEngine(chosen, repeats=1000, step_seconds=0.01)


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
    assert messages[-1] == "stopped: 1 running requests finished, 0 were aborted"


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
    assert caplog.records[-1].getMessage() == "stopped: 0 running requests finished, 1 were aborted"
