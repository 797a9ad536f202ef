"""Times the experts of a layer, trained, frozen, and frozen with adapters, in bf16 and FP8: forward and backward.

    python benchmarks/adapted_experts.py                            # Qwen3-30B-A3B, 32768 tokens, ranks 4 and 16
    python benchmarks/adapted_experts.py --tokens 8192 --ranks 4

There is no router: every expert gets the same number of tokens. A row is the median of 5 groups of `--launches` calls, one
behind the other: the GPU is under load. "parts" times the thin products alone, which read rows and write few numbers.
"""

import argparse
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from timing import median_ms

from moe_jax import kernels
from moe_jax.config import NAMED_CONFIGS
from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.call import TokenPart
from moe_jax.kernels.experts.call import experts as compute
from moe_jax.kernels.experts.routing import plan
from moe_jax.kernels.experts.weights import ExpertWeights, Matrix
from moe_jax.kernels.low_rank import LowRank


def main() -> None:
    """Prints a row for each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16], help="the rank of each expert")
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--parts", action="store_true")
    args = parser.parse_args()
    config = NAMED_CONFIGS[args.config]
    experts, k = config.experts.num_experts, config.experts.num_experts_per_tok
    hidden, inter = config.hidden_size, config.moe_intermediate_size
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.config}, {args.tokens} tokens")

    def normal(seed: int, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
        return 0.02 * jax.random.normal(jax.random.key(seed), shape, dtype)

    x, dy = normal(0, args.tokens, hidden), normal(1, args.tokens, hidden)
    matrices = normal(2, experts, 2 * inter, hidden), normal(3, experts, hidden, inter)
    chosen = ((jnp.arange(args.tokens)[:, None] * k + jnp.arange(k)) % experts).astype(jnp.int32)
    weights = jnp.full(chosen.shape, 1 / k, jnp.float32)

    def adapter_of(rank: int) -> tuple[LowRank, LowRank]:
        wide, narrow = partial(normal, 4, experts, dtype=jnp.float32), partial(normal, 5, experts, dtype=jnp.float32)
        return LowRank(wide(rank, hidden), narrow(2 * inter, rank)), LowRank(wide(rank, inter), narrow(hidden, rank))

    def frozen(own, matrices, precision=None):
        """The experts with frozen matrices, and their changes if there are some."""
        x, weights, *adapter = own
        changes = adapter[0] if adapter else (None, None)
        pairs = zip(map(Matrix.of, matrices), changes, strict=True)
        operands = ExpertWeights(*(replace(w, change=change) for w, change in pairs), frozen=True)
        return compute([TokenPart(x, weights, chosen)], operands, precision=precision)[0]

    def show(name: str, f, trained: tuple, matrices: tuple = matrices) -> None:
        """Times f(trained, matrices): the result, and gradients of `trained` alone."""

        @jax.jit
        def step(trained, matrices, dy):
            y, pullback = jax.vjp(lambda *trained: f(trained, matrices), *trained)
            return y, pullback(dy)

        print(f"{name:24} {median_ms(step, (trained, matrices, dy), args.launches):7.2f} ms", flush=True)

    show("trained", lambda own, _: kernels.experts_mlp(own[0], *own[2:], own[1], chosen), (x, weights, *matrices))
    show("frozen", frozen, (x, weights))
    for rank in args.ranks:
        show(f"frozen, rank {rank}", frozen, (x, weights, adapter_of(rank)))
    in_fp8, quantised = partial(frozen, precision=kernels.Precision()), tuple(map(kernels.quantise_matrices, matrices))
    show("frozen in FP8", in_fp8, (x, weights), quantised)
    for rank in args.ranks:
        show(f"frozen in FP8, rank {rank}", in_fp8, (x, weights, adapter_of(rank)), quantised)
    if args.parts:
        show_parts(args, x, chosen, inter, experts)


def show_parts(args: argparse.Namespace, x, chosen, inter: int, experts: int) -> None:
    """Prints a row for each thin product, with the bytes that it reads and writes a second."""
    planned = plan(chosen, experts, mosaic.ROW_ALIGNMENT)
    rows = planned.num_rows
    hidden = x.shape[1]
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
        milliseconds = median_ms(jax.jit(f), (a,), args.launches)
        moved = (a.size if a is not x else rows * hidden) * 2 + rows * 64 * 2
        print(f"  {name:22} {milliseconds:7.3f} ms {moved / milliseconds / 1e9:6.2f} TB/s", flush=True)


if __name__ == "__main__":
    main()
