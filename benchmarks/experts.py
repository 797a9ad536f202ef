"""Times the matrices of one layer without its router: experts with adapters, with gradient sums, and in FP8; dense ones in FP8;
`ragged_dot` compared with other implementations.

    python benchmarks/experts.py                       # experts trained, frozen, and frozen with adapters; bf16 and FP8
    python benchmarks/experts.py --tokens 8192 --ranks 4
    python benchmarks/experts.py sums                  # adding a micro-batch's gradients: inside the kernels, or by XLA
    python benchmarks/experts.py sums --tokens 1024 --experts 256 --top-k 8 --hidden 7168 --intermediate 2048
    python benchmarks/experts.py dense                 # attention's projections and shared experts, bf16 and FP8
    python benchmarks/experts.py ragged                # ragged_dot: ours, tokamax's and JAX's
    python benchmarks/experts.py ragged --configs qwen3-30b-a3b --tokens 8192 --systems moe_jax

Data is random. A time is the median of 5 groups of calls, one after the other: the GPU is under load.

`adapted`: Qwen3-30B-A3B's experts, 32768 tokens, forward and backward. Every expert gets the same number of tokens.

`sums`: *none* returns gradients in the weights' dtype, not accumulated. *xla* adds these gradients to totals. *kernels* has the
totals as accumulators. Totals are f32 and donated. MiB are temporaries, and results that do not reuse an argument's memory, as
the compiler reports them. The two ways of adding must agree.

`dense`: a row has the matrices that read one x, or the block of shared experts. *copies* is the time of rounding the matrices
to FP8, once a training step. Errors are of FP8 compared with bf16: of y, dx and dw.

`ragged`: one product of rows sorted by expert, forward alone and with both gradients, bf16. Every row chooses an expert at
random. The error is the largest relative difference of y, dlhs and drhs from the first system's. A system that is not
installed, or for which memory is too small, has a note in place of times.
"""

import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from harness import Case, main, median_ms, one_of, reason, relative_error
from inputs import config_of

from moe_jax.config import EXPERT_LAYERS, NAMED_CONFIGS
from moe_jax.kernels import Precision, experts_mlp, fp8_matmul, quantise_matrices, ragged_dot
from moe_jax.kernels.backends import BACKENDS
from moe_jax.kernels.experts.call import TokenPart
from moe_jax.kernels.experts.call import experts as compute
from moe_jax.kernels.experts.fp8.dense import dense_copies
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
        # XLA times its matmuls on the GPU to choose them. bf16 products come first, one by one, and FP8 takes the same for dw.
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


@dataclass(kw_only=True)
class Ragged(Case):
    """A row for each system, number of tokens and matrix."""

    configs: tuple[one_of(EXPERT_LAYERS), ...] = ("qwen3-30b-a3b", "mixtral-8x7b")
    tokens: tuple[int, ...] = (8192, 32768)
    matrices: tuple[one_of(("gate_up", "down")), ...] = ("gate_up", "down")
    systems: tuple[one_of(("moe_jax", "tokamax", "lax")), ...] = ("moe_jax", "tokamax", "lax")
    launches: int = 10

    SMALL = dict(configs=("qwen3-30b-a3b",), tokens=(32,), matrices=("down",), systems=("moe_jax", "lax"), launches=1)

    def results(self):
        """Yields the rows."""
        for name in self.configs:
            layer = EXPERT_LAYERS[name]
            hidden, inter = (16, 8) if self.small else (layer.hidden, layer.inter)
            for tokens in self.tokens:
                for matrix in self.matrices:
                    k, n = (hidden, 2 * inter) if matrix == "gate_up" else (inter, hidden)
                    row = dict(config=name, matrix=matrix, tokens=tokens)
                    yield from (row | times for times in self.times(tokens * layer.top_k, k, n, layer.experts))

    def times(self, m: int, k: int, n: int, g: int):
        """Yields the times of each system."""
        chosen = jax.random.randint(jax.random.key(3), (m,), 0, g)
        sizes = jnp.bincount(chosen, length=g).astype(jnp.int32)
        lhs, rhs, dy = normal(0, m, k), normal(1, g, k, n, scale=k**-0.5), normal(2, m, n)
        expected, tera = None, 2e-9 * m * k * n
        for system in self.systems:
            try:
                forward = jax.jit(self.product(system))

                @jax.jit
                def both(lhs, rhs, sizes, dy, forward=forward):
                    y, pullback = jax.vjp(lambda lhs, rhs: forward(lhs, rhs, sizes), lhs, rhs)
                    return y, *pullback(dy)

                found = both(lhs, rhs, sizes, dy)
                expected = expected or found
                error = max(float(relative_error(a, b)) for a, b in zip(found, expected, strict=True))
                del found
                ms = [median_ms(forward, (lhs, rhs, sizes), self.launches)]
                ms.append(median_ms(both, (lhs, rhs, sizes, dy), self.launches))
            except (ImportError, NotImplementedError, RuntimeError, ValueError) as failure:
                yield dict(system=system, forward_ms=None, both_ms=None, tflops=None, error=None, note=reason(failure))
            else:
                tflops = [tera / ms[0], 3 * tera / ms[1]]
                yield dict(system=system, forward_ms=ms[0], both_ms=ms[1], tflops=tflops, error=error)

    def product(self, system: str) -> Any:
        """Returns a function of (lhs, rhs, sizes)."""
        if system == "tokamax":
            import tokamax

            return partial(tokamax.ragged_dot, implementation="mosaic")
        return ragged_dot if system == "moe_jax" else jax.lax.ragged_dot


CASES = {"adapted": Adapted, "sums": Sums, "dense": Dense, "ragged": Ragged}

if __name__ == "__main__":
    main(__doc__, CASES)
