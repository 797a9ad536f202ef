"""The record of a request: for its line in the log, and for metrics."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request

if TYPE_CHECKING:
    from moe_jax.serving.engine import Engine


@dataclass
class RequestRecord:
    """A request from its first byte to its end. Times are seconds of `time.perf_counter`."""

    id: str
    method: str
    path: str
    client: str
    began: float = field(default_factory=time.perf_counter)
    first_piece: float | None = None
    status: int = 0
    error: str | None = None
    """The reason why a stream was interrupted, or why there was no answer."""
    body_bytes: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0

    def note_piece(self) -> None:
        """Records that text was sent."""
        if self.first_piece is None:
            self.first_piece = time.perf_counter()

    @property
    def first_seconds(self) -> float | None:
        """The time to the first text."""
        return None if self.first_piece is None else self.first_piece - self.began

    def line(self, seconds: float) -> str:
        """Describes the request, which took `seconds`, in one line."""
        parts = [f"{self.client} {self.method} {self.path} {self.status}"]
        if self.prompt_tokens:
            parts.append(f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), {self.new_tokens} new")
        if self.first_seconds is not None:
            parts.append(f"first after {self.first_seconds:.3f} s")
        parts.append(f"{seconds:.3f} s")
        parts += [] if self.error is None else [repr(self.error)[:300]]
        return f"{self.id} " + ", ".join(parts)


def record_of(request: Request) -> RequestRecord:
    """Returns the record that the guard created for a request."""
    return request.scope["moe_jax.record"]


SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
SECONDS_PER_TOKEN = (0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)


ENGINE_HELP = {
    "running": "Sequences that have a slot on a device.",
    "waiting": "Sequences that wait for a slot or for pages.",
    "free_pages": "Pages that hold nothing.",
    "cached_pages": "Pages of ended sequences, kept for prompts that begin alike and freed when others need them.",
    "owned_pages": "Pages that running sequences hold.",
    "num_steps": "Steps that the devices have computed.",
    "num_tokens": "New tokens that steps have computed.",
    "num_preemptions": "Times that a running sequence gave its pages to another one and waited again.",
    "weights_version": "Updates of the weights since the start.",
    "num_drafted": "Drafted tokens that were checked.",
    "num_accepted": "Drafted tokens that were accepted, each without a step of its own.",
}
"""A sentence for each number of `Stats`."""


class Metrics:
    """Counters and histograms of requests, and the engine's own numbers at the time of a scrape."""

    def __init__(self, engine: "Engine"):
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        counter, seconds = partial(Counter, registry=self.registry), partial(Histogram, registry=self.registry)
        self._requests = counter("moe_jax_requests", "Requests that have ended, by path and status.", ["path", "status"])
        self._prompt = counter("moe_jax_prompt_tokens", "Tokens of prompts, with those found in the cache.")
        cached = "Tokens of prompts whose keys and values were found in the cache."
        self._cached = counter("moe_jax_cached_prompt_tokens", cached)
        self._new = counter("moe_jax_new_tokens", "New tokens of answers to clients.")
        whole, first = (
            "Seconds from a request to the end of its answer.",
            "Seconds from a request to the first text of its answer.",
        )
        self._whole = seconds("moe_jax_request_seconds", whole, buckets=SECONDS)
        self._first = seconds("moe_jax_first_text_seconds", first, buckets=SECONDS)
        each = "Seconds from the first text of an answer to its end, for each new token after the first."
        self._next = seconds("moe_jax_seconds_per_token", each, buckets=SECONDS_PER_TOKEN)

    def observe(self, record: RequestRecord, path: str, seconds: float) -> None:
        """Counts a request that has ended; `path` is one of the server's own: clients may request arbitrary ones."""
        self._requests.labels(path, str(record.status)).inc()
        self._prompt.inc(record.prompt_tokens)
        self._cached.inc(record.cached_tokens)
        self._new.inc(record.new_tokens)
        if record.first_seconds is not None:
            self._whole.observe(seconds)
            self._first.observe(record.first_seconds)
            if record.new_tokens > 1:
                self._next.observe((seconds - record.first_seconds) / (record.new_tokens - 1))


class _EngineCollector(Collector):
    def __init__(self, engine: "Engine"):
        self._engine = engine

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        total, of_devices = self._engine.stats(), self._engine.stats_of_devices()
        for name, value in total._asdict().items():
            kind = CounterMetricFamily if name.startswith("num_") else GaugeMetricFamily
            short = name.removeprefix("num_")
            yield kind(f"moe_jax_engine_{short}", ENGINE_HELP[name], value=value)
            if of_devices:
                # A family of its own: a sum over one with the total in it would count twice.
                family = kind(f"moe_jax_replica_{short}", ENGINE_HELP[name], labels=["replica"])
                for device, stats in of_devices.items():
                    family.add_metric([device], getattr(stats, name))
                yield family
