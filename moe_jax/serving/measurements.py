"""Measurements of an engine under load: its throughput, and how long clients wait for their tokens."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from moe_jax.config import ModelConfig
from moe_jax.models.random_weights import random_model
from moe_jax.runtime.files import save_png
from moe_jax.serving.engine import Engine
from moe_jax.serving.request import EngineLimits, SamplingOptions, checked


class Load(NamedTuple):
    """Clients that send their next request when the previous one has ended."""

    clients: int
    requests_each: int
    prompt_tokens: int
    new_tokens: int
    """At least 2: the time between tokens needs two."""

    @property
    def options(self) -> SamplingOptions:
        """The options of every request: greedy, and no end token ends it early."""
        return SamplingOptions(max_new_tokens=self.new_tokens, ignore_eos=True)


Latency = tuple[float, float]
"""Median and 95th percentile of all requests, in seconds."""


class Measured(NamedTuple):
    """The times of a load."""

    load: Load
    seconds: float
    """Time from the first request to the last token."""
    first_token: Latency
    """TTFT: time from sending a request to its first token, including the wait for a slot in the engine."""
    each_token: Latency
    """TPOT: mean time between two tokens of a request, from its first token to its last."""

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests per second; prompt tokens do not count."""
        return self.load.clients * self.load.requests_each * self.load.new_tokens / self.seconds


def check_loads(loads: Sequence[Load], limits: EngineLimits, vocab_size: int) -> None:
    """Refuses loads that an engine of these limits cannot run.

    Raises:
      ValueError: there is no load, a size is too small, a request exceeds the limits, or more clients send than may wait.
    """
    if not loads:
        raise ValueError("give at least one number of clients")
    for load in loads:
        for name, value in load._asdict().items():
            least = 2 if name == "new_tokens" else 1
            if value < least:
                raise ValueError(f"{name} must be at least {least}; got {value}")
        checked([0] * load.prompt_tokens, load.options, limits, vocab_size)
        if load.clients > limits.max_waiting:
            raise ValueError(f"clients must be at most max_waiting={limits.max_waiting}; got {load.clients}")


def measure_loads(engine: Engine, loads: Sequence[Load], seed: int = 0) -> Iterator[Measured]:
    """Yields the times of each load, after one warm-up request. A lazy engine runs each load twice; only the second run counts.

    Prompts are distinct random tokens drawn from this seed, so that none is found in the prompt cache.

    Raises:
      ValueError: as `check_loads`.
      RuntimeError: the engine failed, or ended a request early.
    """
    check_loads(loads, engine.limits, engine.config.vocab_size)
    rng = np.random.default_rng(seed)
    _measure(engine, loads[0]._replace(clients=1, requests_each=1), rng)
    for load in loads:
        if engine.lazy:
            # It compiles the programs that the load needs.
            _measure(engine, load, rng)
        yield _measure(engine, load, rng)


def random_engine(
    config: ModelConfig,
    dtype: DTypeLike,
    limits: EngineLimits,
    seed: int = 0,
    mesh: Mesh | None = None,
    *,
    lazy: bool = False,
) -> Engine:
    """Returns an engine for a model of this config with random weights, on the devices of a mesh if one is given."""
    return Engine(random_model(config, jnp.dtype(dtype), seed, mesh=mesh), limits=limits, take_over=True, lazy=lazy)


def _measure(engine: Engine, load: Load, rng: np.random.Generator) -> Measured:
    size = (load.clients, load.requests_each, load.prompt_tokens)
    prompts = rng.integers(0, engine.config.vocab_size, size).tolist()
    rows = asyncio.run(_rows_of_clients(engine, prompts, load.options))
    fewest = min(map(len, rows)) - 1
    if fewest < load.new_tokens:
        raise RuntimeError(f"the engine ended a request after {fewest} of {load.new_tokens} tokens")
    sent, first, *_, last = np.array(rows).T
    return Measured(
        load,
        seconds=float(last.max() - sent.min()),
        first_token=_latency(first - sent),
        each_token=_latency((last - first) / (load.new_tokens - 1)),
    )


async def _rows_of_clients(engine: Engine, prompts: list[list[list[int]]], options: SamplingOptions) -> list[list[float]]:
    """Returns a row for each request: when it was sent, and when each of its tokens came."""
    clients = await asyncio.gather(*(_rows_of_client(engine, some, options) for some in prompts))
    return [row for rows in clients for row in rows]


async def _rows_of_client(engine: Engine, prompts: list[list[int]], options: SamplingOptions) -> list[list[float]]:
    rows = []
    for prompt in prompts:
        row = [perf_counter()]
        async for event in engine.submit(prompt, options):
            if event.token is not None:
                row.append(perf_counter())
        rows.append(row)
    return rows


def _latency(seconds: np.ndarray) -> Latency:
    median, high = np.percentile(seconds, [50, 95])
    return float(median), float(high)


HEADER = f"{'clients':>8}{'requests':>10}{'tokens/s':>10}{'TTFT median':>14}{'95 %':>12}{'TPOT median':>14}{'95 %':>12}"


def table_row(measured: Measured) -> str:
    """Returns the line of one load, below `HEADER`."""
    load = measured.load
    times = "".join(
        f"{1e3 * seconds:>{width - 3}.{digits}f} ms"
        for spread, digits in ((measured.first_token, 1), (measured.each_token, 2))
        for seconds, width in zip(spread, (14, 12), strict=True)
    )
    return f"{load.clients:>8}{load.clients * load.requests_each:>10}{measured.tokens_per_second:>10.0f}{times}"


def plot_measured(measured: Sequence[Measured], title: str, path: str | Path) -> None:
    """Draws throughput, TTFT and TPOT over the number of clients into a PNG file."""
    # Imported here: it is slow, and only drawing needs it.
    from matplotlib.figure import Figure

    clients = [one.load.clients for one in measured]
    figure = Figure(figsize=(12, 4), layout="constrained")
    figure.suptitle(title)
    throughput, first, each = figure.subplots(1, 3)
    throughput.plot(clients, [one.tokens_per_second for one in measured], "o-")
    throughput.set(title="Throughput", ylabel="output tokens/s")
    spreads = [[one.first_token for one in measured], [one.each_token for one in measured]]
    for axes, name, of_loads in zip((first, each), ("Time to first token", "Time per output token"), spreads, strict=True):
        axes.plot(clients, [1e3 * median for median, _ in of_loads], "o-", label="median")
        axes.plot(clients, [1e3 * high for _, high in of_loads], "o--", label="95th percentile")
        axes.set(title=name, ylabel="ms")
        axes.legend()
    for axes in (throughput, first, each):
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, [str(count) for count in clients])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("clients")
        axes.grid(alpha=0.3)
    save_png(figure, path)
