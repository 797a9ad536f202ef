"""Times a sparse model beside dense models of the same active and of the same total size, all with random weights.

    python benchmarks/moe_and_dense.py --plot moe_and_dense.png     # one H200: the largest has 61 GiB of weights in bf16
    python benchmarks/moe_and_dense.py --train-layers 4             # also a training step
    python benchmarks/moe_and_dense.py --small --train-layers 2     # sizes for a CPU, in f32, as a smoke test

Qwen3-30B-A3B stands beside the shapes of Qwen3-4B, about its active size, and of Qwen3-32B, about its total size. Each model
has a process of its own, so that its memory is free for the next one.

A decode step gives one more token to every prompt (`--prompt-tokens` long) in the serving engine. Its time is the difference
between generating `--long` and `--short` tokens, over the difference of their numbers, so that prefill cancels. Prefill is the
time to the first tokens of new prompts, 8 of 1024 tokens. Both are medians of 3 calls. Memory in use is that of weights and of
pages for all prompts. The peak of a dense model lies in the engine's start, which cuts stacks into layers.

A training step (`benchmarks/training_step.py`: bf16, f32 masters, balanced experts, `--rows` x 4096 tokens) is timed with half
of `--train-layers` and with all of them. The step of the whole model is extrapolated from both along a straight line: it is no
measurement.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from engine import median_s

from moe_jax.config import NAMED_CONFIGS, ModelConfig
from moe_jax.cost.flops import num_active_parameters, num_parameters
from moe_jax.runtime import environment
from moe_jax.runtime.files import save_png
from moe_jax.serving.engine import Engine
from moe_jax.serving.measurements import random_engine
from moe_jax.serving.pages import pages_of
from moe_jax.serving.request import EngineLimits, SamplingOptions

MODELS = ("qwen3-30b-a3b", "qwen3-4b", "qwen3-32b")
SMALL = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=128, vocab_size=512)
SMALL_EXPERTS = dict(num_experts=8, moe_intermediate_size=64)
GIB = 2**30


def main() -> None:
    """Measures each model in a process of its own, then prints the table and draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(NAMED_CONFIGS), default=list(MODELS))
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--short", type=int, default=8)
    parser.add_argument("--long", type=int, default=64)
    parser.add_argument("--prefill", type=int, nargs=2, default=[8, 1024], metavar=("PROMPTS", "TOKENS"))
    parser.add_argument("--train-layers", type=int, help="layers of a training step, at least 2; default: no training step")
    parser.add_argument("--rows", type=int, default=2, help="rows of a training step")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, in f32, as a smoke test")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--plot", type=Path, help="a PNG file")
    parser.add_argument("--one", choices=tuple(NAMED_CONFIGS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train_layers is not None and args.train_layers < 2:
        parser.error("--train-layers must be at least 2")
    if args.small:
        args.prompts, args.prompt_tokens, args.short, args.long, args.prefill = [1, 2], 8, 2, 6, [2, 16]
    if args.one is not None:
        args.output.write_text(json.dumps(measure(args, args.one)))
        return
    rows = []
    for name in args.models:
        # The parent never starts a backend: a GPU's memory belongs to one process at a time.
        row = result_of(__file__, *sys.argv[1:], "--one", name)
        if args.train_layers is not None:
            row |= training(args, name)
        rows.append(row)
        print(f"{name}: measured", file=sys.stderr, flush=True)
    print_table(rows)
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot is not None:
        plot(rows, args.plot)


def result_of(script: str | Path, *arguments: str):
    """Runs a benchmark in a process of its own, and returns the JSON that it writes."""
    variables = dict(os.environ)
    environment.set_defaults(variables)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output.json"
        command = [sys.executable, str(script), *arguments, "--output", str(output)]
        subprocess.run(command, check=True, env=variables, stdout=sys.stderr)
        return json.loads(output.read_text())


def measure(args: argparse.Namespace, name: str) -> dict:
    """Returns the sizes and times of one model in the engine."""
    config, dtype = sizes_of(name, args.small), jnp.dtype(jnp.float32 if args.small else jnp.bfloat16)
    most, longest = max(args.prompts), args.prompt_tokens + args.long
    prefill_prompts, prefill_tokens = args.prefill
    limits = EngineLimits(
        max_sequences=most,
        max_tokens_per_step=32 if args.small else 8192,
        max_length=max(longest, prefill_tokens + 1),
        # A page more for each: with none to spare some prompts wait for others' ends, and a call takes two rounds.
        num_pages=1 + max(most * (1 + pages_of(longest)), prefill_prompts * pages_of(prefill_tokens + 1)),
    )
    engine, rng = random_engine(config, dtype, limits), np.random.default_rng(0)

    def random_prompts(count: int, tokens: int) -> list[list[int]]:
        return rng.integers(0, config.vocab_size, (count, tokens)).tolist()

    # New prompts in each call: old ones would be found in the cache.
    prefill = median_s(lambda shape: generate(engine, random_prompts(*shape), 1), args.prefill)
    decode = {n: step_ms(engine, random_prompts(n, args.prompt_tokens), args.short, args.long) for n in args.prompts}
    engine.close()
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        "model": name,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "parameters": num_parameters(config),
        "active": num_active_parameters(config),
        "weights_gib": num_parameters(config) * dtype.itemsize / GIB,
        "cache_kib_per_token": config.num_hidden_layers * config.mixer.travelling_elements * dtype.itemsize / 1024,
        "in_use_gib": memory.get("bytes_in_use", 0) / GIB,
        "peak_gib": memory.get("peak_bytes_in_use", 0) / GIB,
        "decode_ms": decode,
        "prefill_tokens_per_s": prefill_prompts * prefill_tokens / prefill,
    }


def sizes_of(name: str, small: bool) -> ModelConfig:
    """Returns the published config, or a small one of its architecture."""
    config = NAMED_CONFIGS[name].without_mtp()
    if not small:
        return config
    return replace(config, **SMALL | (SMALL_EXPERTS if config.experts else {}))


def generate(engine: Engine, prompts: list[list[int]], count: int) -> None:
    """Continues the prompts by `count` tokens each."""
    engine.generate(prompts, SamplingOptions(max_new_tokens=count, ignore_eos=True))


def step_ms(engine: Engine, prompts: list[list[int]], short: int, long: int) -> float:
    """Returns the milliseconds of a decode step of these prompts."""
    seconds = [median_s(lambda count: generate(engine, prompts, count), count) for count in (short, long)]
    return 1e3 * (seconds[1] - seconds[0]) / (long - short)


def training(args: argparse.Namespace, name: str) -> dict:
    """Returns the step's seconds by number of layers, and the whole model's, extrapolated."""
    few, many = args.train_layers // 2, args.train_layers
    routing = "balanced" if NAMED_CONFIGS[name].experts else "own"
    options = ["--config", name, "--rows", str(args.rows), "--routings", routing, *(["--small"] if args.small else [])]
    script, seconds = Path(__file__).with_name("training_step.py"), {}
    for layers in (few, many):
        (result,) = result_of(script, *options, "--layers", str(layers))
        seconds[layers] = result["seconds"]
    of_layer = (seconds[many] - seconds[few]) / (many - few)
    whole = seconds[many] + of_layer * (sizes_of(name, args.small).num_hidden_layers - many)
    return {"training_s": seconds, "training_whole_s": whole, "training_tflops": result["tflops_per_gpu"]}


def print_table(rows: list[dict]) -> None:
    """Prints one column for each model."""
    first = rows[0]
    lines = {
        "parameters": lambda row: f"{row['parameters'] / 1e9:.2f} B",
        "of them active": lambda row: f"{row['active'] / 1e9:.2f} B",
        "weights": lambda row: f"{row['weights_gib']:.2f} GiB",
        "cache of a token": lambda row: f"{row['cache_kib_per_token']:.0f} KiB",
        "memory in use": lambda row: f"{row['in_use_gib']:.1f} GiB",
        "peak memory": lambda row: f"{row['peak_gib']:.1f} GiB",
    }
    for n in first["decode_ms"]:
        lines[f"decode step, prompts: {n}"] = lambda row, n=n: f"{row['decode_ms'][n]:.2f} ms"
        lines[f"tokens/s, prompts: {n}"] = lambda row, n=n: f"{1e3 * int(n) / row['decode_ms'][n]:.0f}"
    lines["prefill"] = lambda row: f"{row['prefill_tokens_per_s']:.0f} tokens/s"
    for layers in first.get("training_s", ()):
        lines[f"training step, {layers} layers"] = lambda row, layers=layers: f"{1e3 * row['training_s'][layers]:.1f} ms"
    if "training_s" in first:
        lines["  TFLOP/s"] = lambda row: f"{row['training_tflops']:.0f}"
        lines["  whole model, extrapolated"] = lambda row: f"{row['training_whole_s']:.2f} s"
    print(f"{first['device']}, jax {first['jax']}")
    print(f"{'':<28}" + "".join(f"{row['model']:>18}" for row in rows))
    for title, cell in lines.items():
        print(f"{title:<28}" + "".join(f"{cell(row):>18}" for row in rows))


def plot(rows: list[dict], path: Path) -> None:
    """Draws decode steps over the number of prompts, and prefill."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    steps, rates, prefill = figure.subplots(1, 3)
    prompts = [int(n) for n in rows[0]["decode_ms"]]
    for row in rows:
        times = list(row["decode_ms"].values())
        steps.plot(prompts, times, "o-", label=row["model"])
        rates.plot(prompts, [1e3 * n / ms for n, ms in zip(prompts, times, strict=True)], "o-", label=row["model"])
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


if __name__ == "__main__":
    main()
