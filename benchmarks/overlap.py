"""Times gradient accumulation on one GPU, with micro-batches one after the other and overlapping (`train.micro_batch`).

    python benchmarks/overlap.py --output overlap.json
    JAX_ENABLE_PGLE=true python benchmarks/overlap.py    # XLA orders by measured times of copies and kernels
    python benchmarks/overlap.py --small            # sizes for a CPU, as a smoke test

Rows "none" have no exchange: overlapping should cost nothing. In rows "host" every token that goes to the experts, and every
output, takes a round trip through pinned host memory, forward, recomputed and backward. These copies need no cores, as those
of a network card, and stand for the exchange with experts of other devices. Exposed is the time that the exchange adds to the
step; hidden is the share of the copies' own time that does not show.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.config import NAMED_CONFIGS
from moe_jax.layers.moe import Experts
from moe_jax.models.execution import Execution
from moe_jax.models.random_weights import random_model
from moe_jax.train.gradients import accumulate_in_place
from moe_jax.train.micro_batch import accumulate_overlapping
from moe_jax.train.objective import LossWeights, NextToken, as_objective

DIRECT = Experts.__call__
TRIPS = 5
"""Round trips of a layer and micro-batch with remat: tokens and outputs forward, tokens again, gradients of both. Recomputed
outputs do not travel: nothing reads them."""

WARM_UP = 6
"""Calls before those that are timed: JAX_ENABLE_PGLE=true profiles three of them and compiles once more."""


def main() -> None:
    """Prints a line for each variant; with --output also writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3-30b-a3b", choices=tuple(NAMED_CONFIGS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384], help="tokens of a micro-batch")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-remat", action="store_true")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, as a smoke test")
    parser.add_argument("--output", type=Path, help="a JSON file")
    args = parser.parse_args()
    config = replace(NAMED_CONFIGS[args.config], num_hidden_layers=args.layers)
    if args.small:
        sizes = dict(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        config = replace(config, **sizes, head_dim=16, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=4)
        args.seq, args.tokens = 64, [128]
    device = jax.devices()[0]
    print(
        f"{device.device_kind}, jax {jax.__version__}, {args.config}, {config.num_hidden_layers} layers, {args.micro_batches} ",
        end="",
    )
    print(f"micro-batches, remat={not args.no_remat}")
    graph, params, fixed = nnx.split(random_model(config, jnp.bfloat16), nnx.Param, ...)
    results = []
    for tokens in args.tokens:
        trip = time_of_trip(tokens, config.hidden_size, args.repeats)
        copies = TRIPS * config.num_hidden_layers * args.micro_batches * trip
        without: dict[str, float] = {}
        for exchange in ("none", "host"):
            Experts.__call__ = through_host if exchange == "host" else DIRECT
            for order in ("in turn", "overlapping"):
                row = measure(order, args, graph, params, fixed, tokens)
                row |= {"tokens": tokens, "exchange": exchange, "order": order}
                line = f"{tokens:6} tokens, exchange {exchange}, {order:>11}: {row['seconds'] * 1e3:8.1f} ms, "
                line += f"temporaries {row['temporary_gib']:.2f} GiB, compiled in {row['compile_seconds']:.0f} s, "
                line += f"value {row['value']:.6f}, squared gradients {row['norm']:.6g}"
                if exchange == "none":
                    without[order] = row["seconds"]
                else:
                    row["exposed"] = row["seconds"] - without[order]
                    row["hidden"] = 1 - row["exposed"] / copies
                    line += f", copies {copies * 1e3:.0f} ms, exposed {row['exposed'] * 1e3:.1f} ms, hidden {row['hidden']:.0%}"
                print(line, flush=True)
                results.append(row)
        ratio = without["overlapping"] / without["in turn"]
        print(f"{tokens:6} tokens: overlapping / in turn without an exchange {ratio:.4f}", flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps(results, indent=1) + "\n")


def measure(
    order: str, args: argparse.Namespace, graph: nnx.GraphDef, params: nnx.State, fixed: nnx.State, tokens: int
) -> dict:
    """Returns the median time of a step's gradients, without optimizer."""
    n = args.micro_batches
    objective = as_objective(NextToken(LossWeights(aux_loss_coef=1e-3)), n)
    execution = Execution(remat=not args.no_remat, balanced_routing=True)
    if order == "overlapping":
        gradients = accumulate_overlapping(objective, graph, execution, None, n, in_place=True)
    else:
        gradients = accumulate_in_place(objective, graph, execution, n)
    batch = random_batch(n * tokens // args.seq, args.seq, params["embed_tokens"]["weight"].shape[0])
    began = time.perf_counter()
    run = jax.jit(lambda *arguments: summary(gradients(*arguments)))
    memory = run.lower(params, fixed, batch).compile().memory_analysis()
    compiled = time.perf_counter() - began
    for _ in range(WARM_UP):
        found = jax.block_until_ready(run(params, fixed, batch))
    seconds = timed(partial(run, params, fixed, batch), args.repeats)
    temporary = 0 if memory is None else memory.temp_size_in_bytes
    return {
        "seconds": seconds,
        "compile_seconds": compiled,
        "temporary_gib": temporary / 2**30,
        "value": float(found[0]),
        "norm": float(found[1]),
    }


def summary(found):
    """Returns value and norm of the gradients, so that the gradients are computed and not returned."""
    return found.value, sum(jnp.square(g).sum() for g in jax.tree.leaves(found.gradients))


def timed(call, repeats: int) -> float:
    """Returns the median seconds of a call."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def random_batch(rows: int, seq: int, vocab_size: int) -> dict[str, jax.Array]:
    """Returns rows of random tokens, one document each."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (rows, seq)).astype(np.int32)
    ones = np.ones_like(tokens)
    arrays = dict(tokens=tokens, labels=np.roll(tokens, -1, 1), loss_mask=ones, segment_ids=ones)
    arrays["positions"] = np.broadcast_to(np.arange(seq, dtype=np.int32), tokens.shape)
    return jax.device_put(arrays) | {"num_labels": jnp.float32(tokens.size)}


def through_host(self: Experts, x, weights, experts):
    """Computes what `Experts` does; tokens and outputs take a round trip through the host's memory."""
    return round_trip(DIRECT(self, round_trip(x), weights, experts))


@jax.custom_vjp
def round_trip(x):
    """Copies x to pinned host memory and back; its gradient does the same."""
    # Without the barrier XLA removes both copies.
    there = jax.lax.optimization_barrier(jax.device_put(x, jax.memory.Space.Host))
    return jax.device_put(there, jax.memory.Space.Device)


round_trip.defvjp(lambda x: (round_trip(x), None), lambda _, dx: (round_trip(dx),))


def time_of_trip(tokens: int, hidden: int, repeats: int) -> float:
    """Returns the seconds of one round trip of [tokens, hidden] in bf16, alone."""
    x, trips = jnp.ones((tokens, hidden), jnp.bfloat16), 16

    @jax.jit
    def run(x):
        return jax.lax.fori_loop(0, trips, lambda _, x: round_trip(x) * jnp.bfloat16(1.5), x)

    jax.block_until_ready(run(x))
    return timed(partial(run, x), repeats) / trips


if __name__ == "__main__":
    main()
