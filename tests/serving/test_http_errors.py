"""Wrong requests get the status and the message of OpenAI's API, and reach no engine."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import openai
import pytest

from moe_jax.serving.engine import Engine
from moe_jax.serving.handle import ReplicaFailed, wake
from moe_jax.serving.http.service import ServerSettings
from tests.helpers import served, tiny
from tests.helpers.fake_engine import LIMITS, FakeEngine

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def server():
    with served.serve(max_body_bytes=20_000, max_choices=8) as running:
        yield running


WRONG = [
    (COMPLETION, {}, "prompt must be a text, a list of texts"),
    (COMPLETION, {"prompt": {"a": 1}}, "prompt must be a text"),
    (COMPLETION, {"prompt": ["a", 1]}, "prompt must be a text"),
    (COMPLETION, {"prompt": []}, "prompt must be a text"),
    (COMPLETION, {"prompt": [[]]}, "the prompt is empty"),
    (COMPLETION, {"prompt": ""}, "prompt 0 is empty"),
    (COMPLETION, {"prompt": [9999]}, "the prompt has token 9999, outside the vocabulary of 264"),
    (COMPLETION, {"prompt": [10**30]}, "the prompt must be a flat list of token ids"),
    (COMPLETION, {"prompt": [10**30], "echo": True}, "token 1000000000000000000000000000000 is outside the vocabulary of 264"),
    (COMPLETION, {"prompt": [[1], [-1]], "echo": True}, "token -1 is outside the vocabulary of 264"),
    (COMPLETION, {"prompt": [True, 1]}, "prompt must be a text"),
    (COMPLETION, {"prompt": "a", "temperature": "hot"}, 'temperature must be an integer or a number; got "hot"'),
    (COMPLETION, {"prompt": "a", "temperature": True}, "temperature must be an integer or a number; got true"),
    (COMPLETION, {"prompt": "a", "temperature": 10**400}, "temperature must be a number of at most 64 bits"),
    (COMPLETION, {"prompt": "a", "top_k": 1.5}, "top_k must be an integer"),
    (COMPLETION, {"prompt": "a", "n": 10**6}, "n times the number of prompts must be at most 8"),
    (COMPLETION, {"prompt": ["a"] * 5, "n": 2}, "n times the number of prompts must be at most 8"),
    (COMPLETION, {"prompt": ["a"] * 9}, "prompt has 9 texts"),
    (COMPLETION, {"prompt": "a", "max_tokens": -1}, "max_tokens must be at least 0; got -1"),
    (COMPLETION, {"prompt": "a", "max_tokens": 10**6}, "max_tokens=1000000 exceed the engine's max_length=512"),
    (COMPLETION, {"prompt": "a" * 600}, "a prompt of 600 tokens and the first token of its answer exceed"),
    (COMPLETION, {"prompt": "a", "stop": [""]}, "stop must be at most 16 texts"),
    (COMPLETION, {"prompt": "a", "stop": ["x"] * 17}, "stop must be at most 16 texts"),
    (COMPLETION, {"prompt": "a", "stop": 7}, "stop must be a string or a list"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias must have token ids as its names"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"9999": 1}}, "logit_bias must be a mapping"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"1": "2"}}, "1 must be an integer or a number"),
    (COMPLETION, {"prompt": "a", "logprobs": 1, "echo": True, "stream": True}, "of a prompt cannot be streamed"),
    (COMPLETION, {"prompt": "a", "logprobs": 1, "echo": True, "prompt_logprobs": 2}, "prompt_logprobs can only be logprobs, 1"),
    (COMPLETION, {"prompt": "a", "return_token_ids": 1}, "return_token_ids must be true or false; got 1"),
    (CHAT, {"messages": MESSAGES, "prompt_logprobs": 1, "stream": True}, "of a prompt cannot be streamed"),
    (COMPLETION, {"prompt": "a", "stream": 1}, "stream must be true or false"),
    (COMPLETION, {"prompt": "a", "stream_options": {"x": 1}}, "unknown fields of stream_options: x"),
    (COMPLETION, {"prompt": "a", "stop_token_ids": ["x"]}, "stop_token_ids must be at most 64 integers"),
    (COMPLETION, {"prompt": "a", "best_of": 3}, "best_of can only be n, 1; got 3"),
    (COMPLETION, {"prompt": "a", "messages": [], "what": 1}, "unknown fields: messages, what"),
    (COMPLETION, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1; got 0"),
    (CHAT, {}, "messages must be a list"),
    (CHAT, {"messages": []}, "messages must be a list"),
    (CHAT, {"messages": ["a"]}, "messages must be a list"),
    (CHAT, {"messages": [{"role": "human", "content": "a"}]}, "message 0 has the role 'human'"),
    (CHAT, {"messages": [{"role": "user"}]}, 'message 0 .user. needs a string "content"'),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of the type text"),
    (CHAT, {"messages": MESSAGES, "tools": ["a"]}, "tools must be a list of objects"),
    (CHAT, {"messages": MESSAGES, "tools": [{"a": 1}]}, "the chat template would leave out tools"),
    (
        CHAT,
        {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}},
        "kwargs are values .* chat_template cannot be",
    ),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"mod": 1}}, "the model's chat template never mentions mod"),
    (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, r"tool_choice must name one of the tools \[\]"),
    (CHAT, {"messages": MESSAGES, "tool_choice": {"type": "function"}}, "tool_choice must be auto, none, required or"),
    (CHAT, {"messages": MESSAGES, "continue_final_message": True}, "needs add_generation_prompt: false"),
    (CHAT, {"messages": MESSAGES, "add_generation_prompt": False}, "needs add_generation_prompt: false"),
    (
        CHAT,
        {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": False},
        "to continue the final message, it must be the assistant's",
    ),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format must be text, json_object or json_sch"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "schema must be|response_format must be an obj"),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"choice": [1]}}, "structured_outputs.choice must be a list"),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"regex": "a", "json": {}}}, "only one field counts"),
    (COMPLETION, {"prompt": "a", "guided_json": "{"}, "guided_json is no valid JSON"),
    (COMPLETION, {"prompt": "a", "bad_words": [""]}, "bad_words must be at most 16 texts"),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": "low"}, "the model's chat template has no such option"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs needs logprobs: true"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens must be at least 1; got 0"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens must be at least 1; got 0"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a" * 600}]},
        r"a prompt of 6\d\d tokens and the first token of its answer exceed the engine's max_length=512",
    ),
    ("/tokenize", {}, "give either prompt or messages"),
    ("/tokenize", {"prompt": 7}, "prompt must be a string"),
    ("/detokenize", {"tokens": [9999]}, "token 9999 is outside the vocabulary of 264"),
    ("/detokenize", {"tokens": [True]}, "tokens must be a list of token ids"),
    ("/detokenize", {}, "tokens must be a list of token ids"),
]


@pytest.mark.parametrize("path, body, message", WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_wrong_fields_are_named(server, path, body, message):
    before = len(server.engine.submitted)
    answer = server.post(path, json={"model": "tiny"} | body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    with pytest.raises(ValueError, match=message):
        raise ValueError(error["message"])
    assert len(server.engine.submitted) == before and not server.service.running


@pytest.mark.parametrize(
    "path, body, param",
    [
        (COMPLETION, {"prompt": "a", "temperature": -1}, "temperature"),
        (COMPLETION, {"prompt": "a", "n": 0}, "n"),
        (COMPLETION, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETION, {"prompt": [9999]}, "prompt"),
        (COMPLETION, {"prompt": ""}, "prompt"),
        (COMPLETION, {"prompt": "a" * 600}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
        (CHAT, {"messages": [{"role": "human", "content": "a"}]}, "messages"),
        ("/detokenize", {"tokens": [9999]}, "tokens"),
    ],
)
def test_errors_of_ranges_have_their_field(server, path, body, param):
    assert server.post(path, json=body).json()["error"]["param"] == param


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[1]",
        b"nothing",
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"model": "\\udfff", "prompt": "a"}',
        b'{"prompt": "a", "n": "\xed\xa0\x80"}',
        '{"prompt": "a", "n": "\\ud800"}'.encode("utf-16"),
        b"[" * 10_000,
        b'{"prompt":' * 1000,
        b'{"prompt": ' + b"1" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_json_objects_are_refused(server, data):
    answer = server.post(COMPLETION, content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and "the body" in answer.json()["error"]["message"]


def test_other_bodies_paths_methods_and_models(server):
    # A web page may send such a form to this machine without asking.
    answer = server.post(COMPLETION, content=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415 and "the body must be JSON" in answer.json()["error"]["message"]
    answer = server.post("/v1/nothing", json={})
    assert answer.status_code == 404 and answer.json()["error"]["message"] == "there is no /v1/nothing"
    answer = server.get(COMPLETION)
    assert answer.status_code == 405 and "does not support GET" in answer.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'; this server has 'tiny'") as error:
        server.openai().completions.create(model="gpt", prompt="a")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        server.openai().models.retrieve("some/other")
    # A request without a name is for the only model.
    assert server.post(COMPLETION, json={"prompt": "a"}).status_code == 200


def test_bodies_too_large_are_refused_while_they_come(server):
    answer = server.post(COMPLETION, json={"prompt": "a" * 30_000})
    assert answer.status_code == 413 and "larger than 20000 bytes" in answer.json()["error"]["message"]

    def pieces():
        for _ in range(30):
            yield b"a" * 1000

    # No Content-Length: the size shows only as it comes.
    answer = server.post(COMPLETION, content=pieces(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_bodies_that_do_not_come_are_given_up():
    with served.serve(body_seconds=0.2) as running:
        with running.connect() as connection:
            connection.sendall(served.request_bytes({"prompt": "a"})[:-3])
            assert b"408" in connection.recv(1000).splitlines()[0]


def test_a_key_is_asked_for_everywhere_but_at_health():
    with served.serve(api_key="secret") as running:
        assert running.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/nothing"):
            answer = running.get(path)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        for wrong in ("wrong", "secret2", "sécret"):
            headers = {"Authorization": f"Bearer {wrong}".encode()}
            assert running.post(COMPLETION, json={"prompt": "a"}, headers=headers).status_code == 401
        assert running.get("/v1/models", headers={"Authorization": "Basic secret"}).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            running.openai("other").models.list()
        assert running.openai("secret").completions.create(model="tiny", prompt="a").choices[0].text == "a"


def test_the_space_around_a_key_is_no_part_of_it():
    """Headers come without it: a key with a newline of its file would refuse everyone."""
    with served.serve(api_key=" secret\n") as running:
        for sent in ("secret", "  secret"):
            assert running.get("/v1/models", headers={"Authorization": f"Bearer {sent}"}).status_code == 200


HOSTS = {"localhost": 200, "LOCALHOST:80": 200, "127.0.0.1:1": 200, "[::1]:8000": 200, "[::1]": 200, "box.lan:8000": 200}
HOSTS |= {"evil.com": 403, "evil.com:8000": 403, "localhost.evil.com": 403, "[::2]": 403}


def test_a_local_server_answers_to_its_own_names_alone():
    """Without a key, the page of a name that its owner rebinds to 127.0.0.1 could else send prompts and read answers."""
    with served.serve(hosts=("Box.lan",)) as running:
        for host, status in HOSTS.items():
            assert running.get("/v1/models", headers={"Host": host}).status_code == status, host
        answer = running.get("/metrics/", headers={"Host": "evil.com"})
        assert answer.status_code == 403 and "the server answers to 127.0.0.1, [::1], box.lan" in answer.text
        assert running.get("/metrics/").status_code == 404


@pytest.mark.parametrize("settings", [dict(api_key="secret"), dict(hosts=("*",))])
def test_a_key_or_a_star_lets_any_name_pass(settings):
    headers = {"Host": "proxied.example", "Authorization": "Bearer secret"}
    with served.serve(**settings) as running:
        assert running.get("/v1/models", headers=headers).status_code == 200
        assert "location" not in running.get("/metrics/", headers=headers).headers


def test_two_lengths_of_one_body_are_refused(server):
    """A proxy that believes the other one would take the end of the body for a request of its own."""
    head = served.request_bytes({}).replace(b"\r\n\r\n{}", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
    with server.connect() as connection:
        connection.sendall(head + b"2\r\n{}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(10_000), b""))
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1
    assert b"Content-Length or Transfer-Encoding, not both" in answer


def test_a_body_that_is_no_http_is_answered_once(server, caplog):
    head = served.request_bytes({"prompt": "a"}).partition(b"Content-Length")[0]
    with server.connect() as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\nno chunk\r\n")
        answer = b"".join(iter(lambda: connection.recv(10_000), b""))
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1
    assert "Traceback" not in caplog.text


def test_noise_and_too_many_connections_get_json_too():
    with served.serve(max_connections=2) as running:
        with running.connect() as connection:
            connection.sendall(b"no HTTP\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(10_000), b""))
        assert answer.startswith(b"HTTP/1.1 400")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"] == "Invalid HTTP request received."
        with running.connect():
            assert served.comes_true(lambda: len(running.service.connections) == 1)
            answer = running.get("/v1/models")
        assert answer.status_code == 503 and answer.headers["connection"] == "close"
        assert "no room for another connection" in answer.json()["error"]["message"]
        assert served.comes_true(lambda: not running.service.connections)
        assert running.get("/v1/models").status_code == 200


def test_all_bodies_together_are_bounded(monkeypatch):
    """Many clients could else fill the memory with bodies that are each small enough."""
    monkeypatch.setattr("moe_jax.serving.http.app.MOST_HELD", 5)
    monkeypatch.setattr("moe_jax.serving.http.app.SMALL_BODY", 100)
    with served.serve(max_body_bytes=2000) as running:
        large = served.request_bytes({"prompt": "a" * 400})
        with running.connect() as connection:
            connection.sendall(large[:-3])
            assert served.comes_true(lambda: running.guard_holds() > 400)
            answer = running.post(COMPLETION, json={"prompt": "a" * 400})
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            assert running.post(COMPLETION, json={"prompt": "a"}).status_code == 200
        assert served.comes_true(lambda: running.guard_holds() == 0)
        assert running.post(COMPLETION, json={"prompt": "a" * 400}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_engine_answers_503_and_is_not_healthy(stream):
    engine = FakeEngine(repeats=1000, step_seconds=0.01)
    with served.serve(engine) as running:
        assert running.get("/health").status_code == 200
        options = dict(model="tiny", prompt="a", max_tokens=400)
        if stream:
            pieces = running.openai().completions.create(**options, stream=True)
            next(pieces)
            engine.fail()
            with pytest.raises(openai.APIError, match="the engine is no longer running"):
                list(pieces)
        else:
            engine.fail()
            with pytest.raises(openai.InternalServerError, match="the engine is no longer running") as error:
                running.openai().completions.create(**options)
            assert error.value.status_code == 503
        assert running.get("/health").status_code == 503 and not running.service.running


def test_a_request_of_a_failed_replica_may_be_sent_again():
    """The others answer it: the server stays healthy."""
    engine = FakeEngine(repeats=1000, step_seconds=0.01)
    with served.serve(engine) as running:
        pieces = running.openai().completions.create(model="tiny", prompt="a", max_tokens=400, stream=True)
        next(pieces)
        wake({engine.handles[0].fail(ReplicaFailed("cuda:1", ValueError("RESOURCE_EXHAUSTED")))} - {None})
        with pytest.raises(openai.APIError, match="a device failed: send the request again"):
            list(pieces)
        assert running.get("/health").status_code == 200
        assert running.post(COMPLETION, json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_device_that_fails_makes_the_server_unhealthy(monkeypatch):
    """The engine is a real one: its thread ends with the first launch. Requests that run, wait and come later get an error."""

    class BrokenDevice:
        weights_are_deleted = state_is_deleted = False

        def __init__(self, model, *_, **__):
            self.placement = SimpleNamespace(devices=[None])
            self.launching, self.may_fail = threading.Event(), threading.Event()

        def warm_up(self):
            pass

        def launch(self, plans):
            self.launching.set()
            self.may_fail.wait(30)
            raise ValueError("RESOURCE_EXHAUSTED")

        def release(self):
            pass

    monkeypatch.setattr("moe_jax.serving.engine.Device", BrokenDevice)
    engine = Engine(tiny.dense(), limits=replace(LIMITS, max_sequences=1), tokenizer=served.tokenizer())
    device = engine._loop.device
    with served.serve(engine) as running, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(running.post, COMPLETION, json={"prompt": "a", "stream": stream}) for stream in (False, True)]
        assert device.launching.wait(20) and served.comes_true(lambda: len(running.service.running) == 2)
        assert running.get("/health").status_code == 200
        device.may_fail.set()
        whole, streamed = (answer.result(20) for answer in answers)
        assert (whole.status_code, streamed.status_code) == (503, 200)
        assert "the engine is no longer running" in whole.text and "the engine is no longer running" in streamed.text
        assert running.get("/health").status_code == running.post(COMPLETION, json={"prompt": "a"}).status_code == 503
        assert not running.service.running


def test_a_server_that_stops_says_so_at_health_too(server):
    server.service.stopping = True
    try:
        answer = server.get("/health")
        assert answer.status_code == 503 and answer.json()["error"]["message"] == "the server is stopping"
    finally:
        server.service.stopping = False


def test_a_defect_answers_500_and_hides_its_text(server, monkeypatch, caplog):
    def broken(*_):
        raise KeyError("a secret")

    monkeypatch.setattr(server.engine, "submit", broken)
    answer = server.post(COMPLETION, json={"prompt": "a"})
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error" and answer.headers["connection"] == "close"
    assert served.comes_true(lambda: "a secret" in caplog.text)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(model_name=""), "model_name must not be empty"),
        (dict(api_key=" "), "api_key must be printable ASCII"),
        (dict(api_key=""), "api_key must be printable ASCII"),
        (dict(api_key="schlüssel"), "api_key must be printable ASCII"),
        (dict(max_body_bytes=0, request_seconds=-1), "max_body_bytes must be above 0; got 0; request_seconds must be"),
        (dict(shutdown_seconds=-1), "shutdown_seconds must be"),
    ],
)
def test_wrong_settings_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        ServerSettings(**{"model_name": "tiny", **wrong})
