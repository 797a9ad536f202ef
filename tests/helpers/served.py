"""A server on this machine in a thread of the test, and clients of it."""

import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import openai

from moe_jax.serving.conversation import SAMPLING, Defaults
from moe_jax.serving.http.server import Server, bind
from moe_jax.serving.http.service import ServerSettings, Service
from moe_jax.serving.request import SamplingOptions
from tests.helpers import tiny
from tests.helpers.fake_engine import FakeEngine

DEFAULTS = Defaults({name: getattr(SamplingOptions, name) for name in SAMPLING}, ends=(0,), ends_of_answers=(0, 2))

tokenizer = functools.cache(tiny.tokenizer)


@dataclass
class Served:
    """A running server."""

    engine: FakeEngine
    service: Service
    server: Server
    url: str
    thread: threading.Thread
    clients: list[openai.OpenAI] = field(default_factory=list)
    """Closed when the server ends."""

    def openai(self, key: str = "none") -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)
        self.clients.append(client)
        return client

    def post(self, path: str, **options) -> httpx.Response:
        return httpx.post(self.url + path, timeout=30, **options)

    def get(self, path: str, **options) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **options)

    def stop(self) -> None:
        """Tells the server to stop, as a signal does."""
        # It may have stopped already.
        with contextlib.suppress(RuntimeError):
            self.server.handle_exit(15, None)

    def guard_holds(self) -> int:
        """Returns the bytes of the bodies of all open requests."""
        return self.server.config.app._held

    def connect(self) -> socket.socket:
        """Returns a connection for bytes that no client would send."""
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=30)


@contextlib.contextmanager
def serve(engine: FakeEngine | None = None, defaults: Defaults = DEFAULTS, load=None, **settings) -> Iterator[Served]:
    """Runs a server until the block ends."""
    engine = FakeEngine(tokenizer=tokenizer()) if engine is None else engine
    settings = ServerSettings(**{"model_name": "tiny", "shutdown_seconds": 0, **settings})
    service = Service(engine, defaults, settings, load)
    bound, server = bind("127.0.0.1", 0), Server(service)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    served = Served(engine, service, server, url, thread)
    try:
        assert comes_true(lambda: server.started)
        yield served
    finally:
        for client in served.clients:
            client.close()
        served.stop()
        thread.join(30)
        assert not thread.is_alive(), "the server does not stop"


def request_bytes(body: dict) -> bytes:
    """Returns a whole request for a completion, as it goes over the wire."""
    data = json.dumps(body).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + data


def is_idle(running: Served) -> bool:
    """Returns True while no request runs or waits."""
    stats = running.engine.stats()
    return stats.running == stats.waiting == 0 and not running.service.running


def comes_true(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Waits until a condition holds; False if the time is over first."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()
