"""Times whole models with random weights: ours and transformers' Qwen3-MoE, and a sparse model compared with dense ones.

    python benchmarks/whole_model.py                                  # Qwen3-30B-A3B, 100 tokens: about 115 GiB of GPU memory
    python benchmarks/whole_model.py --layers 4 --systems moe_jax grouped_mm
    python benchmarks/whole_model.py dense --plot moe_and_dense.png   # one H200: the largest has 61 GiB of weights in bf16
    python benchmarks/whole_model.py dense --train-layers 4           # also a training step

Every system and every model has a process of its own, so that its memory is free for the next one.

`transformers`: one forward and one backward pass. *Forward* computes the logits without gradients; *backward* is the backward
pass of the sum of all logits. Times are medians after a first run. transformers needs a torch that sees the GPU.

`dense`: Qwen3-30B-A3B is compared with the shapes of Qwen3-4B, about its active size, and of Qwen3-32B, about its total size. A
decode step adds one token to every prompt (`--prompt-tokens` long) in the serving engine. Its time is the difference between
generating `--long` and `--short` tokens, over the difference of their numbers, so that prefill cancels. Prefill is the time to
the first tokens of new prompts, 8 of 1024 tokens. Both are medians of 3 calls. Memory in use is that of weights and of pages
for all prompts. A dense model has its peak in the engine's start, which cuts stacks into layers. A training step
(`training_step.py`: bf16, f32 masters, balanced experts, `--rows` x 4096 tokens) is timed with half of `--train-layers` and
with all of them. The step of the whole model is extrapolated from both along a straight line: it is no measurement.
"""

import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from engine import generate, step_ms
from harness import GIB, Case, in_a_process, main, median_s, one_of
from inputs import config_of
from training_step import Step

from moe_jax.config import NAMED_CONFIGS, config_to_dict
from moe_jax.cost.flops import num_active_parameters, num_parameters
from moe_jax.runtime import environment
from moe_jax.runtime.files import save_png
from moe_jax.serving.measurements import random_engine
from moe_jax.serving.pages import pages_of
from moe_jax.serving.request import EngineLimits


@dataclass(kw_only=True)
class Transformers(Case):
    """A row for each system."""

    config: one_of(NAMED_CONFIGS) = "qwen3-30b-a3b"
    tokens: int = 100
    layers: int | None = None  # number of layers; default: all
    runs: int = 5
    systems: tuple[Literal["moe_jax", "grouped_mm", "eager"], ...] = ("moe_jax", "grouped_mm", "eager")
    here: bool = False  # measure in this process

    SMALL = dict(tokens=8, runs=1, systems=("moe_jax",))
    HAS_CHILDREN = True

    def results(self):
        """Yields seconds and memory."""
        for system in self.systems:
            if self.here:
                yield {"system": system} | (self.ours() if system == "moe_jax" else self.theirs(system))
                continue
            rows, problem = in_a_process(__file__, "transformers", replace(self, systems=(system,), here=True), **variables())
            yield from rows or [{"system": system, "note": problem}]

    def ours(self) -> dict[str, float]:
        """Returns the times and memory that `moe-jax check` reports."""
        from moe_jax.check.report import check_random

        report = check_random(config_of(self.config, small=self.small, layers=self.layers), self.tokens, repeats=self.runs)
        times = dict(forward_s=report.forward_seconds, backward_s=report.backward_seconds, peak_gib=report.peak_memory_gib)
        return times | dict(device=jax.devices()[0].device_kind)

    def theirs(self, system: str) -> dict[str, float]:
        """Returns the same for transformers' model, with the system as its `experts_implementation`."""
        import torch
        import transformers

        sizes = config_to_dict(config_of(self.config, small=self.small, layers=self.layers))
        config = transformers.Qwen3MoeConfig(**sizes, attn_implementation="sdpa", experts_implementation=system)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            model = transformers.Qwen3MoeForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=config.initializer_range)
        tokens = torch.randint(0, config.vocab_size, (1, self.tokens), device="cuda")
        forward, backward = [], []
        for _ in range(self.runs + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.no_grad():
                model(input_ids=tokens, use_cache=False)
            torch.cuda.synchronize()
            forward.append(time.perf_counter() - start)
            model.zero_grad(set_to_none=True)
            total = model(input_ids=tokens, use_cache=False).logits.sum()
            torch.cuda.synchronize()
            start = time.perf_counter()
            total.backward()
            torch.cuda.synchronize()
            backward.append(time.perf_counter() - start)
        times = dict(forward_s=statistics.median(forward[1:]), backward_s=statistics.median(backward[1:]))
        return times | dict(peak_gib=torch.cuda.max_memory_allocated() / GIB, device=torch.cuda.get_device_name())


@dataclass(kw_only=True)
class Dense(Case):
    """A row for each model."""

    models: tuple[one_of(NAMED_CONFIGS), ...] = ("qwen3-30b-a3b", "qwen3-4b", "qwen3-32b")
    prompts: tuple[int, ...] = (1, 16, 64, 256)
    prompt_tokens: int = 128
    short: int = 8
    long: int = 64
    prefill: tuple[int, int] = (8, 1024)  # prompts, and tokens of each
    train_layers: int | None = None  # layers of a training step, at least 2; default: no training step
    rows: int = 2  # rows of a training step
    plot: Path | None = None  # a PNG file
    here: bool = False  # measure in this process

    SMALL = dict(models=("qwen3-30b-a3b",), prompts=(1, 2), prompt_tokens=8, short=2, long=6, prefill=(2, 16))
    HAS_CHILDREN = True

    def start(self) -> None:
        """Refuses too few layers."""
        if self.train_layers is not None and self.train_layers < 2:
            raise SystemExit(f"--train-layers {self.train_layers} must be at least 2")

    def results(self):
        """Yields the rows, and then draws the picture."""
        rows = []
        for name in self.models:
            if self.here:
                yield self.measure(name)
                continue
            alone = replace(self, models=(name,), plot=None, here=True)
            (row,) = rows_of(__file__, "dense", alone)
            rows.append(row | (self.training(name) if self.train_layers is not None else {}))
            yield rows[-1]
        if self.plot is not None:
            plot(rows, self.plot)

    def measure(self, name: str) -> dict:
        """Returns the sizes and times of one model in the engine."""
        config = config_of(name, small=self.small).without_mtp()
        dtype = jnp.dtype(jnp.float32 if self.small else jnp.bfloat16)
        most, longest = max(self.prompts), self.prompt_tokens + self.long
        prefill_prompts, prefill_tokens = self.prefill
        limits = EngineLimits(
            max_sequences=most,
            max_tokens_per_step=32 if self.small else 8192,
            max_length=max(longest, prefill_tokens + 1),
            # A page more for each: with none to spare some prompts wait for others' ends, and a call takes two rounds.
            num_pages=1 + max(most * (1 + pages_of(longest)), prefill_prompts * pages_of(prefill_tokens + 1)),
        )
        engine, rng = random_engine(config, dtype, limits), np.random.default_rng(0)

        def random_prompts(count: int, tokens: int) -> list[list[int]]:
            return rng.integers(0, config.vocab_size, (count, tokens)).tolist()

        # New prompts in each call: old ones would be found in the cache.
        prefill = median_s(lambda: generate(engine, random_prompts(*self.prefill), 1), 3)
        decode = {}
        for n in self.prompts:
            prompts = random_prompts(n, self.prompt_tokens)
            decode[n] = step_ms(lambda count, prompts=prompts: generate(engine, prompts, count), self.short, self.long)
        engine.close()
        memory = jax.local_devices()[0].memory_stats() or {}
        return {
            "model": name,
            "device": jax.devices()[0].device_kind,
            "parameters": num_parameters(config),
            "active": num_active_parameters(config),
            "weights_gib": num_parameters(config) * dtype.itemsize / GIB,
            "cache_kib_per_token": config.num_hidden_layers * config.mixer.travelling_elements * dtype.itemsize / 1024,
            "in_use_gib": memory.get("bytes_in_use", 0) / GIB,
            "peak_gib": memory.get("peak_bytes_in_use", 0) / GIB,
            "decode_ms": decode,
            "tokens_per_s": {n: 1e3 * n / ms for n, ms in decode.items()},
            "prefill_tokens_per_s": prefill_prompts * prefill_tokens / prefill,
        }

    def training(self, name: str) -> dict:
        """Returns the step's seconds by number of layers, and the whole model's, extrapolated."""
        few, many = self.train_layers // 2, self.train_layers
        routing, seconds = "balanced" if NAMED_CONFIGS[name].experts else "own", {}
        default = Step(**Step.SMALL, small=True) if self.small else Step()
        for layers in (few, many):
            case = replace(default, config=name, rows=self.rows, routings=(routing,), layers=layers)
            (result,) = rows_of(Path(__file__).with_name("training_step.py"), "step", case)
            seconds[layers] = result["seconds"]
        of_layer = (seconds[many] - seconds[few]) / (many - few)
        whole = seconds[many] + of_layer * (config_of(name, small=self.small).num_hidden_layers - many)
        return {"training_s": seconds, "training_whole_s": whole, "training_tflops": result["tflops_per_gpu"]}


def variables() -> dict[str, str]:
    """Returns the variables of the environment that `moe-jax` sets."""
    found = dict(os.environ)
    environment.set_defaults(found)
    return found


def rows_of(script: str | Path, name: str, case: Case) -> list[dict]:
    """Returns the rows of a case in a process of its own; raises if it fails."""
    rows, problem = in_a_process(script, name, case, **variables())
    if problem:
        raise SystemExit(f"{name} of {script} {problem}")
    return rows


def plot(rows: list[dict], path: Path) -> None:
    """Draws decode steps over the number of prompts, and prefill."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    steps, rates, prefill = figure.subplots(1, 3)
    prompts = [int(n) for n in rows[0]["decode_ms"]]
    for row in rows:
        steps.plot(prompts, list(row["decode_ms"].values()), "o-", label=row["model"])
        rates.plot(prompts, list(row["tokens_per_s"].values()), "o-", label=row["model"])
        prefill.bar(row["model"], row["prefill_tokens_per_s"])
    steps.set(title="Decode step", xlabel="prompts", ylabel="ms", xscale="log", ylim=(0, None))
    rates.set(title="Decoding", xlabel="prompts", ylabel="tokens/s", xscale="log", yscale="log")
    prefill.set(title="Prefill", ylabel="tokens/s")
    for axes in (steps, rates):
        axes.set_xticks(prompts, [str(n) for n in prompts])
        axes.xaxis.minorticks_off()
        axes.grid(alpha=0.3)
    steps.legend()
    save_png(figure, path)


CASES = {"transformers": Transformers, "dense": Dense}

if __name__ == "__main__":
    main(__doc__, CASES)
