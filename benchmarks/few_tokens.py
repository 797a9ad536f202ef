"""Times a MoE layer for few tokens, as in decoding, against the time to read the weights of the experts in use.

    python benchmarks/few_tokens.py                                                    # Qwen3-30B-A3B's layer, 1 to 256 tokens
    python benchmarks/few_tokens.py --precisions bf16 fp8                              # and with experts in FP8
    python benchmarks/few_tokens.py --preset deepseek-v3 --layers 2 --tokens 1 64
    python benchmarks/few_tokens.py --small                                            # sizes for a CPU, as a smoke test

Several layers of router and experts run in one program, as in a model, each with its own weights. So the previous call leaves
no weights in the L2 cache, and all layers share Python's overhead. *Floor* reads each expert that a token chose once, at the
bandwidth with which XLA reads one layer's w_gate_up in the same process. A time is for one layer, the median of 5 groups of
calls. Each row is first checked against backend `xla`: in f32, and in FP8 against the reference of the same recipe. An error
that is too large is a failure.
"""

import statistics
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from harness import Case, main, median_ms, one_of, relative_error
from jaxtyping import Array, Float
from moe_layer_peers import random_in_jax

from moe_jax.config import EXPERT_LAYERS
from moe_jax.kernels import Precision, QuantisedMatrices, experts_mlp, quantise_matrices
from moe_jax.kernels.backends import BACKENDS

TOLERANCE = 2e-2
"""Largest accepted difference of a layer's y from f32, relative in the Frobenius norm."""

FP8_TOLERANCE, REFERENCE_TOLERANCE = 0.09, 0.04
"""The same for experts in FP8, whose recipe has 0.06; and from the recipe's reference. XLA may leave out the rounding of x to
16 bits, and a number then falls on the other side between two neighbours of e4m3."""

Weights = tuple[Float[Array, "experts hidden"], Any, Any]
"""The router's matrix, w_gate_up and w_down: arrays, or `QuantisedMatrices`."""


@dataclass(kw_only=True)
class FewTokens(Case):
    """A row for each precision and number of tokens."""

    preset: one_of(EXPERT_LAYERS) = "qwen3-30b-a3b"
    hidden: int | None = None  # replaces the preset's size
    inter: int | None = None
    experts: int | None = None
    top_k: int | None = None
    tokens: tuple[int, ...] = (1, 16, 64, 256)
    layers: int = 8
    dtype: str = "bfloat16"
    precisions: tuple[Literal["bf16", "fp8"], ...] = ("bf16",)  # bf16: --dtype
    backend: one_of(BACKENDS) | None = None  # default: the device's
    calls: int = 50  # calls in a group

    SMALL = dict(hidden=128, inter=128, experts=8, top_k=2, layers=2, tokens=(1, 3), calls=1, precisions=("bf16", "fp8"))

    def results(self):
        """Yields the rows."""
        own = {name: getattr(self, name) for name in ("hidden", "inter", "experts", "top_k")}
        layer = EXPERT_LAYERS[self.preset]._replace(**{name: size for name, size in own.items() if size})
        weights = [random_in_jax(layer, 1, self.dtype, seed)[1:4] for seed in range(self.layers)]
        bandwidth = read_bandwidth(weights[0][1], self.calls)
        print(f"XLA reads at {bandwidth / 1e9:.0f} GB/s", flush=True)
        for precision in self.precisions:
            of_layers = weights if precision == "bf16" else [(w[0], *map(jax.jit(quantise_matrices), w[1:])) for w in weights]
            for tokens in self.tokens:
                x = jax.random.normal(jax.random.key(tokens), (tokens, layer.hidden), self.dtype)
                layers = jax.jit(lambda x, weights: run_layers(x, weights, layer.top_k, self.backend))(x, of_layers)
                errors = check(layers, weights, of_layers)
                # Only one result: each further result costs time on the host, which matters in so short a call.
                last = jax.jit(lambda x, weights: run_layers(x, weights, layer.top_k, self.backend)[-1][-1])
                run = last.lower(x, of_layers).compile()
                used = statistics.mean(len(jnp.unique(chosen)) for _, _, chosen, _ in layers)
                size = 1 if precision == "fp8" else jnp.dtype(self.dtype).itemsize
                floor = used * 3 * layer.inter * layer.hidden * size / bandwidth
                seconds = median_ms(run, (x, of_layers), self.calls) / 1e3 / self.layers
                row = dict(precision=precision, tokens=tokens, experts_used=float(used)) | errors
                yield row | {"us_a_layer": 1e6 * seconds, "floor_us": 1e6 * floor, "times_the_floor": seconds / floor}


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


def check(layers: list[tuple], weights: list[Weights], of_layers: list[Weights]) -> dict[str, Any]:
    """Returns the largest error of a layer's y from the reference, which has the same recipe in FP8, else f32.

    Adds a failure if an error is too large, or that from f32 where the reference is in FP8.
    """
    errors, failures = [], []
    for i, ((x, top, chosen, y), (_, *matrices), (_, *computed)) in enumerate(zip(layers, weights, of_layers, strict=True)):
        exact = experts_mlp(*(a.astype(jnp.float32) for a in (x, *matrices)), top, chosen, backend="xla")
        wanted = [("f32", exact, TOLERANCE)]
        if isinstance(computed[0], QuantisedMatrices):
            reference = experts_mlp(x, *computed, top, chosen, precision=Precision(), backend="xla")
            wanted = [("f32", exact, FP8_TOLERANCE), ("the reference in FP8", reference, REFERENCE_TOLERANCE)]
        for name, expected, tolerance in wanted:
            error = float(relative_error(y, expected))
            if not error < tolerance:
                failures.append(f"layer {i}: y is {error} from {name}, more than {tolerance}")
        errors.append(error)
    return {"error": max(errors)} | ({"failure": "; ".join(failures)} if failures else {})


def read_bandwidth(w: Array, calls: int) -> float:
    """Returns the bytes a second at which XLA reads `w`."""
    largest = jax.jit(lambda w: jnp.max(w)).lower(w).compile()
    return w.nbytes / (median_ms(largest, (w,), calls) / 1e3)


CASES = {"few": FewTokens}

if __name__ == "__main__":
    main(__doc__, CASES)
