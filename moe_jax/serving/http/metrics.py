"""Metrics of a server and its engine, in Prometheus' format."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moe_jax.serving.http.record import RequestRecord

if TYPE_CHECKING:
    from moe_jax.serving.stats import Stats

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
    """Counters and histograms of requests, and the engine's own numbers as they are when somebody asks."""

    def __init__(self, stats: Callable[[], "Stats"]):
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(stats))
        registry = self.registry
        self._requests = Counter(
            "moe_jax_requests", "Requests that have ended, by path and status.", ["path", "status"], registry=registry
        )
        self._prompt = Counter("moe_jax_prompt_tokens", "Tokens of prompts, with those found in the cache.", registry=registry)
        self._cached = Counter(
            "moe_jax_cached_prompt_tokens",
            "Tokens of prompts whose keys and values were found in the cache.",
            registry=registry,
        )
        self._new = Counter("moe_jax_new_tokens", "New tokens of answers to clients.", registry=registry)
        self._whole = Histogram(
            "moe_jax_request_seconds", "Seconds from a request to the end of its answer.", buckets=SECONDS, registry=registry
        )
        self._first = Histogram(
            "moe_jax_first_text_seconds",
            "Seconds from a request to the first text of its answer.",
            buckets=SECONDS,
            registry=registry,
        )
        self._next = Histogram(
            "moe_jax_seconds_per_token",
            "Seconds from the first text of an answer to its end, for each new token after the first.",
            buckets=SECONDS_PER_TOKEN,
            registry=registry,
        )

    def observe(self, record: RequestRecord, path: str, seconds: float) -> None:
        """Counts a request that has ended; `path` is one of the server's, for clients may ask for any."""
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
    def __init__(self, stats: Callable[[], "Stats"]):
        self._stats = stats

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, value in self._stats()._asdict().items():
            is_count = name.startswith("num_")
            kind = CounterMetricFamily if is_count else GaugeMetricFamily
            yield kind(f"moe_jax_engine_{name.removeprefix('num_')}", ENGINE_HELP[name], value=value)
