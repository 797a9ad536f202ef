"""`moe-jax bench`: measures how fast a model is served."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from moe_jax.commands.options import Dtype, LimitOptions, config_of, engine_mesh, search_rarely, tell_programs

CLIENTS = (1, 16, 64, 256)


@dataclass(frozen=True)
class BenchCommand:
    """Measure how fast a model is served: output tokens a second, TTFT and TPOT, by number of clients.

    moe-jax bench Qwen/Qwen3-30B-A3B --plot bench.png

    moe-jax bench --random-weights qwen3-30b-a3b --prompt-tokens 1024 --new-tokens 256

    Each client sends its next request when its last one has ended. Requests go to the engine of `moe-jax serve`, without HTTP.
    Prompts are random tokens, no two alike; none is found in the cache. Decoding is greedy, and no answer ends early.

    tokens/s: new tokens of all requests, over the time from the first request to the last token.

    TTFT, the time to the first token: from sending a request to its first token, including the wait for a place in the engine.

    TPOT, the time per output token: from a request's first token to its last, over the number of new tokens minus one.

    Args:
      model: a Hugging Face folder or hub id.
      random_weights: a published shape (qwen3-30b-a3b, ...) or a folder with a config.json, to measure with random weights.
      concurrency: numbers of clients that send requests at once, one row each. Default: 1, 16, 64 and 256, as far as
        --max-sequences allows on all devices.
      requests_each: number of requests that each client sends, one after the other.
      prompt_tokens: number of tokens of each prompt.
      new_tokens: number of tokens of each answer, at least 2.
      sizes: sizes of the engine.
      devices: number of GPUs of each replica. They split the experts, and each computes texts of its own.
      lazy: compile only the programs that the requests need. Each row's requests are then sent twice, and only the second pass
        is measured.
      seed: seed of the prompts, and of random weights.
      plot: a PNG file for a picture.
      dtype: the dtype that the model computes in.
    """

    model: Annotated[str | None, tyro.conf.Positional] = None
    random_weights: Annotated[str | None, tyro.conf.arg(metavar="CONFIG")] = None
    concurrency: tuple[int, ...] | None = None
    requests_each: int = 4
    prompt_tokens: int = 512
    new_tokens: int = 128
    sizes: tyro.conf.OmitArgPrefixes[LimitOptions] = LimitOptions()
    devices: Annotated[int, tyro.conf.arg(aliases=["--devices-per-replica"])] = 1
    lazy: bool = False
    seed: int = 0
    plot: Annotated[str | None, tyro.conf.arg(metavar="FILE.png")] = None
    dtype: Dtype = "bfloat16"

    def run(self) -> None:
        """Prints a row for each number of clients, and draws the picture if asked."""
        import jax

        from moe_jax.checkpoint.hf_load import find_checkpoint, from_pretrained, read_config
        from moe_jax.serving.engine import Engine, check_config
        from moe_jax.serving.measurements import (
            HEADER,
            Load,
            check_loads,
            measure_loads,
            plot_measured,
            random_engine,
            table_row,
        )

        if (self.model is None) == (self.random_weights is None):
            raise ValueError("give either a checkpoint's path or --random-weights CONFIG")
        if self.plot is not None and (Path(self.plot).suffix.lower() != ".png" or Path(self.plot).is_dir()):
            raise ValueError(f"the picture's name must end in .png; got {self.plot}")
        folder = None if self.model is None else find_checkpoint(self.model)
        config = config_of(str(self.random_weights)).without_mtp() if folder is None else read_config(folder, mtp=False)
        mesh, num_devices = engine_mesh(self.devices, config, self.sizes.replicas), self.devices * self.sizes.replicas
        most = self.sizes.max_sequences * num_devices
        numbers = [n for n in CLIENTS if n <= most] if self.concurrency is None else self.concurrency
        loads = [Load(clients, self.requests_each, self.prompt_tokens, self.new_tokens) for clients in numbers]
        limits = self.sizes.engine_limits(config, max_waiting=max((1, *numbers)))
        check_loads(loads, limits, config.vocab_size)
        check_config(config, limits.kv_dtype)

        tell_programs()
        began = time.perf_counter()
        if folder is None:
            engine = random_engine(config, self.dtype, limits, self.seed, mesh=mesh, lazy=self.lazy)
        else:
            model = from_pretrained(folder, dtype=self.dtype, mtp=False, mesh=mesh)
            engine = Engine(model, limits=limits, take_over=True, lazy=self.lazy)
        search_rarely()
        kind = f"{f'{num_devices} x ' * (num_devices > 1)}{jax.devices()[0].device_kind}"
        title = (
            f"{self.model or f'{self.random_weights} with random weights'}, {self.dtype}, {kind}, "
            f"prompts of {self.prompt_tokens} tokens, {self.new_tokens} new tokens"
        )
        print(f"{title}; ready in {time.perf_counter() - began:.0f} s\n{HEADER}", flush=True)
        found = []
        for measured in measure_loads(engine, loads, self.seed):
            found.append(measured)
            print(table_row(measured), flush=True)
        engine.close()
        if self.plot is not None:
            plot_measured(found, title, self.plot)
            print(f"wrote {self.plot}")
