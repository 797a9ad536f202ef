"""Times a whole training step (forward, backward, AdamW) of a model with random weights over all GPUs of a job.

    python benchmarks/training_step.py --mesh expert=4 --rows 4 --output step.json
    moe-jax launch -- python benchmarks/training_step.py --mesh expert=4 --rows 4      # one process for each GPU
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python benchmarks/training_step.py --small --mesh fsdp=2 expert=2  # CPU

TFLOP/s are model FLOPs of one GPU (`moe_jax.cost.flops`: recomputation does not count). "of ceiling" compares them with a dense
bf16 matmul of 8192^3 on one GPU in the same process. Attention counts the keys that a token attends to: half a row on average,
fewer in packed rows. Routing "own" is the choice of a router with random weights. "rebalanced" is the same after experts were
moved according to a step's loads. "balanced" gives every expert the same load.
"""

import argparse
import gc
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from frozen_forms import FORMS, random_model_in_form

from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.config import NAMED_CONFIGS
from moe_jax.cost.flops import num_parameters, training_flops_per_token
from moe_jax.models.random_weights import random_model
from moe_jax.parallel import ContextParallel, ExpertParallel, Parallelism, default_hops, initialize_processes, make_mesh
from moe_jax.parallel.choices import PipeSchedule
from moe_jax.parallel.expert.placement import device_load
from moe_jax.train import LossWeights, NextToken, init_state, make_optimizer, make_train_step, put_batch
from moe_jax.train.rebalance import rebalance


def main() -> None:
    """Prints a line for each routing; with --output also writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3-30b-a3b", choices=tuple(NAMED_CONFIGS))
    parser.add_argument("--layers", type=int, help="number of layers; default: all")
    parser.add_argument(
        "--mesh", nargs="+", default=["fsdp=1"], metavar="AXIS=N", help="axes pipe, data, fsdp, expert, context"
    )
    parser.add_argument("--pipe-chunks", type=int, default=1, help="option of Parallelism")
    parser.add_argument("--pipe-schedule", default="uniform", choices=get_args(PipeSchedule), help="option of Parallelism")
    parser.add_argument("--transport", help="transport of ExpertParallel; default: its own choice")
    parser.add_argument(
        "--capacity-factor", type=float, default=ExpertParallel.capacity_factor, help="option of ExpertParallel"
    )
    parser.add_argument("--shadow-experts", type=int, default=0, help="option of ExpertParallel")
    parser.add_argument("--shard-optimizer", action="store_true", help="option of Parallelism")
    parser.add_argument("--context-method", default="ring", choices=("ring", "all_gather", "ulysses"))
    parser.add_argument(
        "--hops", choices=("nccl", "copies"), help="option of Parallelism; default: copies if the devices allow them"
    )
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4, help="rows of the whole batch")
    parser.add_argument("--gradient-accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument(
        "--overlap", action=argparse.BooleanOptionalAction, help="option overlap_micro_batches of Parallelism; default: its own"
    )
    parser.add_argument("--packed", action="store_true", help="rows of several documents; default: one document each")
    parser.add_argument(
        "--param-dtype", default="bfloat16", choices=("float32", "bfloat16"), help="dtype of parameters; masters are f32"
    )
    parser.add_argument("--moment-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp8", "fp8_kept"), help="of the experts' matmuls")
    parser.add_argument("--tokens-in-fp8", action="store_true", help="option of ExpertParallel; needs a precision in FP8")
    parser.add_argument("--lora-rank", type=int, help="train adapters of this rank; the weights, bfloat16, are frozen")
    parser.add_argument("--lora-expert-rank", type=int, help="the rank of each expert; default: that of LoraSettings")
    parser.add_argument(
        "--frozen-form", default="whole", choices=FORMS, help="form of the weights that --lora-rank freezes; one device"
    )
    parser.add_argument("--no-remat", action="store_true")
    parser.add_argument("--offload", action="store_true", help="keep the residuals of remat in host memory")
    parser.add_argument("--routings", nargs="+", default=["balanced", "own"], choices=("balanced", "own", "rebalanced"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, as a smoke test")
    parser.add_argument("--output", type=Path, help="a JSON file")
    args = parser.parse_args()
    initialize_processes()
    config = NAMED_CONFIGS[args.config]
    if args.small:
        # FP8 has a scale for 128 numbers.
        hidden, inter = (64, 64) if args.precision == "bf16" else (128, 128)
        sizes = dict(
            vocab_size=512, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
        )
        experts = dict(moe_intermediate_size=inter, num_experts=16, num_experts_per_tok=4)
        config = replace(config, **sizes, **(experts if config.experts else {"intermediate_size": 128}))
        args.seq = 64
    if args.layers is not None:
        config = replace(config, num_hidden_layers=args.layers)

    sizes = {name: int(size) for name, size in (axis.split("=") for axis in args.mesh)}
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = make_mesh(**sizes, devices=devices)
    experts = ExpertParallel(
        transport=args.transport,
        capacity_factor=args.capacity_factor,
        shadow_experts=args.shadow_experts,
        tokens_in_fp8=args.tokens_in_fp8,
    )
    hops = args.hops or default_hops(mesh)
    context = ContextParallel(method=args.context_method)
    parallelism = Parallelism(
        mesh,
        experts,
        context,
        hops,
        overlap_micro_batches=args.overlap,
        shard_optimizer=args.shard_optimizer,
        pipe_chunks=args.pipe_chunks,
        pipe_schedule=args.pipe_schedule,
    )
    ceiling = measure_ceiling(256 if args.small else 8192)
    first = jax.process_index() == 0
    show = print if first else lambda *_, **__: None
    show(
        f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}, {args.config}, {config.num_hidden_layers} layers, ",
        end="",
    )
    show(
        f"{num_parameters(config) / 1e9:.2f} B parameters, {args.rows} x {args.seq} tokens, {' '.join(args.mesh)}, {hops}",
        end="",
    )
    order = {None: "", True: ", overlapping", False: ", in turn"}[args.overlap]
    show(f", {args.gradient_accumulation} micro-batches{order}")
    show(f"matmul ceiling {ceiling:.0f} TFLOP/s")
    results = []
    for routing in args.routings:
        row = measure(args, config, parallelism, routing)
        gc.collect()
        row |= {
            "routing": routing,
            "mesh": sizes,
            "pipe_chunks": args.pipe_chunks,
            "pipe_schedule": args.pipe_schedule,
            "hops": hops,
            "micro_batches": args.gradient_accumulation,
            "precision": args.precision,
            "tokens_in_fp8": args.tokens_in_fp8,
            "overlap": args.overlap,
            "ceiling": ceiling,
            "of_ceiling": row["tflops_per_gpu"] / ceiling,
        }
        results.append(row)
        speed = f"{row['tokens_per_second_per_gpu']:.0f} tokens/s/GPU, {row['tflops_per_gpu']:.1f} TFLOP/s/GPU"
        memory = f"peak {row['peak_gib']:.1f} GiB, state {row['state_gib']:.1f} GiB"
        losses = f"loss {row['losses'][0]:.3f} to {row['losses'][-1]:.3f}"
        show(f"{routing:>9}: {row['seconds']:.3f} s, {speed} ({row['of_ceiling']:.1%} of ceiling), {memory}, ", end="")
        loads = f"max/mean load {row['load']:.2f}, of devices {row['device_load']:.2f}, " if "load" in row else ""
        show(f"{loads}{losses}, compiled in {row['compile_seconds']:.0f} s", flush=True)
        if routing == "rebalanced":
            show(f"           experts moved in {row['rebalance_seconds']:.2f} s", flush=True)
    if first and args.output is not None:
        args.output.write_text(json.dumps(results, indent=1) + "\n")


def measure(args: argparse.Namespace, config, parallelism: Parallelism, routing: str) -> dict:
    """Returns the median step of `--steps` steps after a first one."""
    param_dtype = jnp.dtype(args.param_dtype)
    if args.frozen_form == "whole":
        model = random_model(
            config, jnp.bfloat16, param_dtype=param_dtype, mesh=parallelism.mesh, pipe_chunks=parallelism.pipe_chunks
        )
    else:
        model = random_model_in_form(config, args.frozen_form)
    model.set_precision(args.precision)
    if args.lora_rank is not None:
        ranks = {} if args.lora_expert_rank is None else {"experts": args.lora_expert_rank}
        print(add_lora(model, LoraSettings(rank=args.lora_rank, ranks=ranks), rngs=nnx.Rngs(0)))
    optimizer = make_optimizer(1e-5, moment_dtype=jnp.dtype(args.moment_dtype))
    graph, state = nnx.graphdef(model), init_state(model, optimizer, parallelism)
    del model
    state_bytes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    step = make_train_step(
        graph,
        optimizer,
        NextToken(LossWeights(aux_loss_coef=1e-3)),
        gradient_accumulation=args.gradient_accumulation,
        remat="offload" if args.offload else not args.no_remat,
        force_balanced_routing=routing == "balanced",
        parallelism=parallelism,
    )
    rows = random_batch(args, config.vocab_size)
    flops_per_token = training_flops_per_token(config, 1 + 2 * float(rows["positions"].mean()))
    batch = put_batch(rows, state.params, parallelism)
    expert_devices = parallelism.mesh.shape["expert"]
    seconds, losses, of_rebalance = [], [], {}
    if routing == "rebalanced":
        # The first call compiles.
        for _ in range(2):
            state, metrics = step(state, batch)
            began = time.perf_counter()
            state, _ = jax.block_until_ready(rebalance(state, config, np.asarray(metrics["expert_load"]), expert_devices))
            of_rebalance = {"rebalance_seconds": time.perf_counter() - began}
    for _ in range(args.steps + 1):
        began = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - began)
    devices = parallelism.mesh.size
    median = statistics.median(seconds[1:])
    tokens = args.rows * args.seq
    load = np.asarray(metrics["expert_load"])
    loads = {"load": busiest(load), "device_load": busiest(device_load(load, expert_devices))} if len(load) else {}
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {
        "seconds": median,
        "compile_seconds": seconds[0],
        "tokens_per_second_per_gpu": tokens / median / devices,
        "tflops_per_gpu": tokens * flops_per_token / median / devices / 1e12,
        "peak_gib": peak / 2**30,
        "state_gib": state_bytes / 2**30,
        "losses": losses,
        **loads,
        **of_rebalance,
    }


def busiest(load: np.ndarray) -> float:
    """Returns the largest load over the mean, averaged over layers."""
    return float((load.max(axis=1) / load.mean(axis=1)).mean())


def random_batch(args: argparse.Namespace, vocab_size: int) -> dict[str, np.ndarray]:
    """Returns rows of random tokens without padding."""
    rng, shape = np.random.default_rng(0), (args.rows, args.seq)
    starts = rng.random(shape) < (4 / args.seq if args.packed else 0)
    starts[:, 0] = True
    index = np.arange(args.seq)
    tokens = rng.integers(0, vocab_size, shape)
    return {
        "tokens": tokens.astype(np.int32),
        "labels": np.roll(tokens, -1, axis=1).astype(np.int32),
        "loss_mask": np.ones(shape, np.int32),
        "positions": (index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)).astype(np.int32),
        "segment_ids": starts.cumsum(axis=1).astype(np.int32),
    }


def measure_ceiling(size: int) -> float:
    """Returns the TFLOP/s of one GPU's dense bf16 matmul."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    f = jax.jit(jnp.matmul)
    jax.block_until_ready(f(a, b))
    began = time.perf_counter()
    for _ in range(50):
        c = f(a, b)
    jax.block_until_ready(c)
    return 2 * size**3 * 50 / (time.perf_counter() - began) / 1e12


if __name__ == "__main__":
    main()
