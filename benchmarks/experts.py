"""Times the matrices of one layer without its router: experts with adapters, with gradient sums, and in FP8; dense ones in FP8.

    python benchmarks/experts.py                       # experts trained, frozen, and frozen with adapters; bf16 and FP8
    python benchmarks/experts.py --tokens 8192 --ranks 4 --parts
    python benchmarks/experts.py sums                  # adding a micro-batch's gradients: inside the kernels, or by XLA
    python benchmarks/experts.py sums --tokens 1024 --experts 256 --top-k 8 --hidden 7168 --intermediate 2048
    python benchmarks/experts.py fp8 --presets deepseek-v3 --tokens 16384     # each pass of the Hopper kernels, bf16 and FP8
    python benchmarks/experts.py dense                 # attention's projections and shared experts, bf16 and FP8

All but `sums` and `dense` are of Qwen3-30B-A3B's layer with 32768 tokens, unless options say otherwise. Data is random. If
nothing else is said, a time is the median of 5 groups of calls, one after the other: the GPU is under load.

`adapted`: every expert gets the same number of tokens, forward and backward. `--parts` also times the thin products alone,
which read rows and write few numbers.

`sums`: *none* returns gradients in the weights' dtype, not accumulated. *xla* adds these gradients to totals. *kernels* has the
totals as accumulators. Totals are f32 and donated. MiB are temporaries, and results that do not reuse an argument's memory, as
the compiler reports them. The two ways of adding must agree.

`fp8`: random routing. Milliseconds and TFLOP/s in bursts of 4 calls with pauses, and under load, when the power limit has set
the clock. W and MHz are read in the middle of the load. Rows of gathers have GB/s of their reads and writes.

`dense`: a row has the matrices that read one x, or the block of shared experts. *copies* is the time of rounding the matrices
to FP8, once a training step. Errors are those of FP8 compared with bf16: of y, dx and dw.
"""

import math
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from harness import Case, main, median_ms, one_of, relative_error
from inputs import config_of

from moe_jax.config import EXPERT_LAYERS, NAMED_CONFIGS, ExpertLayer
from moe_jax.kernels import Precision, experts_mlp, fp8_matmul, quantise_matrices
from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.call import TokenPart
from moe_jax.kernels.experts.call import experts as compute
from moe_jax.kernels.experts.choose_backend import BACKENDS
from moe_jax.kernels.experts.fp8 import mosaic as fp8_mosaic
from moe_jax.kernels.experts.fp8.dense import dense_copies
from moe_jax.kernels.experts.fp8.quantise import quantise_rows
from moe_jax.kernels.experts.routing import Plan, plan
from moe_jax.kernels.experts.weights import Accumulators, ExpertWeights, Matrix
from moe_jax.kernels.low_rank import LowRank


def normal(seed: int, *shape: int, scale: float = 1.0, dtype=jnp.bfloat16) -> jax.Array:
    """Returns random numbers."""
    return jax.jit(lambda: scale * jax.random.normal(jax.random.key(seed), shape, dtype))()


@dataclass(kw_only=True)
class Adapted(Case):
    """A row for each form of the experts."""

    config: one_of(NAMED_CONFIGS) = "qwen3-30b-a3b"
    tokens: int = 32768
    ranks: tuple[int, ...] = (4, 16)  # the rank of each expert
    launches: int = 20
    parts: bool = False  # also the thin products alone, which need Hopper kernels

    SMALL = dict(tokens=64, ranks=(4,), launches=1)

    def results(self):
        """Yields the milliseconds of a forward and backward pass."""
        config = config_of(self.config, small=self.small, in_fp8=True)
        experts, k = config.experts.num_experts, config.experts.num_experts_per_tok
        hidden, inter = config.hidden_size, config.moe_intermediate_size
        drawn = partial(normal, scale=0.02)
        x, dy = drawn(0, self.tokens, hidden), drawn(1, self.tokens, hidden)
        matrices = drawn(2, experts, 2 * inter, hidden), drawn(3, experts, hidden, inter)
        chosen = ((jnp.arange(self.tokens)[:, None] * k + jnp.arange(k)) % experts).astype(jnp.int32)
        weights = jnp.full(chosen.shape, 1 / k, jnp.float32)

        def adapter_of(rank: int) -> tuple[LowRank, LowRank]:
            wide, narrow = partial(drawn, 4, experts, dtype=jnp.float32), partial(drawn, 5, experts, dtype=jnp.float32)
            return LowRank(wide(rank, hidden), narrow(2 * inter, rank)), LowRank(wide(rank, inter), narrow(hidden, rank))

        def frozen(own, matrices, precision=None):
            """The experts with frozen matrices, and their changes if there are some."""
            x, weights, *adapter = own
            changes = adapter[0] if adapter else (None, None)
            pairs = zip(map(Matrix.of, matrices), changes, strict=True)
            operands = ExpertWeights(*(replace(w, change=change) for w, change in pairs), frozen=True)
            return compute([TokenPart(x, weights, chosen)], operands, precision=precision)[0]

        def ms(f, trained: tuple, matrices: tuple) -> float:
            """Times f(trained, matrices): the result, and gradients of `trained` alone."""

            @jax.jit
            def step(trained, matrices, dy):
                y, pullback = jax.vjp(lambda *trained: f(trained, matrices), *trained)
                return y, pullback(dy)

            return median_ms(step, (trained, matrices, dy), self.launches)

        def trained(own, _):
            return experts_mlp(own[0], *own[2:], own[1], chosen)

        yield dict(experts="trained", ms=ms(trained, (x, weights, *matrices), matrices))
        in_fp8, quantised = partial(frozen, precision=Precision()), tuple(map(quantise_matrices, matrices))
        for name, f, held in (("frozen", frozen, matrices), ("frozen in FP8", in_fp8, quantised)):
            yield dict(experts=name, ms=ms(f, (x, weights), held))
            for rank in self.ranks:
                yield dict(experts=f"{name}, rank {rank}", ms=ms(f, (x, weights, adapter_of(rank)), held))
        if self.parts:
            yield from self.rows_of_parts(x, chosen, inter, experts)

    def rows_of_parts(self, x, chosen, inter: int, experts: int):
        """Yields a row for each thin product, with the bytes that it reads and writes a second."""
        planned = plan(chosen, experts, mosaic.ROW_ALIGNMENT)
        rows, hidden = planned.num_rows, x.shape[1]
        wide, inner, h = (jnp.ones((rows, width), x.dtype) for width in (hidden, inter, 2 * inter))
        thin = jnp.ones((rows, 64), x.dtype)

        def factor(n: int, m: int) -> jax.Array:
            return jnp.ones((experts, n, m), x.dtype)

        products = {
            "u = x a1": (wide, lambda a: mosaic.grouped_matmul(a, factor(64, hidden), planned)),
            "v = act a2": (inner, lambda a: mosaic.grouped_matmul(a, factor(64, inter), planned)),
            "t2 = dy b2": (wide, lambda a: mosaic.grouped_matmul(a, factor(hidden, 64), planned, transpose=True)),
            "t1 = dh b1": (h, lambda a: mosaic.grouped_matmul(a, factor(2 * inter, 64), planned, transpose=True)),
            "da1 = t1 x": (wide, lambda a: mosaic.grouped_outer(thin, a, planned, jnp.float32)),
            "db1 = dh u": (h, lambda a: mosaic.grouped_outer(a, thin, planned, jnp.float32)),
            "da2 = t2 act": (inner, lambda a: mosaic.grouped_outer(thin, a, planned, jnp.float32)),
            "db2 = dy v": (wide, lambda a: mosaic.grouped_outer(a, thin, planned, jnp.float32)),
            "gather": (x, lambda a: mosaic.rows_of_tokens(a, planned)[0]),
        }
        for name, (a, f) in products.items():
            ms = median_ms(jax.jit(f), (a,), self.launches)
            moved = (a.size if a is not x else rows * hidden) * 2 + rows * 64 * 2
            yield dict(product=name, ms=ms, tb_per_s=moved / ms / 1e9)


@dataclass(kw_only=True)
class Sums(Case):
    """A row for each way of adding gradients."""

    tokens: int = 8192
    experts: int = EXPERT_LAYERS["qwen3-30b-a3b"].experts
    top_k: int = EXPERT_LAYERS["qwen3-30b-a3b"].top_k
    hidden: int = EXPERT_LAYERS["qwen3-30b-a3b"].hidden
    intermediate: int = EXPERT_LAYERS["qwen3-30b-a3b"].inter
    dtype: str = "bfloat16"  # of tokens and weights
    backend: one_of(BACKENDS) | None = None  # default: the device's
    launches: int = 20  # calls in a group

    SMALL = dict(tokens=64, experts=8, top_k=2, hidden=128, intermediate=64, launches=1)

    TOLERANCE = 1e-2
    """Largest accepted relative difference in the Frobenius norm: XLA adds gradients rounded to the weights' dtype."""

    def results(self):
        """Yields the rows; a failure if the two ways of adding differ."""
        expert, sizes = (self.hidden, self.intermediate), (self.tokens, self.hidden)
        shapes = sizes, (self.experts, 2 * expert[1], expert[0]), (self.experts, *expert), sizes
        x, w_gate_up, w_down, dy = (normal(i, *shape, scale=0.1, dtype=self.dtype) for i, shape in enumerate(shapes))
        scores = jax.random.normal(jax.random.key(9), (self.tokens, self.experts))
        inputs = x, (w_gate_up, w_down), *jax.lax.top_k(jax.nn.softmax(scores), self.top_k), dy

        def zeros(inputs):
            return tuple(jnp.zeros(w.shape, jnp.float32) for w in inputs[1])

        steps = {}
        for way in ("none", "xla", "kernels"):
            step = jax.jit(partial(self.step, way), donate_argnums=0)
            steps[way] = step.lower(jax.eval_shape(zeros, inputs), *inputs).compile()
        added = [steps[way](zeros(inputs), *inputs)[0] for way in ("xla", "kernels")]
        errors = [float(relative_error(a, b)) for a, b in zip(*added, strict=True)]
        del added
        for way, step in steps.items():
            found = step.memory_analysis()
            mib = (found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes) / 2**20
            row = dict(added_by=way, ms=self.median_ms(step, zeros, inputs), mib=mib, apart=max(errors))
            yield row | ({} if max(errors) <= self.TOLERANCE else {"failure": f"the two ways differ by {errors}"})

    def step(self, way: str, totals, x, experts, weights, chosen, dy):
        """Returns (totals, other gradients)."""
        if way == "kernels":

            def run(x, weights, totals):
                operands = ExpertWeights.of(*experts, gradient=Accumulators(*totals))
                return compute([TokenPart(x, weights, chosen)], operands, backend=self.backend)[0]

            *others, totals = jax.vjp(run, x, weights, totals)[1](dy)
            return totals, others

        def plain(x, weights, w):
            return experts_mlp(x, *w, weights, chosen, backend=self.backend)

        *others, gradients = jax.vjp(plain, x, weights, experts)[1](dy)
        if way == "none":
            return totals, (others, gradients)
        return jax.tree.map(lambda total, gradient: total + gradient.astype(total.dtype), totals, gradients), others

    def median_ms(self, step, zeros, inputs: tuple) -> float:
        """Returns the milliseconds of a call. Each call gets the totals that the previous call returned."""
        groups = []
        for _ in range(6):
            totals = jax.block_until_ready(zeros(inputs))
            began = time.perf_counter()
            for _ in range(self.launches):
                totals, others = step(totals, *inputs)
            jax.block_until_ready((totals, others))
            groups.append((time.perf_counter() - began) / self.launches)
        # The first group warms up.
        return 1e3 * statistics.median(groups[1:])


@dataclass(kw_only=True)
class Fp8(Case):
    """A row for each pass in either width; Hopper kernels."""

    presets: tuple[one_of(EXPERT_LAYERS), ...] = ("qwen3-30b-a3b",)
    tokens: int = 32768
    load_seconds: float = 0.5

    SMALL = dict(tokens=16, load_seconds=0.0)

    def results(self):
        """Yields the times of each pass of a layer."""
        for preset in self.presets:
            layer = ExpertLayer(128, 128, 2, 1) if self.small else EXPERT_LAYERS[preset]
            for name, width, work, unit, f, operands in self.passes(layer):
                burst, load, power = self.times(jax.jit(f), *operands)
                rates = {"burst_rate": work / burst / unit, "load_ms": 1e3 * load, "load_rate": work / load / unit}
                yield {"preset": preset, "pass": name, "width": width, "burst_ms": 1e3 * burst} | rates | power

    def passes(self, layer: ExpertLayer):
        """Yields (name, width, work, its unit, function, operands) of each pass."""
        hidden, inter, experts, top_k = layer
        rng = np.random.default_rng(0)
        chosen = jnp.asarray(np.argsort(rng.random((self.tokens, experts)), axis=1)[:, :top_k], jnp.int32)
        p = jax.jit(partial(plan, num_experts=experts, row_alignment=fp8_mosaic.ROW_ALIGNMENT))(chosen)
        flops = 2 * self.tokens * top_k * hidden * inter
        x, read, rows = normal(0, self.tokens, hidden), self.tokens * hidden * 2, self.tokens * top_k * hidden
        yield "gather, GB/s", "bf16", read + 2 * rows, 1e9, lambda x, p: mosaic.rows_of_tokens(x, p)[0], (x, p)
        yield "gather, GB/s", "fp8", read + rows, 1e9, fp8_mosaic.rows_of_tokens, (x, p)

        def both(name: str, work: float, columns: int, summands: int, in_bf16, in_fp8):
            a, w = normal(1, p.num_rows, summands), normal(2, experts, columns, summands)
            yield name, "bf16", work, 1e12, in_bf16, (a, w, p)
            yield name, "fp8", work, 1e12, in_fp8, (jax.jit(quantise_rows)(a), jax.jit(quantise_matrices)(w), p)

        for keep_h in (False, True):
            gated = [partial(kernels.gated_matmul, keep_h=keep_h) for kernels in (mosaic, fp8_mosaic)]
            yield from both("gate_up with h" if keep_h else "gate_up", 2 * flops, 2 * inter, hidden, *gated)
        plain = mosaic.grouped_matmul, fp8_mosaic.grouped_matmul
        yield from both("gate_up, product alone", 2 * flops, 2 * inter, hidden, *plain)
        yield from both("down", flops, hidden, inter, *plain)
        yield from both("dx", 2 * flops, hidden, 2 * inter, *plain)
        h, v = normal(3, p.num_rows, 2 * inter), jnp.ones(p.num_rows)

        def d_act_in_bf16(dy, w_down_transposed, p: Plan):
            return mosaic.gated_matmul_backward(dy, w_down_transposed.reshape(experts, hidden, inter), h, v, p)

        def d_act_in_fp8(dy, w_down_transposed, p: Plan):
            return fp8_mosaic.gated_matmul_backward(dy, w_down_transposed, h, v, p)

        yield from both("d_act", flops, inter, hidden, d_act_in_bf16, d_act_in_fp8)

    def times(self, f, *operands) -> tuple[float, float, dict[str, str]]:
        """Returns seconds of a call in bursts and under load, and the load's W and MHz."""
        jax.block_until_ready(f(*operands))
        bursts, launches = [], 1 if self.small else 4
        for _ in range(1 if self.small else 5):
            time.sleep(0.1)
            began = time.perf_counter()
            for _ in range(launches):
                result = f(*operands)
            jax.block_until_ready(result)
            bursts.append((time.perf_counter() - began) / launches)
        burst = statistics.median(bursts)
        calls = max(1 if self.small else 8, int(self.load_seconds / burst))
        for _ in range(calls):
            result = f(*operands)
        jax.block_until_ready(result)
        began = time.perf_counter()
        for _ in range(calls):
            result = f(*operands)
        # The calls are queued: the GPU is at work on the first half.
        power = query_power()
        jax.block_until_ready(result)
        return burst, (time.perf_counter() - began) / calls, power


def query_power() -> dict[str, str]:
    """Returns the GPU's W and MHz as nvidia-smi tells them."""
    query = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        watts, clock = subprocess.run(query, capture_output=True, text=True, timeout=5).stdout.splitlines()[0].split(", ")
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        return {"watts": "?", "mhz": "?"}
    return {"watts": watts, "mhz": clock}


SHARED = "shared experts"
round_all = jax.jit(lambda matrices: [dense_copies(w) for w in matrices])


class Matrices(NamedTuple):
    """Matrices [out, in] that read one x, or gate, up and down of shared experts."""

    layer: str
    name: str
    tokens: int
    sizes: tuple[tuple[int, int], ...]

    def arrays(self) -> tuple[Any, ...]:
        """Returns x, the matrices, and the gradients of the results."""
        outputs = [self.sizes[0][1]] if self.name == SHARED else [out for out, _ in self.sizes]
        shapes = [(self.tokens, self.sizes[0][1]), *self.sizes, *((self.tokens, out) for out in outputs)]
        x, *others = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes))
        return x, [w * w.shape[1] ** -0.5 for w in others[: len(self.sizes)]], others[len(self.sizes) :]

    def forward(self, x, matrices, copies):
        """Returns the results; in bf16 without copies."""

        def product(x, i: int):
            return fp8_matmul(x, matrices[i], copies[i]) if copies else x @ matrices[i].T

        if self.name == SHARED:
            return [product(jax.nn.silu(product(x, 0)) * product(x, 1), 2)]
        return [product(x, i) for i in range(len(matrices))]

    def backward(self, x, matrices, copies, dys):
        """Returns the results and all gradients."""
        ys, pullback = jax.vjp(lambda x, matrices: self.forward(x, matrices, copies), x, matrices)
        return ys, *pullback(dys)

    def programs(self, *, in_fp8: bool) -> tuple[Any, Any]:
        """Compiles both passes."""
        x, matrices, dys = jax.eval_shape(self.arrays)
        given = x, matrices, jax.eval_shape(round_all, matrices) if in_fp8 else []
        return jax.jit(self.forward).lower(*given).compile(), jax.jit(self.backward).lower(*given, dys).compile()


OF_LAYERS = (
    Matrices("qwen3-30b-a3b", "q, k, v", 32768, ((4096, 2048), (512, 2048), (512, 2048))),
    Matrices("qwen3-30b-a3b", "o", 32768, ((2048, 4096),)),
    Matrices("deepseek-v3", "q_a, kv_a", 16384, ((1536, 7168), (576, 7168))),
    Matrices("deepseek-v3", "q_b", 16384, ((24576, 1536),)),
    Matrices("deepseek-v3", "kv_b", 16384, ((32768, 512),)),
    Matrices("deepseek-v3", "o", 16384, ((7168, 16384),)),
    Matrices("deepseek-v3", SHARED, 16384, ((2048, 7168), (2048, 7168), (7168, 2048))),
)


@dataclass(kw_only=True)
class Dense(Case):
    """A row for the matrices that read one x: milliseconds, rates and errors of bf16 and FP8."""

    launches: int = 10

    SMALL = dict(launches=1)

    def results(self):
        """Yields the rows."""
        small = (Matrices("small", "q, k", 128, ((256, 128), (128, 128))),)
        cases = small if self.small else OF_LAYERS
        # XLA times its matmuls on the GPU to choose them. Those of bf16 come first, one by one, and FP8 takes the same for dw.
        in_bf16 = [case.programs(in_fp8=False) for case in cases]
        with ThreadPoolExecutor() as threads:
            in_fp8 = list(threads.map(lambda case: case.programs(in_fp8=True), cases))
        for case, bf16, fp8 in zip(cases, in_bf16, in_fp8, strict=True):
            x, matrices, dys = case.arrays()
            calls = (bf16, (x, matrices, [])), (fp8, (x, matrices, round_all(matrices)))
            tera = 2e-9 * case.tokens * sum(map(math.prod, case.sizes))
            forward = [median_ms(run[0], given, self.launches) for run, given in calls]
            both = [median_ms(run[1], (*given, dys), self.launches) for run, given in calls]
            wanted, found = (run[1](*given, dys) for run, given in calls)
            errors = [
                float(max(jax.tree.leaves(jax.tree.map(relative_error, a, b)))) for a, b in zip(found, wanted, strict=True)
            ]
            row = dict(layer=case.layer, matrices=case.name, forward_ms=forward, forward_tflops=[tera / ms for ms in forward])
            row |= dict(with_gradients_ms=both, with_gradients_tflops=[3 * tera / ms for ms in both])
            yield row | dict(copies_ms=median_ms(round_all, (matrices,), self.launches), errors=errors)


CASES = {"adapted": Adapted, "sums": Sums, "fp8": Fp8, "dense": Dense}

if __name__ == "__main__":
    main(__doc__, **CASES)
