"""Times the accumulation of a micro-batch's expert gradients in f32: inside the kernels, or by XLA after them.

    python benchmarks/gradient_totals.py                                  # Qwen3-30B-A3B's layer on one GPU
    python benchmarks/gradient_totals.py --tokens 1024 --experts 256 --top-k 8 --hidden 7168 --intermediate 2048
    python benchmarks/gradient_totals.py --tokens 64 --experts 8 --top-k 2 --hidden 128 --intermediate 64    # for a CPU

Each row is forward + backward of the experts without router. *none*: gradients in the weights' dtype, not accumulated. *xla*:
these gradients, then totals + gradients. *kernels*: the experts with these totals as accumulators. The totals are donated. MiB
are temporaries, and results that do not reuse an argument's memory, as the compiler reports them. A time is the median of 5
groups of calls. First the two ways of adding must agree, or the process exits with 1.
"""

import argparse
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moe_jax.config import EXPERT_LAYERS
from moe_jax.kernels import experts_mlp
from moe_jax.kernels.experts.backends import BACKENDS
from moe_jax.kernels.experts.call import TokenPart
from moe_jax.kernels.experts.call import experts as compute
from moe_jax.kernels.experts.weights import Accumulators, ExpertWeights

WAYS = ("none", "xla", "kernels")
TOLERANCE = 1e-2
"""Largest accepted relative difference in the Frobenius norm: XLA adds gradients rounded to the weights' dtype."""


def main() -> None:
    """Checks, then prints a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    layer = EXPERT_LAYERS["qwen3-30b-a3b"]
    sizes = {
        "tokens": 8192,
        "experts": layer.experts,
        "top-k": layer.top_k,
        "hidden": layer.hidden,
        "intermediate": layer.inter,
    }
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16", help="dtype of tokens and weights")
    parser.add_argument("--backend", choices=BACKENDS, help="default: the device's")
    parser.add_argument("--launches", type=int, default=20, help="calls in a group")
    args = parser.parse_args()
    x, w_gate_up, w_down, dy = (
        0.1 * jax.random.normal(jax.random.key(i), shape, args.dtype)
        for i, shape in enumerate(
            (
                (args.tokens, args.hidden),
                (args.experts, 2 * args.intermediate, args.hidden),
                (args.experts, args.hidden, args.intermediate),
                (args.tokens, args.hidden),
            )
        )
    )
    weights, chosen = jax.lax.top_k(
        jax.nn.softmax(jax.random.normal(jax.random.key(9), (args.tokens, args.experts))), args.top_k
    )
    inputs = x, (w_gate_up, w_down), weights, chosen, dy
    steps = {way: compiled(way, args.backend, inputs) for way in WAYS}

    added = [steps[way](zeros(inputs), *inputs)[0] for way in ("xla", "kernels")]
    errors = [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)) for a, b in zip(*added, strict=True)]
    del added
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {vars(args)}, apart by {errors}")
    if not all(error <= TOLERANCE for error in errors):
        sys.exit(f"the two ways of adding differ by more than {TOLERANCE}")
    print(f"{'added by':>10} {'ms':>10} {'MiB':>10}")
    for way, step in steps.items():
        found = step.memory_analysis()
        megabytes = (found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes) / 2**20
        print(f"{way:>10} {median_ms(step, inputs, args.launches):10.3f} {megabytes:10.1f}", flush=True)


def compiled(way: str, backend: str | None, inputs: tuple):
    """Returns the compiled step(totals, *inputs) -> (totals, other gradients)."""

    def step(totals, x, experts, weights, chosen, dy):
        if way == "kernels":

            def run(x, weights, totals):
                operands = ExpertWeights.of(*experts, gradient=Accumulators(*totals))
                return compute([TokenPart(x, weights, chosen)], operands, backend=backend)[0]

            _, pullback = jax.vjp(run, x, weights, totals)
            *others, totals = pullback(dy)
            return totals, others
        _, pullback = jax.vjp(lambda x, weights, w: experts_mlp(x, *w, weights, chosen, backend=backend), x, weights, experts)
        *others, gradients = pullback(dy)
        if way == "none":
            return totals, (others, gradients)
        return jax.tree.map(lambda total, gradient: total + gradient.astype(total.dtype), totals, gradients), others

    return jax.jit(step, donate_argnums=0).lower(jax.eval_shape(zeros, inputs), *inputs).compile()


def zeros(inputs: tuple) -> tuple[Array, Array]:
    """Returns accumulators that are zero."""
    gate_up, down = inputs[1]
    return jnp.zeros(gate_up.shape, jnp.float32), jnp.zeros(down.shape, jnp.float32)


def median_ms(step, inputs: tuple, launches: int) -> float:
    """Returns the milliseconds of a call. Each call gets the totals that the previous call returned."""
    groups = []
    for group in range(6):
        totals = zeros(inputs)
        jax.block_until_ready(totals)
        began = time.perf_counter()
        for _ in range(launches):
            totals, others = step(totals, *inputs)
        jax.block_until_ready((totals, others))
        # The first group warms up.
        if group:
            groups.append((time.perf_counter() - began) / launches)
    return 1e3 * statistics.median(groups)


if __name__ == "__main__":
    main()
