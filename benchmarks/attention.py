"""Times fused causal attention beside cuDNN's on the same GPU: forward, and forward with backward.

    python benchmarks/attention.py
    python benchmarks/attention.py --shapes 8x4096 --documents 1024      # rows packed with documents of 1024 tokens: ours alone

TFLOP/s count what a query sees: 4*B*H*N*d forward, 14*B*H*N*d with backward, N = S*S/2 pairs (S*documents/2 when packed). Times
are the median of 5 groups of `--launches` calls between two synchronisations; random data.
"""

import argparse

import jax
import jax.numpy as jnp
from timing import median_ms

from moe_jax.kernels.flash_attention import flash_attention


def main() -> None:
    """Prints a row for each shape and system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["8x4096", "4x8192", "1x32768"], help="batch x tokens")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--documents", type=int, help="tokens of each document; by default a row is one document")
    parser.add_argument("--window", type=int)
    parser.add_argument("--launches", type=int, default=10)
    args = parser.parse_args()
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bf16, {args.heads} heads on {args.kv_heads} of {args.head_dim}"
    )
    print(f"{'shape':>10} {'system':>8} {'forward ms':>11} {'TFLOP/s':>8} {'both ms':>9} {'TFLOP/s':>8}", flush=True)
    for shape in args.shapes:
        batch, tokens = map(int, shape.split("x"))
        documents = args.documents or tokens
        segment_ids = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32) // documents, (batch, tokens))
        scale = args.head_dim**-0.5

        def ours(q, k, v, segment_ids=segment_ids, scale=scale):
            return flash_attention(q, k, v, scale=scale, segment_ids=segment_ids, window=args.window)[0]

        def cudnn(q, k, v, scale=scale):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=scale, implementation="cudnn")

        systems = {"moe_jax": ours}
        # cuDNN as JAX offers it knows neither documents nor, with is_causal, a window.
        if args.documents is None and args.window is None:
            systems["cudnn"] = cudnn
        flops = 2 * batch * args.heads * tokens * documents * args.head_dim
        for name, attention in systems.items():
            forward_ms, both_ms = measure(attention, batch, tokens, args)
            print(
                f"{shape:>10} {name:>8} {forward_ms:>11.3f} {flops / forward_ms / 1e9:>8.0f} "
                f"{both_ms:>9.3f} {3.5 * flops / both_ms / 1e9:>8.0f}",
                flush=True,
            )


def measure(attention, batch: int, tokens: int, args: argparse.Namespace) -> tuple[float, float]:
    """Milliseconds of a forward pass, and of one with the gradients to q, k and v."""
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 4)
    heads = (args.heads, args.kv_heads, args.kv_heads, args.heads)
    q, k, v, dy = (
        jax.random.normal(key, (batch, tokens, count, args.head_dim), jnp.bfloat16)
        for key, count in zip(keys, heads, strict=True)
    )

    def both(q, k, v, dy):
        y, backward = jax.vjp(attention, q, k, v)
        return y, backward(dy)

    return median_ms(jax.jit(attention), (q, k, v), args.launches), median_ms(jax.jit(both), (q, k, v, dy), args.launches)


if __name__ == "__main__":
    main()
