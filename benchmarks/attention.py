"""Times fused causal attention and cuDNN's on the same GPU: forward, and forward with backward.

    python benchmarks/attention.py
    python benchmarks/attention.py --shapes 8x4096 --documents 1024      # rows packed with documents of 1024 tokens: only ours
    python benchmarks/attention.py --heads 128 --kv-heads 128 --head-dim 192 --value-dim 128 --shapes 4x4096     # DeepSeek-V3's

TFLOP/s count only keys that a query attends to. With queries of width d and values of width e, the FLOPs are 2*B*H*N*(d+e)
forward and B*H*N*(8*d+6*e) with backward. N = S*S/2 pairs (S*documents/2 when packed). Times are the median of 5 groups of
`--launches` calls between two synchronisations, on random data. cuDNN is called through the function behind
`jax.nn.dot_product_attention(implementation="cudnn")`, which itself refuses values of another width than the keys.
"""

import argparse
import time

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo
from timing import median_ms

from moe_jax.kernels.attention.mosaic.flash import flash_attention


def main() -> None:
    """Prints a row for each shape and system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["8x4096", "4x8192", "1x32768"], help="batch x tokens")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128, help="width of queries and keys")
    parser.add_argument("--value-dim", type=int, help="width of values; default: that of the keys")
    parser.add_argument("--documents", type=int, help="tokens of each document; default: a row is one document")
    parser.add_argument("--window", type=int)
    parser.add_argument("--launches", type=int, default=10)
    args = parser.parse_args()
    args.value_dim = args.value_dim or args.head_dim
    widths = f"{args.heads} heads on {args.kv_heads} of {args.head_dim} and {args.value_dim}"
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bf16, {widths}")
    print(f"{'shape':>10} {'system':>8} {'forward ms':>11} {'TFLOP/s':>8} {'both ms':>9} {'TFLOP/s':>8}", flush=True)
    for shape in args.shapes:
        batch, tokens = map(int, shape.split("x"))
        documents = args.documents or tokens
        segment_ids = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32) // documents, (batch, tokens))
        scale = args.head_dim**-0.5

        def ours(q, k, v, segment_ids=segment_ids, scale=scale):
            return flash_attention(q, k, v, scale=scale, segment_ids=segment_ids, window=args.window)[0]

        def cudnn(q, k, v, scale=scale):
            causal = fused_attention_stablehlo.MaskType.CAUSAL
            return fused_attention_stablehlo.dot_product_attention(q, k, v, scale=scale, mask_type=causal)

        systems = {"moe_jax": ours}
        # JAX's cuDNN attention supports neither documents nor a causal window.
        if args.documents is None and args.window is None:
            systems["cudnn"] = cudnn
        window = min(args.window or documents, documents)
        pairs = batch * args.heads * tokens * (window - window**2 / documents / 2)
        forward_flops = 2 * pairs * (args.head_dim + args.value_dim)
        both_flops = forward_flops + pairs * (6 * args.head_dim + 4 * args.value_dim)
        for name, attention in systems.items():
            forward_ms, both_ms = measure(attention, batch, tokens, args)
            print(
                f"{shape:>10} {name:>8} {forward_ms:>11.3f} {forward_flops / forward_ms / 1e9:>8.0f} "
                f"{both_ms:>9.3f} {both_flops / both_ms / 1e9:>8.0f}",
                flush=True,
            )


def measure(attention, batch: int, tokens: int, args: argparse.Namespace) -> tuple[float, float]:
    """Returns the milliseconds of a forward pass, and of a forward pass with the gradients to q, k and v."""
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 4)
    q, k, v, dy = (
        jax.random.normal(key, (batch, tokens, heads, width), jnp.bfloat16)
        for key, heads, width in zip(
            keys,
            (args.heads, args.kv_heads, args.kv_heads, args.heads),
            (args.head_dim, args.head_dim, args.value_dim, args.value_dim),
            strict=True,
        )
    )

    def both(q, k, v, dy):
        y, backward = jax.vjp(attention, q, k, v)
        return y, backward(dy)

    return median_ms(jax.jit(attention), (q, k, v), args.launches), median_ms(jax.jit(both), (q, k, v, dy), args.launches)


if __name__ == "__main__":
    main()
