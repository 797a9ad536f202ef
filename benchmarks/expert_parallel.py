"""Measures expert parallelism over the GPUs of one host: bandwidth of the exchange, and scaling of one MoE layer.

    python benchmarks/expert_parallel.py --output results.json
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python benchmarks/expert_parallel.py --small     # on a CPU

Exchange: GB/s that leave each device by dispatch and by combine of each transport. Empty slots count, except with "ragged"
(`moe_jax.experimental.ragged`). A plain `lax.all_to_all` of the buffers of transport `all_to_all` stands beside them. Routes
are made beforehand.

Layer: every device has the same number of tokens, and the experts are divided among the devices. Efficiency is the time on one
device with all experts over the time on n devices. "load" is the choices of the busiest device's experts over the mean, which
bounds the efficiency. Routing "zipf" has popular experts anywhere, "crowded" on the first devices. "placed" is "crowded" after
`train.rebalance` has distributed the experts. Outputs and gradients are compared with one device that computes everything. "by
copies" uses peer-to-peer copies instead of NCCL's kernels. "no overlap" forbids XLA to overlap collectives with computation. "n
shadows" is a transport with up to n shadow experts (replicas); column "shadows" is the number that the call used. With
`--precision fp8` the experts multiply in FP8, and "tokens in FP8" is a transport whose tokens travel so.

Times are the median of 5 groups of `--launches` calls between two synchronisations. A failure is a row with its error, and the
other measurements continue. The process exits with 1 if anything failed or differs.
"""

import argparse
import contextlib
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from timing import median_ms

from moe_jax.config import EXPERT_LAYERS
from moe_jax.experimental.ragged import RAGGED
from moe_jax.kernels import Precision, experts_mlp
from moe_jax.parallel import ExpertParallel, default_hops, expert_parallel_mlp
from moe_jax.parallel.collectives.hops import COPIES, MANY_AT_ONCE
from moe_jax.parallel.expert import TRANSPORTS, combine, dispatch
from moe_jax.parallel.expert.placement import balanced_order
from moe_jax.parallel.expert.routes import first_route, owners, queue
from moe_jax.parallel.expert.settings import Transport, TransportName, first_capacity

SPLIT = P("expert")

AnyTransport = TransportName | Transport

EXCHANGE = dict(tokens=4096, **EXPERT_LAYERS["deepseek-v3"]._asdict())
"""The sizes for which DeepEP publishes its bandwidth: DeepSeek-V3's."""

LAYER = dict(tokens=8192, **EXPERT_LAYERS["qwen3-30b-a3b"]._asdict())
"""A layer of Qwen3-30B-A3B."""

ROUTINGS = "uniform", "zipf", "crowded", "placed"

NO_OVERLAP = {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}
"""Compiler option for GPUs."""

TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
"""Largest accepted difference, relative in the Frobenius norm."""

TOLERANCE_IN_FP8 = 5e-2
"""The same of experts in FP8: their gradient of gate and up reads rounded tokens."""


def main() -> None:
    """Prints a row for each measurement; with --output also writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", type=int, help="numbers of devices; default: all; the layer also on one")
    parser.add_argument(
        "--transports", nargs="+", choices=(*TRANSPORTS, RAGGED.name), default=TRANSPORTS, help="ragged: experimental"
    )
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=["uniform", "zipf"])
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the experts' popularity")
    parser.add_argument("--tokens", type=int, default=LAYER["tokens"], help="tokens of each device, in the layer")
    parser.add_argument("--capacity-factor", type=float, default=1.25)
    parser.add_argument("--group-size", type=int, help="group size of transport pairwise; default: its own choice")
    parser.add_argument(
        "--shadows", nargs="*", type=int, default=[], help="maximum numbers of shadow experts to try as well, in the layer"
    )
    parser.add_argument(
        "--flops-per-byte",
        type=float,
        default=ExpertParallel.flops_per_byte,
        help="FLOPs per byte from which a shadow expert pays",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(TOLERANCE))
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp8", "fp8_kept"), help="of the experts, in the layer")
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--skip", choices=("exchange", "layer"))
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, in f32, as a smoke test")
    parser.add_argument("--output", type=Path, help="a JSON file")
    args = parser.parse_args()
    exchange, layer = dict(EXCHANGE), dict(LAYER, tokens=args.tokens)
    if args.small:
        exchange, layer = (dict(sizes, tokens=128, hidden=64, experts=32, top_k=4) for sizes in (exchange, layer))
        layer["inter"], args.dtype, args.launches = 32, "float32", 1
        if args.precision != "bf16":
            layer["hidden"], layer["inter"], args.dtype = 128, 128, "bfloat16"
    counts = args.devices or [jax.device_count()]

    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}, {args.dtype}, {args.precision}")
    rows = []
    if args.skip != "exchange":
        rows += _print_each(measure_exchange(counts, exchange, args))
    if args.skip != "layer":
        rows += _print_each(measure_layer(counts, layer, args))
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=1) + "\n")
    if any("error" in row or row.get("parity") == "WRONG" for row in rows):
        sys.exit(1)


def measure_exchange(counts: list[int], sizes: dict, args: argparse.Namespace):
    """Yields rows of bandwidths."""
    tokens, hidden, experts, k = sizes["tokens"], sizes["hidden"], sizes["experts"], sizes["top_k"]
    for devices in counts:
        if devices == 1:
            continue
        mesh, keys = make_mesh(devices), jax.random.split(jax.random.key(0), 2)
        capacity = first_capacity(tokens, k, experts, devices, args.capacity_factor)
        chosen = choose(keys[0], devices * tokens, experts, k, "uniform", args, mesh)

        def make_route(chosen, experts=experts, devices=devices, capacity=capacity):
            queues = queue(owners(chosen, experts, devices), jnp.zeros(chosen.shape), devices, capacity)
            return first_route(queues, capacity)

        route = on_mesh(make_route, mesh)(chosen)
        x = normal(keys[1], (devices * tokens, hidden), args.dtype, mesh)
        buffer = normal(keys[1], (devices * devices, capacity.tokens, hidden), args.dtype, mesh)
        plain = on_mesh(lambda buffer: jax.lax.all_to_all(buffer, "expert", 0, 0), mesh)
        leaving = {name: (devices - 1) * capacity.tokens for name in ("all_to_all", "pairwise")}
        leaving["gather"] = (devices - 1) * tokens
        leaving["ragged"] = float((route.sent.sum() - route.sent.reshape(devices, devices).trace()) / devices)
        row_bytes = hidden * x.dtype.itemsize / 1e6
        plain_gbs = float("nan")
        row = dict(measured="exchange", devices=devices, what="lax.all_to_all")
        with failure_in(row):
            row["dispatch_ms"] = median_ms(plain, (buffer,), args.launches)
            row["dispatch_gbs"] = plain_gbs = leaving["all_to_all"] * row_bytes / row["dispatch_ms"]
        yield row
        for what, transport, options in with_and_without_copies(devices, args):
            how = "expert", transport
            sent = leaving[what.split()[0]]
            row = dict(measured="exchange", devices=devices, what=what)
            with failure_in(row):
                send = on_mesh(lambda x, route, how=how: dispatch(x, route, *how), mesh, options)
                back = on_mesh(lambda rows, route, how=how, x=x: combine(rows, route, *how).astype(x.dtype), mesh, options)
                received = jax.block_until_ready(send(x, route))
                for name, f, argument in (("dispatch", send, x), ("combine", back, received)):
                    row[f"{name}_ms"] = median_ms(f, (argument, route), args.launches)
                    row[f"{name}_gbs"] = sent * row_bytes / row[f"{name}_ms"]
                total_gbs = 2 * sent * row_bytes / (row["dispatch_ms"] + row["combine_ms"])
                row["of_all_to_all"] = total_gbs / plain_gbs
            yield row


def measure_layer(counts: list[int], sizes: dict, args: argparse.Namespace):
    """Yields rows of times, efficiencies and errors."""
    tokens, hidden, inter, experts, k = (sizes[name] for name in ("tokens", "hidden", "inter", "experts", "top_k"))
    one_device: dict[str, dict[str, float]] = {}
    precision = Precision.named(args.precision)
    tolerance = TOLERANCE[args.dtype] if precision is None else TOLERANCE_IN_FP8
    for devices in sorted({1, *counts}):
        mesh, keys = make_mesh(devices), jax.random.split(jax.random.key(1), 6)
        x = normal(keys[0], (devices * tokens, hidden), args.dtype, mesh)
        w_gate_up = normal(keys[1], (experts, 2 * inter, hidden), args.dtype, mesh, hidden**-0.5)
        w_down = normal(keys[2], (experts, hidden, inter), args.dtype, mesh, inter**-0.5)
        weights = jax.nn.softmax(normal(keys[3], (devices * tokens, k), "float32", mesh))
        dy = normal(keys[4], (devices * tokens, hidden), args.dtype, mesh)
        whole = forward_and_backward(functools.partial(experts_mlp, chunk_tokens=tokens, precision=precision), make_mesh(1))
        calls, expected = {}, {}
        for routing in args.routings:
            chosen = choose(keys[5], devices * tokens, experts, k, routing, args, mesh)
            calls[routing] = x, w_gate_up, w_down, weights, chosen
        for what, transport, given, options in layer_variants(devices, args):
            settings = ExpertParallel(
                transport=transport,
                capacity_factor=args.capacity_factor,
                group_size=args.group_size if transport == "pairwise" else None,
                flops_per_byte=args.flops_per_byte,
                **given,
            )

            def forward(*a, settings=settings):
                y, exchange = expert_parallel_mlp(*a, settings, precision=precision)
                return y, jnp.stack([exchange.num_rounds, exchange.num_shadows])

            forward_only = on_mesh(forward, mesh, options)
            step = forward_and_backward(lambda *a, f=forward: f(*a)[0], mesh, options)
            for routing, arguments in calls.items():
                load = jnp.bincount(arguments[-1].reshape(-1), length=experts).reshape(devices, -1).sum(axis=1)
                row = dict(measured="layer", devices=devices, what=what, routing=routing, load=float(load.max() / load.mean()))
                with failure_in(row):
                    row["rounds"], row["shadows"] = map(int, forward_only(*arguments)[1][:2])
                    row["fwd_ms"] = median_ms(forward_only, arguments, args.launches)
                    row["fwd_bwd_ms"] = median_ms(step, (*arguments, dy), args.launches)
                    if devices == 1:
                        one_device[routing] = row
                    for name in ("fwd", "fwd_bwd") if routing in one_device else ():
                        row[f"{name}_efficiency"] = one_device[routing][f"{name}_ms"] / row[f"{name}_ms"]
                    if devices > 1:
                        if routing not in expected:
                            expected[routing] = whole(*jax.device_put((*arguments, dy), NamedSharding(make_mesh(1), P())))
                        row["error_of_all"] = np.max([*map(relative_error, step(*arguments, dy), expected[routing])])
                        row["parity"] = "ok" if row["error_of_all"] < tolerance else "WRONG"
                yield row


def layer_variants(devices: int, args: argparse.Namespace) -> list[tuple[str, AnyTransport | None, dict, dict]]:
    """Returns name, transport, other settings and compiler options of each variant timed on `devices` devices."""
    if devices == 1:
        return [("one device", None, {}, {})]
    others: dict[str, dict] = {"": {}} | {f", {n} shadows": {"shadow_experts": n} for n in args.shadows}
    if args.precision != "bf16":
        others[", tokens in FP8"] = {"tokens_in_fp8": True}
    variants: list[tuple[str, AnyTransport | None, dict, dict]] = [
        (what + more, name, given, options)
        for more, given in others.items()
        for what, name, options in with_and_without_copies(devices, args)
    ]
    return variants + [(f"{name}, no overlap", name, {}, NO_OVERLAP) for name in args.transports if name == "pairwise"]


def with_and_without_copies(devices: int, args: argparse.Namespace) -> list[tuple[str, AnyTransport, dict]]:
    """Returns name, transport and compiler options of each transport, with and without peer-to-peer copies."""
    variants: list[tuple[str, AnyTransport, dict]] = [
        (name, RAGGED if name == RAGGED.name else name, {}) for name in args.transports
    ]
    if "pairwise" in args.transports and default_hops(make_mesh(devices)) == "copies":
        variants.append(("pairwise by copies", "pairwise", COPIES | MANY_AT_ONCE))
    return variants


@contextlib.contextmanager
def failure_in(row: dict):
    """Context manager that writes an exception into the row."""
    try:
        yield
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:160]


def make_mesh(devices: int) -> jax.sharding.Mesh:
    """Returns a mesh of the first devices along an axis `expert`."""
    return jax.make_mesh((devices,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def on_mesh(f, mesh, options: dict | None = None):
    """Returns jitted f on each device's part of its arguments, which are split along their first axis."""
    sharded = jax.shard_map(f, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
    return jax.jit(sharded, compiler_options=options)


def forward_and_backward(layer, mesh, options: dict | None = None):
    """Returns a function (x, w_gate_up, w_down, weights, chosen, dy) -> y and the gradients to the first four."""

    def step(x, w_gate_up, w_down, weights, chosen, dy):
        y, pullback = jax.vjp(lambda *a: layer(*a, chosen), x, w_gate_up, w_down, weights)
        # As in training, dy is not available before y. Else XLA would start the backward pass early.
        y, dy = jax.lax.optimization_barrier((y, dy))
        return y, *pullback(dy)

    return on_mesh(step, mesh, options)


def normal(key, shape, dtype, mesh, scale=1.0):
    """Returns random numbers split along the first axis, each made on its own device."""
    make = jax.jit(lambda key: jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype), out_shardings=split_over(mesh))
    return make(key)


def choose(key, tokens: int, experts: int, k: int, routing: str, args: argparse.Namespace, mesh):
    """Returns k different experts for each token. Unless "uniform", the i-th most popular is drawn in proportion to i^-s."""

    def draw(key):
        deal, noise = jax.random.split(key)
        rank = 1.0 + (jax.random.permutation(deal, experts) if routing == "zipf" else jnp.arange(experts))
        popularity = jnp.zeros(experts) if routing == "uniform" else -args.zipf * jnp.log(rank)
        # The k largest of log p + Gumbel noise are k draws without replacement.
        return jax.lax.top_k(popularity + jax.random.gumbel(noise, (tokens, experts)), k)[1]

    chosen = jax.jit(draw, out_shardings=split_over(mesh))(key)
    if routing != "placed":
        return chosen
    order = balanced_order(np.bincount(np.asarray(chosen).reshape(-1), minlength=experts), mesh.size)
    return jax.jit(lambda chosen: jnp.argsort(order)[chosen], out_shardings=split_over(mesh))(chosen)


def split_over(mesh):
    """Returns the sharding that splits the first axis."""
    return NamedSharding(mesh, SPLIT)


def relative_error(actual, expected) -> float:
    """Returns the relative error in the Frobenius norm, computed on one device."""
    actual = jax.device_put(actual, expected.sharding).astype(jnp.float32)
    expected = expected.astype(jnp.float32)
    return float(jnp.linalg.norm((actual - expected).reshape(-1)) / jnp.linalg.norm(expected.reshape(-1)))


def _print_each(rows) -> list[dict]:
    """Prints each row as soon as it is measured, under a header, and returns all rows."""
    times = "fwd_ms", "fwd_efficiency", "fwd_bwd_ms", "fwd_bwd_efficiency"
    columns = {
        "exchange": ("devices", "what", "dispatch_ms", "dispatch_gbs", "combine_ms", "combine_gbs", "of_all_to_all"),
        "layer": ("devices", "what", "routing", "load", "rounds", "shadows", *times, "error_of_all", "parity"),
    }
    kept = []
    for row in rows:
        names = columns[row["measured"]]
        if not kept:
            print("\n" + " ".join(f"{name:>20}" for name in names))
        values = [row.get(name, row.get("error", "") if name == names[-1] else "") for name in names]
        print(" ".join(f"{f'{v:.4g}' if isinstance(v, float) else v:>20}" for v in values), flush=True)
        kept.append(row)
    return kept


if __name__ == "__main__":
    main()
