"""Times `generate`, prompts in and tokens out, for a model with random weights.

    python benchmarks/generation.py                        # Qwen3-30B-A3B in bf16: 61 GB of weights
    python benchmarks/generation.py --devices 2            # two GPUs share its experts and the prompts
    python benchmarks/generation.py --small                # sizes for a CPU, in f32, as a smoke test

A step generates one more token of every sequence. Its time is the difference between generating `--long` and `--short` tokens,
over the difference of their numbers, so that prefill and the host's work cancel. Times are medians of 5 calls. Decoding is
greedy, and no sequence ends early. The peak is the process's largest so far on the first device, including weights and cache.
"""

import argparse
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from timing import median_ms

from moe_jax.config import NAMED_CONFIGS
from moe_jax.generation import generate
from moe_jax.generation.devices import generation_mesh
from moe_jax.models.random_weights import random_model

SMALL = dict(num_hidden_layers=2, hidden_size=64, num_experts=8, moe_intermediate_size=64, vocab_size=512)


def main() -> None:
    """Prints a row for each number of prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=tuple(NAMED_CONFIGS), default="qwen3-30b-a3b")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument("--long", type=int, default=144)
    parser.add_argument("--devices", type=int, default=1, help="GPUs that share the experts and the prompts")
    parser.add_argument("--small", action="store_true", help="sizes of Qwen3-MoE for a CPU, in f32, as a smoke test")
    args = parser.parse_args()
    config = NAMED_CONFIGS["qwen3-30b-a3b" if args.small else args.config]
    dtype = jnp.dtype(jnp.float32 if args.small else jnp.bfloat16)
    config = replace(config, **SMALL) if args.small else config
    model = random_model(config, dtype, mesh=generation_mesh(jax.devices()[: args.devices], config))
    name = "small" if args.small else args.config
    print(
        f"{args.devices} x {jax.devices()[0].device_kind}, jax {jax.__version__}, {name}, {dtype.name}, "
        f"prompts of {args.prompt_tokens} tokens"
    )
    print(f"{'prompts':>8}{'a step':>12}{'tokens/s':>10}{f'{args.short} tokens':>14}{'peak':>12}")
    for prompts in args.prompts:
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (prompts, args.prompt_tokens)).tolist()
        calls = (partial(generate, model, tokens, max_new_tokens=count) for count in (args.short, args.long))
        short, long = (median_ms(call, (), 1) for call in calls)
        step = (long - short) / (args.long - args.short)
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
        print(f"{prompts:>8}{step:>9.3f} ms{1e3 * prompts / step:>10.0f}{short:>11.1f} ms{peak:>8.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
