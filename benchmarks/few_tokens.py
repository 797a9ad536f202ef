"""Times a MoE layer for few tokens, as in decoding, against the time to read the weights of the experts in use.

    python benchmarks/few_tokens.py                                                    # Qwen3-30B-A3B's layer, 1 to 256 tokens
    python benchmarks/few_tokens.py --preset deepseek-v3 --layers 2 --tokens 1 64
    python benchmarks/few_tokens.py --hidden 128 --inter 64 --experts 8 --top-k 2 --layers 2 --tokens 1 3      # for a CPU

Several layers of router and experts run in one program, as in a model, each with its own weights. So the previous call leaves
no weights in the L2 cache, and all layers share Python's overhead. *Floor* reads each expert that a token chose once, at the
bandwidth with which XLA reads one layer's w_gate_up in the same process. A time is for one layer, the median of 5 groups of
calls. Each row is first checked against backend `xla` in f32.
"""

import argparse
import statistics
import sys

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from moe_layer_peers import Shape, random_in_jax
from timing import median_ms

from moe_jax.config import EXPERT_LAYERS, ExpertLayer
from moe_jax.kernels import experts_mlp
from moe_jax.kernels.experts.choose_backend import BACKENDS

TOLERANCE = 2e-2
"""Largest accepted difference of a layer's y from f32, relative in the Frobenius norm."""

Weights = tuple[Float[Array, "experts hidden"], Float[Array, "experts 2*inter hidden"], Float[Array, "experts hidden inter"]]


def main() -> None:
    """Prints a row for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=EXPERT_LAYERS, default="qwen3-30b-a3b")
    for name in ("hidden", "inter", "experts", "top-k"):
        parser.add_argument(f"--{name}", type=int, help="replaces the preset's size")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", choices=BACKENDS, help="default: the device's")
    parser.add_argument("--calls", type=int, default=50, help="calls in a group")
    args = parser.parse_args()
    sizes = EXPERT_LAYERS[args.preset]._asdict()
    layer = ExpertLayer(**{name: getattr(args, name) or size for name, size in sizes.items()})
    shape = Shape(layer.experts, layer.top_k, layer.hidden, layer.inter)
    weights = [random_in_jax(shape, 1, args.dtype, seed)[1:4] for seed in range(args.layers)]
    bandwidth = read_bandwidth(weights[0][1], args.calls)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {vars(args)}; XLA reads at {bandwidth / 1e9:.0f} GB/s")
    print(f"{'tokens':>7} {'experts used':>13} {'us a layer':>11} {'floor us':>9} {'times the floor':>16}")
    for tokens in args.tokens:
        x = jax.random.normal(jax.random.key(tokens), (tokens, layer.hidden), args.dtype)
        layers = jax.jit(lambda x, weights: run_layers(x, weights, layer.top_k, args.backend))(x, weights)
        check(layers, weights)
        # Only one result: each further result costs time on the host, which matters in so short a call.
        run = jax.jit(lambda x, weights: run_layers(x, weights, layer.top_k, args.backend)[-1][-1]).lower(x, weights).compile()
        used = statistics.mean(len(jnp.unique(chosen)) for _, _, chosen, _ in layers)
        floor = used * 3 * layer.inter * layer.hidden * jnp.dtype(args.dtype).itemsize / bandwidth
        seconds = median_ms(run, (x, weights), args.calls) / 1e3 / args.layers
        print(f"{tokens:>7} {used:>13.1f} {1e6 * seconds:>11.1f} {1e6 * floor:>9.1f} {seconds / floor:>16.2f}", flush=True)


def run_layers(x: Float[Array, "tokens hidden"], weights: list[Weights], top_k: int, backend: str | None) -> list[tuple]:
    """Returns (x, top-k weights, experts, y) of each layer. The next layer gets x + y."""
    layers = []
    for router, w_gate_up, w_down in weights:
        probabilities = jax.nn.softmax(jnp.einsum("td,ed->te", x, router).astype(jnp.float32))
        top, chosen = jax.lax.top_k(probabilities, top_k)
        top = top / top.sum(axis=1, keepdims=True)
        y = experts_mlp(x, w_gate_up, w_down, top, chosen, backend=backend)
        layers.append((x, top, chosen, y))
        x = x + y
    return layers


def check(layers: list[tuple], weights: list[Weights]) -> None:
    """Exits with 1 if a layer's y differs from the y of backend `xla` in f32."""
    for i, ((x, top, chosen, y), (_, *matrices)) in enumerate(zip(layers, weights, strict=True)):
        expected = experts_mlp(*(a.astype(jnp.float32) for a in (x, *matrices)), top, chosen, backend="xla")
        error = float(jnp.linalg.norm(y - expected) / jnp.linalg.norm(expected))
        if not error < TOLERANCE:
            sys.exit(f"{x.shape[0]} tokens, layer {i}: y is {error} from that in f32, more than {TOLERANCE}")


def read_bandwidth(w: Array, calls: int) -> float:
    """Returns the bytes a second at which XLA reads `w`."""
    largest = jax.jit(lambda w: jnp.max(w)).lower(w).compile()
    return w.nbytes / (median_ms(largest, (w,), calls) / 1e3)


if __name__ == "__main__":
    main()
