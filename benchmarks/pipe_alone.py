"""Plays one rank of a pipeline alone on one GPU, and times its ticks by kind beside the model of cost.

    XLA_PYTHON_CLIENT_MEM_FRACTION=.95 python benchmarks/pipe_alone.py --output alone.json      # Qwen3-30B-A3B, rank 3 of 4
    python benchmarks/pipe_alone.py --small                                                    # sizes for a CPU, a smoke test

The rank runs the program of `parallel.pipeline.executor` with uniform ticks. It has its own layers, and sends its outputs to
itself: a hop is no transfer. Chunks read noise in place of what other ranks would send, so that kernels get numbers of usual
size. Losses are of 1/p of the tokens, as on each rank. Gradients are summed in f32; there is no optimizer.

Ticks are timed by the differences of runs that end earlier:

    F         forward passes alone, the first v p ticks
    F+B+loss  the next p ticks
    F+B       a forward and a backward pass; not apart from the loss with one chunk
    B         backward passes alone, the last v p ticks

The last rows compare a pipe of one rank with plain gradient accumulation, which adds the experts' gradients in the kernels too.
The model of cost has sums of gradients and the optimizer for a whole step; sums are dealt out to the ticks with B here.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from moe_jax import from_config
from moe_jax.config import NAMED_CONFIGS
from moe_jax.cost import PlannedStep, predict
from moe_jax.cost.machine import H200, SHEETS, scaled
from moe_jax.cost.stage import stage_seconds
from moe_jax.kernels.shapes import vary_as
from moe_jax.models.execution import Execution
from moe_jax.models.random_weights import random_model
from moe_jax.parallel import make_mesh
from moe_jax.parallel.choices import MeshShape
from moe_jax.parallel.pipeline import executor
from moe_jax.parallel.pipeline.ticks import num_passes, num_ticks
from moe_jax.train.batch import micro_batches_of
from moe_jax.train.gradients import accumulate_in_place
from moe_jax.train.objective import LossWeights, NextToken, as_objective
from moe_jax.train.pipeline_front import Front
from moe_jax.train.pipeline_passes import RankPasses, passes_of_layers


def main() -> None:
    """Prints a table of ticks, memory and compile times, and the comparison; with --output also writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3-30b-a3b", choices=tuple(NAMED_CONFIGS))
    parser.add_argument("--layers", type=int, default=12, help="layers of the rank; the pipe has these times its ranks")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the pipe that is played")
    parser.add_argument("--rank", type=int, help="the rank that is played; default: the last")
    parser.add_argument("--chunks", type=int, default=3, help="chunks of the rank; must divide its layers")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="rows of a micro-batch")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--remat", nargs="+", default=["yes", "no"], choices=("yes", "no", "offload"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-plain", action="store_true", help="leave out the comparison with plain accumulation")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, as a smoke test")
    parser.add_argument("--output", type=Path, help="a JSON file; default: pipe_alone.json in the folder $OUT, if that is set")
    args = parser.parse_args()
    config = NAMED_CONFIGS[args.config]
    if args.small:
        sizes = dict(vocab_size=64, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
        config = replace(config, **sizes, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
        args.seq, args.rows, args.layers, args.ranks, args.chunks, args.micro_batches = 16, 2, 2, 2, 2, 4
    if args.layers % args.chunks:
        parser.error(f"--chunks {args.chunks} must divide --layers {args.layers}")
    args.rank = args.ranks - 1 if args.rank is None else args.rank
    device = jax.devices()[0]
    print(
        f"{device.device_kind}, jax {jax.__version__}, {args.config}: rank {args.rank} of {args.ranks}, {args.layers} layers "
    )
    print(f"in {args.chunks} chunks, {args.micro_batches} micro-batches of {args.rows} x {args.seq} tokens", flush=True)
    batch = random_batch(args, config.vocab_size)
    own = replace(config, num_hidden_layers=args.layers)
    _, params, fixed = nnx.split(random_model(own, jnp.bfloat16), nnx.Param, ...)
    results: dict = {"device": device.device_kind, "arguments": {k: v for k, v in vars(args).items() if k != "output"}}
    results["alone"] = [alone(args, config, params, fixed, batch, {"yes": True, "no": False}.get(r, r)) for r in args.remat]
    if not args.skip_plain:
        results["plain"] = against_plain(args, own, params, fixed, batch)
    show(results)
    output = args.output or (Path(os.environ["OUT"]) / "pipe_alone.json" if os.environ.get("OUT") else None)
    if output is not None:
        output.write_text(json.dumps(results, indent=1) + "\n")


def alone(args: argparse.Namespace, config, params: nnx.State, fixed: nnx.State, batch: dict, remat) -> dict:
    """Times the ticks of the rank; returns them by kind, with the predictions."""
    ranks, chunks, micro_batches = sizes = args.ranks, args.chunks, args.micro_batches
    whole = replace(config, num_hidden_layers=args.layers * ranks)
    graph = graph_of(whole)
    first, last = ranks * chunks, num_ticks(*sizes)
    both_end = num_passes(*sizes) + ranks - 1

    def run(params, fixed, batch, noise, ends):
        def spans(*sizes, puts_off):
            yield executor._Span(True, "", 0, ends[0])
            yield executor._Span(True, "B", first, ends[1])
            yield executor._Span(False, "B", both_end, ends[2])

        with played_alone(ranks, args.rank), mock.patch.object(executor, "_spans", spans):
            return gradients_of_rank(args, graph, params, fixed, batch, remat, sizes, noise)

    noise = jax.random.normal(jax.random.key(1), (2, args.rows, args.seq, config.hidden_size), jnp.bfloat16)
    ends = [(0, first, both_end), (first, first, both_end), (first, first + ranks, both_end)]
    ends += [(first, both_end, both_end), (first, both_end, last)]
    arguments = (params, fixed, batch, noise)
    program, compiled_in = compiled(run, *arguments, np.asarray(ends[0], np.int32))
    times = [timed(program, (*arguments, np.asarray(each, np.int32)), args.repeats) for each in ends]
    none, forward, with_loss, both, step = times
    between = both_end - first - ranks
    found = {"F": (forward - none) / first, "F+B+loss": (with_loss - forward) / ranks}
    # Losses of the last p micro-batches but one are in these ticks, and one more is in the tick behind them.
    losses = micro_batches - ranks - 1
    of_loss = 0.0
    if chunks > 1 and between > losses >= 0:
        found["F+B"] = (both - with_loss - losses * found["F+B+loss"]) / (between - losses)
        of_loss = found["F+B+loss"] - found["F+B"]
    found["B"] = (step - both - of_loss) / (last - both_end)
    planned = PlannedStep(
        whole,
        MeshShape(pipe=ranks),
        args.rows * micro_batches,
        args.seq,
        remat=remat,
        gradient_accumulation=micro_batches,
        pipe_chunks=chunks,
        hops="copies",
    )
    memory = program.memory_analysis()
    return {
        "remat": remat,
        "ticks": found,
        "predicted_ticks": predicted_ticks(planned),
        "step_without_optimizer": step - none,
        "beside_ticks": none,
        "compile_seconds": compiled_in,
        "gib": gib(memory),
        "predicted_gib": predicted_gib(planned),
        "host_gib": 0 if memory is None else memory.host_temp_size_in_bytes / 2**30,
        "peak_in_use_gib": peak_in_use(),
    }


def against_plain(args: argparse.Namespace, config, params: nnx.State, fixed: nnx.State, batch: dict) -> dict:
    """Times a step's gradients through a pipe of one rank, and by plain accumulation in turn with it."""
    graph, n, objective = graph_of(config), args.micro_batches, objective_of(args)

    def piped(params, fixed, batch):
        return gradients_of_rank(args, graph, params, fixed, batch, True, (1, 1, n), None)

    def plain(params, fixed, batch):
        found = accumulate_in_place(objective, graph, Execution(remat=True, balanced_routing=True), n)(params, fixed, batch)
        return found.value, squared(found.gradients)

    rows = {}
    programs = {"piped": compiled(piped, params, fixed, batch), "plain": compiled(plain, params, fixed, batch)}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(2):
        for name, (program, _) in programs.items():
            seconds[name].append(timed(program, (params, fixed, batch), args.repeats))
    for name, (program, compiled_in) in programs.items():
        value, norm = (float(np.asarray(x).reshape(-1)[0]) for x in program(params, fixed, batch))
        memory = gib(program.memory_analysis())
        rows[name] = {
            "seconds": min(seconds[name]),
            "compile_seconds": compiled_in,
            "gib": memory,
            "value": value,
            "norm": norm,
        }
    return rows


def gradients_of_rank(args, graph, params, fixed, batch, remat, sizes, noise):
    """Returns a rank's value, and the squared norm of its gradients; `noise` [2, rows, seq, hidden] or None."""
    _, chunks, micro_batches = sizes
    mesh = make_mesh(devices=jax.devices()[:1])
    objective, execution = objective_of(args), Execution(remat=remat, balanced_routing=True)
    stacked, scalars = micro_batches_of(
        objective.prepare(batch, jnp.float32(micro_batches * args.rows * args.seq)), micro_batches
    )

    def local(params, fixed, stacked, noise):
        params, stacked, noise = vary_as((params, stacked, noise), lax.axis_index("pipe"))
        front = Front(passes_of_layers(objective, graph, params, fixed, execution, mesh), stacked)
        passes = RankPasses(front.micro, chunks, stacked, scalars, front.forward())
        of_pipeline = passes.of_pipeline()
        if noise is not None:
            of_pipeline = with_noise(of_pipeline, noise, args.rank)
        totals = executor.run_ticks(of_pipeline, chunks, micro_batches, passes.zeros())
        gradients = front.backward(totals.embedded[:-1], totals.gradients)
        return totals.value[None], squared(gradients)[None]

    whole, pipe = PartitionSpec(), PartitionSpec("pipe")
    call = jax.shard_map(local, mesh=mesh, in_specs=(whole, whole, whole, whole), out_specs=(pipe, pipe))
    value, norm = call(params, fixed, stacked, noise)
    return value[0], norm[0]


def with_noise(passes: executor.PipelinePasses, noise, rank: int) -> executor.PipelinePasses:
    """Returns the passes with noise in place of the arrays that other ranks would send. Each rank computes losses."""

    def forward(of_tick, moving, slot):
        return passes.forward(of_tick, moving._replace(x=noise[0]) if slot is not None else moving, slot)

    def backward(of_tick, saved, dy, totals):
        # Gradients of the usual size: losses are means over all tokens.
        x = jnp.where(of_tick.exists, noise[1] * jnp.bfloat16(1e-5), 0)
        return passes.backward(of_tick, saved, dy._replace(x=vary_as(x, dy.x)), totals)

    def loss(i, _, finished, totals):
        return passes.loss(i, rank, finished, totals)

    return replace(passes, forward=forward, backward=backward, loss=loss)


@contextlib.contextmanager
def played_alone(ranks: int, rank: int) -> Iterator[None]:
    """Makes functions of `jax.lax` see `ranks` ranks along `pipe`, of which this device is one: transfers go to itself."""
    size, index, permute = lax.axis_size, lax.axis_index, lax.ppermute
    patched = {
        "axis_size": lambda name: ranks if name == "pipe" else size(name),
        "axis_index": lambda name: index(name) + rank if name == "pipe" else index(name),
        "ppermute": lambda x, name, pairs: permute(x, name, [(0, 0)] if name == "pipe" else pairs),
        "psum_scatter": lambda x, name, scatter_dimension, tiled: lax.index_in_dim(x, rank, scatter_dimension, False),
    }
    with contextlib.ExitStack() as stack:
        for name, function in patched.items():
            stack.enter_context(mock.patch.object(lax, name, function))
        yield


def predicted_ticks(step: PlannedStep) -> dict[str, float]:
    """Returns the seconds of a tick of each kind by the model of cost."""
    machine, found = machine_of_device(), predict(step, machine_of_device()).seconds
    chunk = stage_seconds(step, step.joined_stage, step.layers_of_chunk, machine)
    forward, backward = sum(chunk.forward.values()), sum(chunk.backward.values())
    backward += found["sums"] / (step.gradient_accumulation * step.pipe_chunks)
    loss = found["loss"] / step.gradient_accumulation
    return {"F": forward, "F+B+loss": forward + backward + loss, "F+B": forward + backward, "B": backward}


def predicted_gib(step: PlannedStep) -> float:
    """Returns the model's peak of a rank in GiB, without masters, moments and the ranks' parts of the tables."""
    layers = sum(2 * p.own_size for p in step.parameters if p.by_layer)
    found = predict(step, machine_of_device()).bytes
    return (layers + sum(found[part] for part in ("gradients", "activations", "workspace"))) / 2**30


def machine_of_device():
    """Returns the machine that `moe-jax plan` takes for the device; an H200 for devices that it does not know."""
    kind = jax.devices()[0].device_kind.lower()
    return next((scaled(sheet) for name, sheet in SHEETS.items() if name in kind.replace(" ", "")), H200)


def graph_of(config) -> nnx.GraphDef:
    """Returns the graph of a model, without arrays."""
    return nnx.graphdef(nnx.eval_shape(lambda: from_config(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))


def objective_of(args: argparse.Namespace):
    """Returns the objective of a step."""
    return as_objective(NextToken(LossWeights(aux_loss_coef=1e-3)), args.micro_batches)


def squared(gradients: nnx.State):
    """Returns the squared norm, so that gradients are computed and not returned."""
    return sum(jnp.square(g).sum() for g in jax.tree.leaves(gradients))


def compiled(function, *arguments) -> tuple:
    """Returns the compiled program, and the seconds of tracing and compiling it."""
    began = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    return program, time.perf_counter() - began


def timed(program, arguments: tuple, repeats: int) -> float:
    """Returns the median seconds of a call after a first one."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def gib(memory) -> float:
    """Returns the GiB that a program needs: arguments and temporaries. NaN if the compiler does not say."""
    return math.nan if memory is None else (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30


def peak_in_use() -> float:
    """Returns the peak GiB of the process so far; 0 on a CPU."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30


def random_batch(args: argparse.Namespace, vocab_size: int) -> dict[str, jax.Array]:
    """Returns rows of random tokens, one document each."""
    shape = args.micro_batches * args.rows, args.seq
    tokens = np.random.default_rng(0).integers(0, vocab_size, shape).astype(np.int32)
    ones = np.ones_like(tokens)
    arrays = dict(tokens=tokens, labels=np.roll(tokens, -1, 1), loss_mask=ones, segment_ids=ones)
    arrays["positions"] = np.broadcast_to(np.arange(args.seq, dtype=np.int32), shape)
    arrays = jax.device_put(arrays)
    return arrays | {"num_labels": jnp.float32(tokens.size)}


def show(results: dict) -> None:
    """Prints the tables."""
    print(f"\n{'remat':<8} {'tick':<9} {'measured':>11} {'predicted':>11} {'ratio':>6}")
    for row in results["alone"]:
        for kind, seconds in row["ticks"].items():
            predicted = row["predicted_ticks"][kind]
            line = f"{row['remat']!s:<8} {kind:<9} {1e3 * seconds:8.2f} ms {1e3 * predicted:8.2f} ms "
            print(line + f"{seconds / predicted:6.2f}")
    print(f"\n{'remat':<8} {'ticks of a step':>15} {'beside':>9} {'memory':>10} {'predicted':>10} ", end="")
    print(f"{'in use':>10} {'compiled in':>12}")
    for row in results["alone"]:
        line = (
            f"{row['remat']!s:<8} {row['step_without_optimizer']:13.3f} s {row['beside_ticks']:7.3f} s {row['gib']:6.1f} GiB "
        )
        print(line + f"{row['predicted_gib']:6.1f} GiB {row['peak_in_use_gib']:6.1f} GiB {row['compile_seconds']:10.1f} s")
    if "plain" in results:
        piped, plain = results["plain"]["piped"], results["plain"]["plain"]
        print(
            f"\n{'gradients of a step':<20} {'time':>10} {'memory':>10} {'compiled in':>12} {'value':>10} {'squared norm':>13}"
        )
        for name, row in (("a pipe of one rank", piped), ("plain accumulation", plain)):
            line = f"{name:<20} {row['seconds']:8.4f} s {row['gib']:6.1f} GiB {row['compile_seconds']:10.1f} s "
            print(line + f"{row['value']:10.5f} {row['norm']:13.6g}")
        ratios = [piped[name] / plain[name] for name in ("seconds", "compile_seconds")]
        more = piped["gib"] - plain["gib"]
        print(f"{'pipe / plain':<20} {ratios[0]:8.4f}   {more:+6.1f} GiB {ratios[1]:10.2f}")
        alone = ", ".join(f"{row['compile_seconds'] / plain['compile_seconds']:.2f}" for row in results["alone"])
        print(f"compile time of the rank played alone / plain: {alone}")


if __name__ == "__main__":
    main()
