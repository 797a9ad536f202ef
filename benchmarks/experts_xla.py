"""Times the experts of an MoE layer on the `xla` backend beside the same layer written with `jax.lax.ragged_dot`.

    python benchmarks/experts_xla.py                                        # a small layer, for a CPU
    python benchmarks/experts_xla.py --preset qwen3-30b-a3b --tokens 100 4096 --dtype bfloat16 --skip-ragged-dot

`fwd` is the forward pass, `fwd+bwd` adds the gradients to x, both weights and the top-k weights. Random data, random
routing. TFLOP/s count 6*T*K*D*I forward and 18*T*K*D*I with the backward pass.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp

from moe_jax.kernels import experts_mlp

PRESETS = {"small": (16, 4, 256, 128), "qwen3-30b-a3b": (128, 8, 2048, 768)}
"""experts, choices per token, hidden, intermediate"""


def main() -> None:
    """Measures every requested number of tokens and prints a table, or one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--experts", type=int, help="overrides the preset")
    parser.add_argument("--top-k", type=int, help="overrides the preset")
    parser.add_argument("--hidden", type=int, help="overrides the preset")
    parser.add_argument("--intermediate", type=int, help="overrides the preset")
    parser.add_argument("--dtype", default="float32", help="of activations")
    parser.add_argument("--weight-dtype", help="of the weights; by default that of activations")
    parser.add_argument("--skew", type=float, default=0.0, help="std of a per-expert bias on the routing scores; 0 is even")
    parser.add_argument("--chunk-tokens", type=int)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--skip-ragged-dot", action="store_true", help="it needs E times the memory on large shapes")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    given = (args.experts, args.top_k, args.hidden, args.intermediate)
    sizes = tuple(own or preset for own, preset in zip(given, PRESETS[args.preset], strict=True))

    if not args.json:
        print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, E, K, D, I = {sizes}, {args.dtype}, skew {args.skew}")
        print(
            f"{'tokens':>7} {'implementation':<14} {'fwd ms':>9} {'fwd+bwd ms':>11} {'fwd TFLOP/s':>12} {'fwd+bwd TFLOP/s':>16}"
        )
    for tokens in args.tokens:
        systems = {"experts_mlp": lambda *a: experts_mlp(*a, chunk_tokens=args.chunk_tokens)}
        if not args.skip_ragged_dot:
            systems["ragged_dot"] = ragged_dot_mlp
        for name, mlp in systems.items():
            row = measure(mlp, tokens, *sizes, args)
            record = {"tokens": tokens, "implementation": name, **row, "device": jax.devices()[0].device_kind}
            if args.json:
                print(json.dumps(record | vars(args) | {"tokens": tokens}))
            else:
                print(
                    f"{tokens:>7} {name:<14} {row['fwd_ms']:>9.3f} {row['fwd_bwd_ms']:>11.3f} "
                    f"{row['fwd_tflops']:>12.3f} {row['fwd_bwd_tflops']:>16.3f}"
                )


def measure(mlp, tokens: int, experts: int, k: int, hidden: int, inter: int, args: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds and TFLOP/s of one layer, forward alone and with its backward pass."""
    dtype, weight_dtype = jnp.dtype(args.dtype), jnp.dtype(args.weight_dtype or args.dtype)
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 6)
    x = jax.random.normal(keys[0], (tokens, hidden), dtype)
    w_gate_up = jax.random.normal(keys[1], (experts, 2 * inter, hidden), weight_dtype) * hidden**-0.5
    w_down = jax.random.normal(keys[2], (experts, hidden, inter), weight_dtype) * inter**-0.5
    bias = args.skew * jax.random.normal(keys[5], (experts,))
    scores, chosen = jax.lax.top_k(jax.random.normal(keys[3], (tokens, experts)) + bias, k)
    weights = jax.nn.softmax(scores).astype(dtype)
    dy = jax.random.normal(keys[4], (tokens, hidden), dtype)

    def forward_backward(x, w_gate_up, w_down, weights, dy):
        y, backward = jax.vjp(lambda *a: mlp(*a, chosen), x, w_gate_up, w_down, weights)
        return y, backward(dy)

    forward_ms = _median_ms(jax.jit(mlp), (x, w_gate_up, w_down, weights, chosen), args.runs)
    both_ms = _median_ms(jax.jit(forward_backward), (x, w_gate_up, w_down, weights, dy), args.runs)
    flops = 6 * tokens * k * hidden * inter
    return {
        "fwd_ms": forward_ms,
        "fwd_bwd_ms": both_ms,
        "fwd_tflops": flops / forward_ms / 1e9,
        "fwd_bwd_tflops": 3 * flops / both_ms / 1e9,
    }


def ragged_dot_mlp(x, w_gate_up, w_down, weights, chosen):
    """The same layer as a JAX user writes it by default: sort, `jax.lax.ragged_dot`, unsort, autodiff."""
    tokens, k = chosen.shape
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=w_gate_up.shape[0])
    h = jax.lax.ragged_dot(x[order // k], w_gate_up.astype(x.dtype).mT, sizes)
    gate, up = jnp.split(h, 2, axis=1)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, w_down.astype(x.dtype).mT, sizes)
    y = y[jnp.argsort(order)].reshape(tokens, k, -1)
    return jnp.sum(y * weights[:, :, None], axis=1).astype(x.dtype)


def _median_ms(f, arguments: tuple, runs: int) -> float:
    jax.block_until_ready(f(*arguments))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(f(*arguments))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main()
