"""Times prefill into an empty cache, compared with prefill into a cache that is not known to be empty.

    python benchmarks/prefill.py                               # 4 layers of DeepSeek-V3, bf16: about 30 GiB of weights
    python benchmarks/prefill.py --config qwen3-30b-a3b --layers 8 --shapes 8x4096 1x32768 --output results.json
    python benchmarks/prefill.py --small                       # sizes for a CPU, in f32, as a smoke test

*empty* is generation's way: the prompt attends to itself by `kernels.attention`, and the cache is written. *any* attends to all
rows of the cache in XLA, as later tokens do. *no cache* is the forward pass alone. All have the same random weights and tokens
and `--room` further rows in the cache, and end with the last token's logits. Times are medians of `--runs` calls after a first
call. *peak* is the memory of a call with weights and cache, as the compiler reports it. First the hidden states and caches of
*empty* and *any* are compared for two prompts, one padded on the left. If they differ, the process exits with 1.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from decode_cache import SMALL, TOLERANCE
from flax import nnx

from moe_jax.config import NAMED_CONFIGS, ModelConfig
from moe_jax.layers.cache import KVCache, init_cache
from moe_jax.models.random_weights import random_model

SYSTEMS = ("empty", "any", "no cache")


def main() -> None:
    """Prints a row for each shape and system; with --output also writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=tuple(NAMED_CONFIGS), default="deepseek-v3")
    parser.add_argument("--layers", type=int, default=4, help="number of layers; the first three of DeepSeek-V3 are dense")
    parser.add_argument("--shapes", nargs="+", default=["4x4096", "1x16384"], help="batch x tokens of a prompt")
    parser.add_argument("--room", type=int, default=64, help="rows of the cache for tokens to come")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="bfloat16")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--small", action="store_true", help="sizes of DeepSeek-V3 for a CPU, in f32, as a smoke test")
    parser.add_argument("--output", type=Path, help="a JSON file")
    args = parser.parse_args()
    if args.small:
        args.config, args.dtype, args.shapes, args.runs = "deepseek-v3", "float32", ["2x200"], 2
    config = dataclasses.replace(NAMED_CONFIGS[args.config].without_mtp(), num_hidden_layers=args.layers)
    if args.small:
        config = dataclasses.replace(config, **SMALL)

    graph, weights = nnx.split(random_model(config, jnp.dtype(args.dtype)))
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, {args.layers} layers of {args.config}, {args.dtype}")
    error = difference(config, graph, weights, jnp.dtype(args.dtype))
    print(f"difference: {error:.1e}")
    print(f"{'prompts':>10} {'cache':>9} {'tokens/s':>9} {'ms':>9} {'peak GiB':>9}", flush=True)
    rows = []
    for shape in args.shapes:
        for system in args.systems:
            row = {"prompts": shape, "system": system} | measure(system, config, graph, weights, shape, args)
            times = "out of memory" if row["ms"] is None else f"{row['tokens_per_s']:>9.0f} {row['ms']:>9.2f}"
            peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
            print(f"{shape:>10} {system:>9} {times:>19} {peak:>9}", flush=True)
            rows.append(row)
    if args.output is not None:
        setting = vars(args) | {"output": str(args.output), "device": device, "jax": jax.__version__}
        args.output.write_text(json.dumps({"setting": setting, "difference": error, "rows": rows}, indent=1) + "\n")
    # A comparison with NaN is false.
    if not error < TOLERANCE[args.dtype]:
        sys.exit(1)


def measure(system: str, config: ModelConfig, graph, weights, shape: str, args: argparse.Namespace) -> dict[str, float | None]:
    """Returns times and memory for prompts of one shape; None if the device's memory is too small."""
    batch, tokens = map(int, shape.split("x"))
    prompts = jax.random.randint(jax.random.key(0), (batch, tokens), 0, config.vocab_size)

    @jax.jit
    def prefill(weights, prompts):
        model = nnx.merge(graph, weights)
        cache = None if system == "no cache" else make_cache(system, config, batch, tokens + args.room, model.dtype)
        states = model.hidden_states(prompts, positions_of(jnp.ones_like(prompts)), cache=cache)
        return jnp.einsum("bd,vd->bv", states.hidden[:, -1], model.head_weight.astype(model.dtype)), states.cache

    found: dict[str, float | None] = {"tokens_per_s": None, "ms": None, "peak_gib": None}
    try:
        run, seconds = prefill.lower(weights, prompts).compile(), []
        memory = run.memory_analysis()
        found["peak_gib"] = (
            memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
        ) / 2**30
        for _ in range(args.runs + 1):
            began = time.perf_counter()
            jax.block_until_ready(run(weights, prompts))
            seconds.append(time.perf_counter() - began)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return found
    of_call = statistics.median(seconds[1:])
    return found | {"tokens_per_s": batch * tokens / of_call, "ms": 1e3 * of_call}


def make_cache(system: str, config: ModelConfig, batch: int, rows: int, dtype) -> KVCache:
    """Returns an empty cache; for system "any" the compiler does not know that it is empty."""
    cache = init_cache(config, batch, rows, dtype)
    return dataclasses.replace(cache, written=jnp.int32(0)) if system == "any" else cache


def positions_of(segment_ids):
    """Returns the index of each token in its prompt."""
    return jnp.maximum(jnp.cumsum(segment_ids, axis=1) - 1, 0)


def difference(config: ModelConfig, graph, weights, dtype) -> float:
    """Returns the largest relative difference (Frobenius norm) of hidden states and of each layer's cache entries.

    The prompts have 600 and 500 tokens; both systems use the same experts.
    """
    tokens = jax.random.randint(jax.random.key(1), (2, 600), 0, config.vocab_size)
    segment_ids = (jnp.arange(600) >= jnp.array([[0], [100]])).astype(jnp.int32)

    @partial(jax.jit, static_argnums=0)
    def run(system, weights, expert_ids):
        model, cache = nnx.merge(graph, weights), make_cache(system, config, 2, 640, dtype)
        options = dict(cache=cache, expert_ids=expert_ids)
        states = model.hidden_states(tokens, positions_of(segment_ids), segment_ids, **options)
        layers = [of_layer[:, :600] for of_all in states.cache.kept for of_layer in of_all]
        valid = [jnp.where((segment_ids != 0)[..., None], a.reshape(2, 600, -1), 0) for a in (states.hidden, *layers)]
        return [a.astype(jnp.float32) for a in valid], states.expert_ids

    first, chosen = run("empty", weights, None)
    second, _ = run("any", weights, chosen)
    differences = [
        jnp.linalg.norm((a - b).reshape(-1)) / jnp.linalg.norm(b.reshape(-1)) for a, b in zip(first, second, strict=True)
    ]
    # Python's max would ignore NaN.
    return float(jnp.stack(differences).max())


if __name__ == "__main__":
    main()
