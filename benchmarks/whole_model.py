"""Times one forward and one backward pass of a whole Qwen3-MoE with random weights: ours and transformers on the same GPU.

    python benchmarks/whole_model.py                                  # Qwen3-30B-A3B, 100 tokens: about 115 GiB of GPU memory
    python benchmarks/whole_model.py --layers 4 --systems moe_jax grouped_mm

Every system runs in its own process. *Forward* computes the logits without gradients; *backward* is the backward pass of the
sum of all logits. Times are medians after a first run. transformers needs a torch that sees the GPU.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version

SYSTEMS = ("moe_jax", "grouped_mm", "eager")


def main() -> None:
    """Runs each system in a child process and prints one row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3-30b-a3b", help="as in moe-jax check --random-config")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--layers", type=int, help="number of layers; default: all")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--in-this-process", choices=SYSTEMS, help="measure one system and print it as JSON")
    args = parser.parse_args()
    if args.in_this_process is not None:
        measure = measure_moe_jax if args.in_this_process == "moe_jax" else measure_transformers
        print(json.dumps(measure(args)))
        return
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "torch", "transformers"))
    print(f"{args.config}, {args.layers or 'all'} layers, {args.tokens} tokens, bf16; {versions}", flush=True)
    print(f"{'system':<12} {'forward s':>10} {'backward s':>11} {'peak GiB':>9}")
    for system in args.systems:
        child = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--in-this-process", system], stdout=subprocess.PIPE, text=True
        )
        if child.returncode:
            print(f"{system:<12} failed with status {child.returncode}", flush=True)
            continue
        row = json.loads(child.stdout.splitlines()[-1])
        print(f"{system:<12} {row['forward_s']:>10.4f} {row['backward_s']:>11.4f} {row['peak_gib']:>9.1f}", flush=True)


def measure_moe_jax(args: argparse.Namespace) -> dict[str, float]:
    """Returns the times and memory that `moe-jax check` reports."""
    import os

    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    from moe_jax.check.report import check_random

    report = check_random(_config(args), args.tokens, repeats=args.runs)
    return {
        "forward_s": report.forward_seconds,
        "backward_s": report.backward_seconds,
        "peak_gib": report.peak_memory_gib,
    }


def measure_transformers(args: argparse.Namespace) -> dict[str, float]:
    """Returns the same for transformers' model, with the system as its `experts_implementation`."""
    import torch
    import transformers

    from moe_jax.config import config_to_dict

    config = transformers.Qwen3MoeConfig(
        **config_to_dict(_config(args)), attn_implementation="sdpa", experts_implementation=args.in_this_process
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=config.initializer_range)
    tokens = torch.randint(0, config.vocab_size, (1, args.tokens), device="cuda")
    forward, backward = [], []
    for _ in range(args.runs + 1):
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
    return {
        "forward_s": statistics.median(forward[1:]),
        "backward_s": statistics.median(backward[1:]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def _config(args: argparse.Namespace):
    from moe_jax.config import NAMED_CONFIGS

    config = NAMED_CONFIGS[args.config]
    return config if args.layers is None else replace(config, num_hidden_layers=args.layers)


if __name__ == "__main__":
    main()
