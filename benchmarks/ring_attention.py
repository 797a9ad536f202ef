"""Times attention over a sequence split over the GPUs of one host, compared with one GPU for the whole sequence.

    python benchmarks/ring_attention.py --output results.json
    python benchmarks/ring_attention.py --hops nccl        # without peer-to-peer copies
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python benchmarks/ring_attention.py --small                    # on a CPU

For n GPUs the causal sequence has n * `--tokens` tokens. Efficiency is the time of one GPU for the whole sequence over n times
the time of n GPUs. TFLOP/s count one GPU's work and only keys that a query attends to: 4*H*N*d forward, 14*H*N*d with
backward, with N = S*S/2 pairs. "hop" is one `ppermute` of a device's k and v alone, in GB/s that leave each device.

Outputs and gradients are compared with one GPU's. The process exits with 1 if they differ or a method failed. Times are
the median of `--groups` groups of `--launches` calls between two synchronisations, on random data. Groups of all methods
alternate.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.kernels import attention
from moe_jax.parallel import ContextParallel, context_attention, default_hops, shard_sequence, unshard_sequence
from moe_jax.parallel.choices import Hops
from moe_jax.parallel.collectives.hops import COPIES, MANY_AT_ONCE
from moe_jax.parallel.sequence.attention import Method
from moe_jax.parallel.sequence.layouts import Layout

SPLIT = P(None, "context")

TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
"""Largest accepted difference, relative in the Frobenius norm."""

ALONE, HOP = "one device", "hop"

COLUMNS = (
    "devices",
    "tokens",
    "method",
    "fwd_ms",
    "fwd_tflops",
    "fwd_eff",
    "both_ms",
    "both_tflops",
    "both_eff",
    "error",
    "parity",
)


def main() -> None:
    """Prints a row for each number of devices and method; with --output also writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", type=int, help="numbers of devices; default: the powers of two up to all")
    parser.add_argument("--methods", nargs="+", choices=get_args(Method), default=list(get_args(Method)))
    parser.add_argument("--layout", choices=get_args(Layout), default="zigzag")
    parser.add_argument("--hops", choices=get_args(Hops), help="default: copies if the devices allow them")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of each device")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="bfloat16")
    parser.add_argument("--launches", type=int, default=10)
    parser.add_argument("--groups", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, in f32, as a smoke test")
    parser.add_argument("--output", type=Path, help="a JSON file")
    args = parser.parse_args()
    if args.small:
        args.tokens, args.heads, args.kv_heads, args.head_dim, args.dtype = 256, 8, 4, 16, "float32"
        args.launches, args.groups = 2, 3
    args.hops = args.hops or default_hops(make_mesh(jax.device_count()))
    counts = args.devices or [2**i for i in range(jax.device_count().bit_length())]

    print(
        f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}, {args.dtype}, {args.heads} heads on "
        f"{args.kv_heads} of {args.head_dim}, layout {args.layout}, hops by {args.hops}"
    )
    print(" ".join(f"{name:>11}" for name in COLUMNS), flush=True)
    rows = []
    for devices in counts:
        for row in measure(devices, args):
            print(_line(row), flush=True)
            rows.append(row)
    if args.output is not None:
        setting = vars(args) | {"output": str(args.output), "device": jax.devices()[0].device_kind, "jax": jax.__version__}
        args.output.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")
    if any(row.get("parity") == "WRONG" or "failure" in row for row in rows):
        sys.exit(1)


def measure(devices: int, args: argparse.Namespace) -> list[dict]:
    """Returns the rows of one number of devices; the first is one device alone, with the reference results."""
    tokens, scale = devices * args.tokens, args.head_dim**-0.5
    one, mesh = make_mesh(1), make_mesh(devices)
    whole = make_inputs(tokens, args)
    split = [jax.device_put(shard_sequence(a, devices, args.layout), NamedSharding(mesh, SPLIT)) for a in whole]
    systems = {ALONE: (functools.partial(attend_alone, scale=scale), one, whole)}
    for method in args.methods:
        options = dict(scale=scale, parallel=ContextParallel(layout=args.layout, method=method, hops=args.hops))
        systems[method] = functools.partial(context_attention, **options), mesh, split

    rows, forwards, steps, expected = {}, {}, {}, None
    for name, (f, on, inputs) in systems.items():
        row = rows[name] = {"devices": devices, "tokens": tokens, "method": name}
        try:
            step = functools.partial(on_mesh(functools.partial(forward_and_backward, f), on, args.hops), *inputs)
            forward = functools.partial(on_mesh(f, on, args.hops), *inputs[:3])
            found = step()
            if name == ALONE:
                expected = found
            elif expected is not None:
                row |= compare([unshard_sequence(a, devices, args.layout) for a in found], expected, args.dtype)
            jax.block_until_ready(forward())
            forwards[name], steps[name] = forward, step
        except Exception as error:  # One system's failure is a row, not the end of the others.
            row["failure"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:160]

    flops = 2 * args.heads * tokens**2 * args.head_dim
    for part, calls, factor in (("fwd", forwards, 1.0), ("both", steps, 3.5)):
        times = median_ms(calls, args.launches, args.groups)
        for name, ms in times.items():
            used = systems[name][1].size
            rows[name] |= {f"{part}_ms": ms, f"{part}_tflops": factor * flops / used / ms / 1e9}
            if ALONE in times:
                rows[name][f"{part}_eff"] = times[ALONE] / used / ms
    if devices > 1:
        rows[HOP] = {"devices": devices, "tokens": tokens, "method": HOP} | measure_hop(split[1], split[2], mesh, args)
    return list(rows.values())


def measure_hop(k, v, mesh: jax.sharding.Mesh, args: argparse.Namespace) -> dict:
    """Times the hop that a step of the ring has to hide."""
    pairs = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]
    both = jax.block_until_ready(on_mesh(lambda k, v: jnp.concatenate([k, v]), mesh, args.hops)(k, v))
    hop = on_mesh(lambda both: jax.lax.ppermute(both, "context", pairs), mesh, args.hops)
    ms = median_ms({HOP: functools.partial(hop, both)}, args.launches, args.groups)[HOP]
    return {"fwd_ms": ms, "gb_per_s": both.nbytes / mesh.size / ms / 1e6}


def make_mesh(devices: int) -> jax.sharding.Mesh:
    """Returns a mesh of the first devices along an axis `context`."""
    return jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def make_inputs(tokens: int, args: argparse.Namespace) -> list[jax.Array]:
    """Returns q, k, v and the gradient of the result, whole on the first device."""
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 4)
    heads = (args.heads, args.kv_heads, args.kv_heads, args.heads)
    shapes = [(1, tokens, count, args.head_dim) for count in heads]
    return [jax.random.normal(key, shape, args.dtype) for key, shape in zip(keys, shapes, strict=True)]


def on_mesh(f: Callable, mesh: jax.sharding.Mesh, hops: Hops) -> Callable:
    """Returns jitted f on each device's part of its arguments, which are split along their tokens."""
    options = COPIES | MANY_AT_ONCE if hops == "copies" and mesh.size > 1 else None
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT), compiler_options=options)


def attend_alone(q, k, v, *, scale: float):
    """Computes causal attention of a whole sequence of one segment."""
    segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    return attention(q, k, v, scale=scale, query_segment_ids=segment_ids, key_segment_ids=segment_ids)


def forward_and_backward(f: Callable, q, k, v, dout) -> tuple:
    """Returns out and the gradients to q, k and v."""
    out, pullback = jax.vjp(f, q, k, v)
    return out, *pullback(dout)


def compare(found: list[jax.Array], expected: list[jax.Array], dtype: str) -> dict:
    """Returns relative errors in the Frobenius norm, and "ok" or "WRONG" for their size."""
    errors = {}
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        a, b = jax.device_put(a, jax.devices()[0]).astype(jnp.float32), jax.device_put(b, jax.devices()[0]).astype(jnp.float32)
        errors[name] = float(jnp.linalg.norm((a - b).reshape(-1)) / jnp.linalg.norm(b.reshape(-1)))
    # A comparison with NaN is false.
    small = all(error < TOLERANCE[dtype] for error in errors.values())
    return {"errors": errors, "error": max(errors.values()), "parity": "ok" if small else "WRONG"}


def median_ms(calls: dict[str, Callable], launches: int, groups: int) -> dict[str, float]:
    """Returns the milliseconds of each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in (*calls.values(), *calls.values()):
        jax.block_until_ready(call())
    for _ in range(groups):
        for name, call in calls.items():
            began = time.perf_counter()
            for _ in range(launches):
                result = call()
            jax.block_until_ready(result)
            times[name].append((time.perf_counter() - began) / launches)
    return {name: 1e3 * statistics.median(of_call) for name, of_call in times.items()}


def _line(row: dict) -> str:
    values = (row.get(name, "") for name in COLUMNS)
    line = " ".join(f"{f'{value:.4g}' if isinstance(value, float) else value:>11}" for value in values)
    if "gb_per_s" in row:
        line += f"{row['gb_per_s']:.0f} GB/s"
    return line + row.get("failure", "")


if __name__ == "__main__":
    main()
