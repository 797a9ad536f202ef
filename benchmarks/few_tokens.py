"""Times a MoE layer for few tokens, as in decoding, against the time to read the weights of the experts in use.

    python benchmarks/few_tokens.py                                                    # Qwen3-30B-A3B's layer, 1 to 256 tokens
    python benchmarks/few_tokens.py --precisions bf16 fp8                              # and with experts in FP8
    python benchmarks/few_tokens.py --preset deepseek-v3 --layers 2 --tokens 1 64
    python benchmarks/few_tokens.py --hidden 128 --inter 64 --experts 8 --top-k 2 --layers 2 --tokens 1 3      # for a CPU

Several layers of router and experts run in one program, as in a model, each with its own weights. So the previous call leaves
no weights in the L2 cache, and all layers share Python's overhead. *Floor* reads each expert that a token chose once, at the
bandwidth with which XLA reads one layer's w_gate_up in the same process. A time is for one layer, the median of 5 groups of
calls. Each row is first checked against backend `xla`: in f32, and in FP8 against the reference of the same recipe.
"""

import argparse
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from moe_layer_peers import Shape, random_in_jax
from timing import median_ms

from moe_jax.config import EXPERT_LAYERS, ExpertLayer
from moe_jax.kernels import Precision, QuantisedMatrices, experts_mlp, quantise_matrices
from moe_jax.kernels.experts.backends import BACKENDS

TOLERANCE = 2e-2
"""Largest accepted difference of a layer's y from f32, relative in the Frobenius norm."""

FP8_TOLERANCE, REFERENCE_TOLERANCE = 0.09, 0.04
"""The same for experts in FP8, whose recipe has 0.06; and from the recipe's reference. XLA may leave out the rounding of x to
16 bits, and a number then falls on the other side between two neighbours of e4m3."""

Weights = tuple[Float[Array, "experts hidden"], Any, Any]
"""The router's matrix, w_gate_up and w_down: arrays, or `QuantisedMatrices`."""


def main() -> None:
    """Prints a row for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=EXPERT_LAYERS, default="qwen3-30b-a3b")
    for name in ("hidden", "inter", "experts", "top-k"):
        parser.add_argument(f"--{name}", type=int, help="replaces the preset's size")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "fp8"), default=["bf16"], help="bf16: --dtype")
    parser.add_argument("--backend", choices=BACKENDS, help="default: the device's")
    parser.add_argument("--calls", type=int, default=50, help="calls in a group")
    args = parser.parse_args()
    sizes = EXPERT_LAYERS[args.preset]._asdict()
    layer = ExpertLayer(**{name: getattr(args, name) or size for name, size in sizes.items()})
    shape = Shape(layer.experts, layer.top_k, layer.hidden, layer.inter)
    weights = [random_in_jax(shape, 1, args.dtype, seed)[1:4] for seed in range(args.layers)]
    bandwidth = read_bandwidth(weights[0][1], args.calls)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {vars(args)}; XLA reads at {bandwidth / 1e9:.0f} GB/s")
    titles = "precision", "tokens", "experts used", "error", "us a layer", "floor us", "times the floor"
    print(" ".join(f"{title:>{max(len(title), 9)}}" for title in titles))
    for precision in args.precisions:
        of_layers = weights if precision == "bf16" else [(w[0], *map(jax.jit(quantise_matrices), w[1:])) for w in weights]
        for tokens in args.tokens:
            x = jax.random.normal(jax.random.key(tokens), (tokens, layer.hidden), args.dtype)
            layers = jax.jit(lambda x, weights: run_layers(x, weights, layer.top_k, args.backend))(x, of_layers)
            error = check(layers, weights, of_layers)
            # Only one result: each further result costs time on the host, which matters in so short a call.
            last = jax.jit(lambda x, weights: run_layers(x, weights, layer.top_k, args.backend)[-1][-1])
            run = last.lower(x, of_layers).compile()
            used = statistics.mean(len(jnp.unique(chosen)) for _, _, chosen, _ in layers)
            size = 1 if precision == "fp8" else jnp.dtype(args.dtype).itemsize
            floor = used * 3 * layer.inter * layer.hidden * size / bandwidth
            seconds = median_ms(run, (x, of_layers), args.calls) / 1e3 / args.layers
            numbers = f"{tokens:>9} {used:>12.1f} {error:>9.1e} {1e6 * seconds:>10.1f} {1e6 * floor:>9.1f}"
            print(f"{precision:>9} {numbers} {seconds / floor:>15.2f}", flush=True)


def run_layers(x: Float[Array, "tokens hidden"], weights: list[Weights], top_k: int, backend: str | None) -> list[tuple]:
    """Returns (x, top-k weights, experts, y) of each layer. The next layer gets x + y."""
    layers = []
    precision = Precision() if isinstance(weights[0][1], QuantisedMatrices) else None
    for router, w_gate_up, w_down in weights:
        probabilities = jax.nn.softmax(jnp.einsum("td,ed->te", x, router).astype(jnp.float32))
        top, chosen = jax.lax.top_k(probabilities, top_k)
        top = top / top.sum(axis=1, keepdims=True)
        y = experts_mlp(x, w_gate_up, w_down, top, chosen, backend=backend, precision=precision)
        layers.append((x, top, chosen, y))
        x = x + y
    return layers


def check(layers: list[tuple], weights: list[Weights], of_layers: list[Weights]) -> float:
    """Returns the largest error of a layer's y from the reference, which has the same recipe in FP8, else f32.

    Exits with 1 if an error is too large, or that from f32 where the reference is in FP8.
    """
    errors = []
    for i, ((x, top, chosen, y), (_, *matrices), (_, *computed)) in enumerate(zip(layers, weights, of_layers, strict=True)):
        exact = experts_mlp(*(a.astype(jnp.float32) for a in (x, *matrices)), top, chosen, backend="xla")
        wanted = [("f32", exact, TOLERANCE)]
        if isinstance(computed[0], QuantisedMatrices):
            reference = experts_mlp(x, *computed, top, chosen, precision=Precision(), backend="xla")
            wanted = [("f32", exact, FP8_TOLERANCE), ("the reference in FP8", reference, REFERENCE_TOLERANCE)]
        for name, expected, tolerance in wanted:
            error = float(jnp.linalg.norm(y - expected.astype(jnp.float32)) / jnp.linalg.norm(expected.astype(jnp.float32)))
            if not error < tolerance:
                sys.exit(f"{x.shape[0]} tokens, layer {i}: y is {error} from {name}, more than {tolerance}")
        errors.append(error)
    return max(errors)


def read_bandwidth(w: Array, calls: int) -> float:
    """Returns the bytes a second at which XLA reads `w`."""
    largest = jax.jit(lambda w: jnp.max(w)).lower(w).compile()
    return w.nbytes / (median_ms(largest, (w,), calls) / 1e3)


if __name__ == "__main__":
    main()
