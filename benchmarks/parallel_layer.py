"""Times one layer that is spread over the GPUs of a host: its experts, their exchange alone, and ring attention.

    python benchmarks/parallel_layer.py --output results.jsonl              # experts
    python benchmarks/parallel_layer.py exchange                            # GB/s of dispatch and combine
    python benchmarks/parallel_layer.py ring --hops nccl                    # attention, without peer-to-peer copies
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python benchmarks/parallel_layer.py ring --small         # on a CPU

`experts`: every device has the same number of tokens, and the experts are divided among the devices. Efficiency is the time on
one device with all experts over the time on n devices. "load" is the choices of the busiest device's experts over the mean,
which bounds the efficiency. Routing "zipf" has popular experts anywhere, "crowded" on the first devices. "placed" is "crowded"
after `train.rebalance` has distributed the experts. Outputs and gradients are compared with one device that computes
everything. "by copies" uses peer-to-peer copies instead of NCCL's kernels. "no overlap" forbids XLA to overlap collectives with
computation. "n shadows" is a transport with up to n shadow experts (replicas); column "shadows" is the number that the call
used. With `--precision fp8` the experts multiply in FP8, and "tokens in FP8" is a transport whose tokens travel in it.

`exchange`: GB/s that leave each device by dispatch and by combine of each transport. Empty slots count, except with "ragged"
(`moe_jax.experimental.ragged`). Routes are made beforehand. The first row is a plain `lax.all_to_all` of the buffers of
transport `all_to_all`.

`ring`: for n devices the causal sequence has n * `--tokens` tokens. Efficiency is the time of one device for the whole sequence
over n times the time of n devices. TFLOP/s count one device's work and only keys that a query attends to: 4*H*N*d forward,
14*H*N*d with backward, with N = S*S/2 pairs. "hop" is one `ppermute` of a device's k and v alone, in GB/s that leave each
device. Outputs and gradients are compared with one device's. Groups of all methods alternate.

Times are the median of 5 groups (ring: `--groups`) of `--launches` calls between two synchronisations, on random data. An error
or a difference is a failure of its row, and the other measurements continue.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from harness import Case, main, median_ms, one_of, reason, relative_error
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.config import EXPERT_LAYERS, ExpertLayer
from moe_jax.experimental.ragged import RAGGED
from moe_jax.kernels import Precision, attention, experts_mlp
from moe_jax.parallel import (
    ContextParallel,
    ExpertParallel,
    context_attention,
    default_hops,
    expert_parallel_mlp,
    shard_sequence,
    unshard_sequence,
)
from moe_jax.parallel.choices import Hops
from moe_jax.parallel.collectives.hops import COPIES, MANY_AT_ONCE
from moe_jax.parallel.expert import TRANSPORTS, combine, dispatch
from moe_jax.parallel.expert.placement import balanced_order
from moe_jax.parallel.expert.routes import first_route, owners, queue
from moe_jax.parallel.expert.settings import Transport, TransportName, first_capacity
from moe_jax.parallel.sequence.attention import Method
from moe_jax.parallel.sequence.layouts import Layout

AnyTransport = TransportName | Transport
BY_EXPERTS, BY_TOKENS = P("expert"), P(None, "context")

NO_OVERLAP = {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}
"""Compiler option for GPUs."""

TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
"""Largest accepted difference, relative in the Frobenius norm."""

TOLERANCE_IN_FP8 = 5e-2
"""The same of experts in FP8: their gradient of gate and up reads rounded tokens."""

SMALL_LAYER = ExpertLayer(hidden=128, inter=128, experts=32, top_k=4)


@dataclass(kw_only=True)
class _Spread(Case):
    """Options of both measurements of experts."""

    devices: tuple[int, ...] | None = None  # numbers of devices; default: all. Experts also on one
    transports: tuple[one_of((*TRANSPORTS, RAGGED.name)), ...] = TRANSPORTS  # ragged: experimental
    capacity_factor: float = 1.25
    launches: int = 20
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    zipf: float = 1.0  # exponent of the experts' popularity

    def variants(self, devices: int) -> list[tuple[str, AnyTransport, dict]]:
        """Returns name, transport and compiler options of each transport, with and without peer-to-peer copies."""
        variants: list[tuple[str, AnyTransport, dict]] = [
            (name, RAGGED if name == RAGGED.name else name, {}) for name in self.transports
        ]
        if "pairwise" in self.transports and default_hops(mesh_of(devices, "expert")) == "copies":
            variants.append(("pairwise by copies", "pairwise", COPIES | MANY_AT_ONCE))
        return variants

    def choose(self, key, tokens: int, layer: ExpertLayer, routing: str, mesh):
        """Returns top_k different experts of each token. Unless "uniform", the i-th most popular is drawn like i^-zipf."""

        def draw(key):
            deal, noise = jax.random.split(key)
            rank = 1.0 + (jax.random.permutation(deal, layer.experts) if routing == "zipf" else jnp.arange(layer.experts))
            popularity = jnp.zeros(layer.experts) if routing == "uniform" else -self.zipf * jnp.log(rank)
            # The k largest of log p + Gumbel noise are k draws without replacement.
            return jax.lax.top_k(popularity + jax.random.gumbel(noise, (tokens, layer.experts)), layer.top_k)[1]

        split = NamedSharding(mesh, BY_EXPERTS)
        chosen = jax.jit(draw, out_shardings=split)(key)
        if routing != "placed":
            return chosen
        order = balanced_order(np.bincount(np.asarray(chosen).reshape(-1), minlength=layer.experts), mesh.size)
        return jax.jit(lambda chosen: jnp.argsort(order)[chosen], out_shardings=split)(chosen)


@dataclass(kw_only=True)
class Experts(_Spread):
    """A row for each number of devices, variant and routing: Qwen3-30B-A3B's experts."""

    routings: tuple[Literal["uniform", "zipf", "crowded", "placed"], ...] = ("uniform", "zipf")
    tokens: int = 8192  # tokens of each device
    group_size: int | None = None  # of transport pairwise; default: its own choice
    shadows: tuple[int, ...] = ()  # maximum numbers of shadow experts to try as well
    flops_per_byte: float = ExpertParallel.flops_per_byte  # FLOPs per byte from which a shadow expert pays
    precision: Literal["bf16", "fp8", "fp8_kept"] = "bf16"  # of the experts

    SMALL = dict(tokens=128, launches=1, dtype="float32")
    COLUMNS = ("devices", "what", "routing", "load", "rounds", "shadows", "fwd_ms", "fwd_efficiency", "fwd_bwd_ms",
               "fwd_bwd_efficiency", "error_of_all")  # fmt: skip

    def results(self):
        """Yields rows of times, efficiencies and errors."""
        layer = SMALL_LAYER if self.small else EXPERT_LAYERS["qwen3-30b-a3b"]
        experts, dtype = layer.experts, self.dtype if self.precision == "bf16" else "bfloat16"
        one_device: dict[str, dict[str, float]] = {}
        precision = Precision.named(self.precision)
        tolerance = TOLERANCE[dtype] if precision is None else TOLERANCE_IN_FP8
        for devices in sorted({1, *(self.devices or [jax.device_count()])}):
            mesh, keys, tokens = mesh_of(devices, "expert"), jax.random.split(jax.random.key(1), 6), devices * self.tokens
            x, dy = (normal(keys[i], (tokens, layer.hidden), dtype, mesh) for i in (0, 4))
            w_gate_up = normal(keys[1], (experts, 2 * layer.inter, layer.hidden), dtype, mesh, layer.hidden**-0.5)
            w_down = normal(keys[2], (experts, layer.hidden, layer.inter), dtype, mesh, layer.inter**-0.5)
            weights = jax.nn.softmax(normal(keys[3], (tokens, layer.top_k), "float32", mesh))
            one = mesh_of(1, "expert")
            alone = functools.partial(experts_mlp, chunk_tokens=self.tokens, precision=precision)
            whole, expected = on_experts(forward_and_backward(alone), one), {}
            calls = {
                routing: (x, w_gate_up, w_down, weights, self.choose(keys[5], tokens, layer, routing, mesh))
                for routing in self.routings
            }
            for what, transport, given, options in self.variants_of_layer(devices):
                settings = ExpertParallel(
                    transport=transport,
                    capacity_factor=self.capacity_factor,
                    group_size=self.group_size if transport == "pairwise" else None,
                    flops_per_byte=self.flops_per_byte,
                    **given,
                )

                def forward(*a, settings=settings):
                    y, exchange = expert_parallel_mlp(*a, settings, precision=precision)
                    return y, jnp.stack([exchange.num_rounds, exchange.num_shadows])

                forward_only = on_experts(forward, mesh, options)
                step = on_experts(forward_and_backward(lambda *a, f=forward: f(*a)[0]), mesh, options)
                for routing, arguments in calls.items():
                    load = jnp.bincount(arguments[-1].reshape(-1), length=experts).reshape(devices, -1).sum(axis=1)
                    row = dict(devices=devices, what=what, routing=routing, load=float(load.max() / load.mean()))
                    with failure_in(row):
                        row["rounds"], row["shadows"] = map(int, forward_only(*arguments)[1][:2])
                        row["fwd_ms"] = median_ms(forward_only, arguments, self.launches)
                        row["fwd_bwd_ms"] = median_ms(step, (*arguments, dy), self.launches)
                        if devices == 1:
                            one_device[routing] = row
                        for name in ("fwd", "fwd_bwd") if routing in one_device else ():
                            row[f"{name}_efficiency"] = one_device[routing][f"{name}_ms"] / row[f"{name}_ms"]
                        if devices > 1:
                            if routing not in expected:
                                expected[routing] = whole(*jax.device_put((*arguments, dy), NamedSharding(one, P())))
                            compare(row, step(*arguments, dy), expected[routing], tolerance)
                    yield row

    def variants_of_layer(self, devices: int) -> list[tuple[str, AnyTransport | None, dict, dict]]:
        """Returns name, transport, other settings and compiler options of each variant timed on `devices` devices."""
        if devices == 1:
            return [("one device", None, {}, {})]
        others: dict[str, dict] = {"": {}} | {f", {n} shadows": {"shadow_experts": n} for n in self.shadows}
        if self.precision != "bf16":
            others[", tokens in FP8"] = {"tokens_in_fp8": True}
        variants: list[tuple[str, AnyTransport | None, dict, dict]] = [
            (what + more, name, given, options)
            for more, given in others.items()
            for what, name, options in self.variants(devices)
        ]
        return variants + [(f"{name}, no overlap", name, {}, NO_OVERLAP) for name in self.transports if name == "pairwise"]


@dataclass(kw_only=True)
class Exchange(_Spread):
    """A row for each number of devices and transport, at the sizes of DeepSeek-V3 for which DeepEP publishes its bandwidth."""

    tokens: int = 4096  # tokens of each device

    SMALL = dict(tokens=128, launches=1, dtype="float32")
    COLUMNS = ("devices", "what", "dispatch_ms", "dispatch_gbs", "combine_ms", "combine_gbs", "of_all_to_all")

    def results(self):
        """Yields rows of bandwidths."""
        layer, tokens = SMALL_LAYER if self.small else EXPERT_LAYERS["deepseek-v3"], self.tokens
        for devices in self.devices or [jax.device_count()]:
            if devices == 1:
                continue
            mesh, keys = mesh_of(devices, "expert"), jax.random.split(jax.random.key(0), 2)
            capacity = first_capacity(tokens, layer.top_k, layer.experts, devices, self.capacity_factor)
            chosen = self.choose(keys[0], devices * tokens, layer, "uniform", mesh)

            def make_route(chosen, devices=devices, capacity=capacity):
                queues = queue(owners(chosen, layer.experts, devices), jnp.zeros(chosen.shape), devices, capacity)
                return first_route(queues, capacity)

            route = on_experts(make_route, mesh)(chosen)
            x = normal(keys[1], (devices * tokens, layer.hidden), self.dtype, mesh)
            buffer = normal(keys[1], (devices * devices, capacity.tokens, layer.hidden), self.dtype, mesh)
            plain = on_experts(lambda buffer: jax.lax.all_to_all(buffer, "expert", 0, 0), mesh)
            leaving = {name: (devices - 1) * capacity.tokens for name in ("all_to_all", "pairwise")}
            leaving["gather"] = (devices - 1) * tokens
            leaving["ragged"] = float((route.sent.sum() - route.sent.reshape(devices, devices).trace()) / devices)
            row_bytes = layer.hidden * x.dtype.itemsize / 1e6
            plain_gbs = float("nan")
            row = dict(devices=devices, what="lax.all_to_all")
            with failure_in(row):
                row["dispatch_ms"] = median_ms(plain, (buffer,), self.launches)
                row["dispatch_gbs"] = plain_gbs = leaving["all_to_all"] * row_bytes / row["dispatch_ms"]
            yield row
            for what, transport, options in self.variants(devices):
                how = "expert", transport
                sent = leaving[what.split()[0]]
                row = dict(devices=devices, what=what)
                with failure_in(row):
                    send = on_experts(lambda x, route, how=how: dispatch(x, route, *how), mesh, options)
                    back = on_experts(
                        lambda rows, route, how=how, x=x: combine(rows, route, *how).astype(x.dtype), mesh, options
                    )
                    received = jax.block_until_ready(send(x, route))
                    for name, f, argument in (("dispatch", send, x), ("combine", back, received)):
                        row[f"{name}_ms"] = median_ms(f, (argument, route), self.launches)
                        row[f"{name}_gbs"] = sent * row_bytes / row[f"{name}_ms"]
                    total_gbs = 2 * sent * row_bytes / (row["dispatch_ms"] + row["combine_ms"])
                    row["of_all_to_all"] = total_gbs / plain_gbs
                yield row


ALONE, HOP = "one device", "hop"


@dataclass(kw_only=True)
class Ring(Case):
    """A row for each number of devices and method of attention."""

    devices: tuple[int, ...] | None = None  # numbers of devices; default: the powers of two up to all
    methods: tuple[Method, ...] = get_args(Method)
    layout: Layout = "zigzag"
    hops: Hops | None = None  # default: copies if the devices allow them
    tokens: int = 8192  # tokens of each device
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    launches: int = 10
    groups: int = 7

    SMALL = dict(tokens=256, heads=8, kv_heads=4, head_dim=16, dtype="float32", launches=2, groups=3)
    COLUMNS = ("devices", "tokens", "method", "fwd_ms", "fwd_tflops", "fwd_eff", "both_ms", "both_tflops", "both_eff",
               "error_of_all", "gb_per_s")  # fmt: skip

    def results(self):
        """Yields the rows of each number of devices; the first is one device alone, with the reference results."""
        self.hops = self.hops or default_hops(mesh_of(jax.device_count(), "context"))
        for devices in self.devices or [2**i for i in range(jax.device_count().bit_length())]:
            yield from self.rows_of(devices)

    def rows_of(self, devices: int) -> list[dict]:
        """Returns the rows of one number of devices."""
        tokens, scale = devices * self.tokens, self.head_dim**-0.5
        one, mesh = mesh_of(1, "context"), mesh_of(devices, "context")
        keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 4)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        whole = [
            jax.random.normal(key, (1, tokens, count, self.head_dim), self.dtype)
            for key, count in zip(keys, heads, strict=True)
        ]
        split = [jax.device_put(shard_sequence(a, devices, self.layout), NamedSharding(mesh, BY_TOKENS)) for a in whole]
        systems = {ALONE: (functools.partial(attend_alone, scale=scale), one, whole)}
        for method in self.methods:
            options = dict(scale=scale, parallel=ContextParallel(layout=self.layout, method=method, hops=self.hops))
            systems[method] = functools.partial(context_attention, **options), mesh, split

        rows, forwards, steps, expected = {}, {}, {}, None
        for name, (f, on, inputs) in systems.items():
            row = rows[name] = {"devices": devices, "tokens": tokens, "method": name}
            with failure_in(row):
                step = functools.partial(self.on_mesh(functools.partial(with_gradients, f), on), *inputs)
                forward = functools.partial(self.on_mesh(f, on), *inputs[:3])
                found = step()
                if name == ALONE:
                    expected = found
                elif expected is not None:
                    found = [unshard_sequence(a, devices, self.layout) for a in found]
                    compare(row, found, expected, TOLERANCE[self.dtype])
                jax.block_until_ready(forward())
                forwards[name], steps[name] = forward, step

        flops = 2 * self.heads * tokens**2 * self.head_dim
        for part, calls, factor in (("fwd", forwards, 1.0), ("both", steps, 3.5)):
            times = self.alternating_ms(calls)
            for name, ms in times.items():
                used = systems[name][1].size
                rows[name] |= {f"{part}_ms": ms, f"{part}_tflops": factor * flops / used / ms / 1e9}
                if ALONE in times:
                    rows[name][f"{part}_eff"] = times[ALONE] / used / ms
        if devices > 1:
            rows[HOP] = {"devices": devices, "tokens": tokens, "method": HOP} | self.measure_hop(split[1], split[2], mesh)
        return list(rows.values())

    def measure_hop(self, k, v, mesh: jax.sharding.Mesh) -> dict:
        """Times the hop that a step of the ring has to hide."""
        pairs = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]
        both = jax.block_until_ready(self.on_mesh(lambda k, v: jnp.concatenate([k, v]), mesh)(k, v))
        hop = self.on_mesh(lambda both: jax.lax.ppermute(both, "context", pairs), mesh)
        ms = self.alternating_ms({HOP: functools.partial(hop, both)})[HOP]
        return {"fwd_ms": ms, "gb_per_s": both.nbytes / mesh.size / ms / 1e6}

    def on_mesh(self, f: Callable, mesh: jax.sharding.Mesh) -> Callable:
        """Returns jitted f on each device's part of its arguments, which are split along their tokens."""
        options = COPIES | MANY_AT_ONCE if self.hops == "copies" and mesh.size > 1 else None
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=BY_TOKENS, out_specs=BY_TOKENS), compiler_options=options)

    def alternating_ms(self, calls: dict[str, Callable]) -> dict[str, float]:
        """Returns the milliseconds of each call."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for call in (*calls.values(), *calls.values()):
            jax.block_until_ready(call())
        for _ in range(self.groups):
            for name, call in calls.items():
                began = time.perf_counter()
                for _ in range(self.launches):
                    result = call()
                jax.block_until_ready(result)
                times[name].append((time.perf_counter() - began) / self.launches)
        return {name: 1e3 * statistics.median(of_call) for name, of_call in times.items()}


def attend_alone(q, k, v, *, scale: float):
    """Computes causal attention of a whole sequence of one segment."""
    segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    return attention(q, k, v, scale=scale, query_segment_ids=segment_ids, key_segment_ids=segment_ids)


def with_gradients(f: Callable, q, k, v, dout) -> tuple:
    """Returns out and the gradients to q, k and v."""
    out, pullback = jax.vjp(f, q, k, v)
    return out, *pullback(dout)


def forward_and_backward(layer):
    """Returns a function (x, w_gate_up, w_down, weights, chosen, dy) -> y and the gradients to the first four."""

    def step(x, w_gate_up, w_down, weights, chosen, dy):
        y, pullback = jax.vjp(lambda *a: layer(*a, chosen), x, w_gate_up, w_down, weights)
        # dy depends on y, as in training. Otherwise XLA would start the backward pass early.
        y, dy = jax.lax.optimization_barrier((y, dy))
        return y, *pullback(dy)

    return step


def mesh_of(devices: int, axis: str) -> jax.sharding.Mesh:
    """Returns a mesh of the first devices along one axis."""
    return jax.make_mesh((devices,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def on_experts(f, mesh, options: dict | None = None):
    """Returns jitted f on each device's part of its arguments, which are split along their first axis."""
    sharded = jax.shard_map(f, mesh=mesh, in_specs=BY_EXPERTS, out_specs=BY_EXPERTS, check_vma=False)
    return jax.jit(sharded, compiler_options=options)


def normal(key, shape, dtype, mesh, scale=1.0):
    """Returns random numbers split along the first axis, each made on its own device."""
    make = jax.jit(
        lambda key: jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype),
        out_shardings=NamedSharding(mesh, BY_EXPERTS),
    )
    return make(key)


@contextlib.contextmanager
def failure_in(row: dict):
    """Context manager that writes an exception into the row."""
    try:
        yield
    except Exception as error:
        row["failure"] = reason(error)


def compare(row: dict, found, expected, tolerance: float) -> None:
    """Adds the largest relative error, computed on one device, and a failure if it is too large."""
    found = [jax.device_put(a, b.sharding) for a, b in zip(found, expected, strict=True)]
    row["error_of_all"] = error = float(np.max([relative_error(a, b) for a, b in zip(found, expected, strict=True)]))
    # A comparison with NaN is false.
    if not error < tolerance:
        row["failure"] = f"differs by more than {tolerance}"


CASES = {"experts": Experts, "exchange": Exchange, "ring": Ring}

if __name__ == "__main__":
    main(__doc__, CASES)
