"""Times the dense matrices of a layer in bf16 and in FP8: attention's projections and shared experts, forward and backward.

    python benchmarks/fp8_dense.py --output results.json                        # Qwen3-30B-A3B and DeepSeek-V3, under a minute

A row has the matrices that read one x, or the block of shared experts. FP8 has its copies of the matrices, which a training
step makes once: their time stands beside. Errors are those of FP8 beside bf16, relative in the Frobenius norm. A time is the
median of 5 groups of 10 calls, one behind the other: the GPU is under load.
"""

import argparse
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from timing import median_ms

from moe_jax.kernels import fp8_matmul
from moe_jax.kernels.experts.fp8.dense import dense_copies

SHARED, LAUNCHES = "shared experts", 10
round_all = jax.jit(lambda matrices: [dense_copies(w) for w in matrices])


class Case(NamedTuple):
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


CASES = (
    Case("qwen3-30b-a3b", "q, k, v", 32768, ((4096, 2048), (512, 2048), (512, 2048))),
    Case("qwen3-30b-a3b", "o", 32768, ((2048, 4096),)),
    Case("deepseek-v3", "q_a, kv_a", 16384, ((1536, 7168), (576, 7168))),
    Case("deepseek-v3", "q_b", 16384, ((24576, 1536),)),
    Case("deepseek-v3", "kv_b", 16384, ((32768, 512),)),
    Case("deepseek-v3", "o", 16384, ((7168, 16384),)),
    Case("deepseek-v3", SHARED, 16384, ((2048, 7168), (2048, 7168), (7168, 2048))),
)


def programs(case: Case, *, in_fp8: bool) -> tuple[Any, Any]:
    """Compiles both passes."""
    x, matrices, dys = jax.eval_shape(case.arrays)
    given = x, matrices, jax.eval_shape(round_all, matrices) if in_fp8 else []
    return jax.jit(case.forward).lower(*given).compile(), jax.jit(case.backward).lower(*given, dys).compile()


@jax.jit
def error(a, b):
    """Returns |a - b| / |b|."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)


def measure(case: Case, bf16: tuple, fp8: tuple) -> dict[str, list[float]]:
    """Returns milliseconds and rates of both passes in bf16 and in FP8, the copies' time, and the worst errors of y, dx, dw."""
    x, matrices, dys = case.arrays()
    calls = (bf16, (x, matrices, [])), (fp8, (x, matrices, round_all(matrices)))
    row = {"forward_ms": [median_ms(run[0], given, LAUNCHES) for run, given in calls]}
    tera = 2e-9 * case.tokens * sum(map(math.prod, case.sizes))
    row["forward_tflops"] = [tera / ms for ms in row["forward_ms"]]
    row["with_gradients_ms"] = [median_ms(run[1], (*given, dys), LAUNCHES) for run, given in calls]
    row["with_gradients_tflops"] = [3 * tera / ms for ms in row["with_gradients_ms"]]
    wanted, found = (run[1](*given, dys) for run, given in calls)
    errors = [float(max(jax.tree.leaves(jax.tree.map(error, a, b)))) for a, b in zip(found, wanted, strict=True)]
    return row | {"copies_ms": [median_ms(round_all, (matrices,), LAUNCHES)], "errors": errors}


def main() -> None:
    """Prints a row for each case; with --output also writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a JSON file")
    output = parser.parse_args().output
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    # XLA times its matmuls on the GPU to choose them. Those of bf16 come first, one by one, and FP8 takes the same for dw.
    in_bf16 = [programs(case, in_fp8=False) for case in CASES]
    with ThreadPoolExecutor() as threads:
        in_fp8 = list(threads.map(lambda case: programs(case, in_fp8=True), CASES))
    print("| layer | matrices | forward: bf16, FP8 ms | TFLOP/s | with gradients | TFLOP/s | copies | y, dx, dw |")
    print("|---" * 8 + "|", flush=True)
    rows = []
    for case, bf16, fp8 in zip(CASES, in_bf16, in_fp8, strict=True):
        row = measure(case, bf16, fp8)
        cells = [", ".join(f"{number:.3g}" for number in numbers) for numbers in row.values()]
        print(f"| {case.layer} | {case.name} | {' | '.join(cells)} |", flush=True)
        rows.append(case._asdict() | row)
    if output is not None:
        output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
