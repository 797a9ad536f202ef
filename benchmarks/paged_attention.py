"""Times attention to keys and values in pages: decoding rows by TB/s of keys and values, chunks of prompts by TFLOP/s.

    python benchmarks/paged_attention.py             # 32 heads, 4 key heads of 128, as Qwen3-30B-A3B has them
    python benchmarks/paged_attention.py --small     # sizes for a CPU's interpreter, as a smoke test

Pages lie in random places. The error is the largest difference from the op in f32, relative to the largest result.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from timing import median_ms

from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries, paged_attention

DECODING = [(rows, keys) for keys in (128, 1024, 4096, 8192) for rows in (1, 16, 64, 256) if rows * keys <= 2**20]
CHUNKS = [(chunk, before) for before in (0, 8192) for chunk in (512, 2048, 8192)]


def main() -> None:
    """Prints a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU's interpreter")
    args = parser.parse_args()
    sizes = args.heads, args.kv_heads, args.head_dim
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {sizes[0]} heads, {sizes[1]} key heads of {sizes[2]}")
    for rows, keys in [(2, 130)] if args.small else DECODING:
        case = Case(sizes, [1] * rows, [keys] * rows)
        ms = case.ms(queries_per_row=1)
        num_bytes = 2 * 2 * rows * keys * sizes[1] * sizes[2]
        error = case.error() if rows * keys <= 2**16 else float("nan")
        print(
            f"{rows:>4} rows x {keys:>5} keys {1e3 * ms:>9.1f} us {num_bytes / ms / 1e9:>6.2f} TB/s   error {error:.1e}",
            flush=True,
        )
    for chunk, before in [(20, 64)] if args.small else CHUNKS:
        case = Case(sizes, [chunk], [before + chunk])
        ms = case.ms()
        flops = 4 * sizes[0] * sizes[2] * chunk * (before + chunk / 2)
        print(f"chunk of {chunk:>5} behind {before:>5} {1e3 * ms:>9.1f} us {flops / ms / 1e9:>6.0f} TFLOP/s", flush=True)


class Case:
    """Random queries, and pages of keys and values in random places."""

    def __init__(self, sizes: tuple[int, int, int], counts: list[int], num_keys: list[int]):
        heads, kv_heads, head_dim = sizes
        rng = np.random.default_rng(0)
        per_row = [-(-n // PAGE_SIZE) for n in num_keys]
        order, table = rng.permutation(sum(per_row)) + 1, np.zeros((len(counts), max(per_row)), np.int32)
        for row, (count, end) in enumerate(zip(per_row, np.cumsum(per_row), strict=True)):
            table[row, :count] = order[end - count : end]

        def normal(seed: int, *shape: int) -> jax.Array:
            return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

        pages = 1 + sum(per_row), kv_heads, PAGE_SIZE, head_dim
        self.q, self.keys, self.values = normal(0, sum(counts), heads, head_dim), normal(1, *pages), normal(2, *pages)
        first = np.concatenate([[0], np.cumsum(counts)])
        self.queries = PagedQueries(*(jnp.asarray(a, jnp.int32) for a in (first, num_keys, table)))
        self.scale = head_dim**-0.5

    def ms(self, **options) -> float:
        """Returns the milliseconds of a call."""
        run = jax.jit(partial(paged_attention, scale=self.scale, **options))
        return median_ms(run, (self.q, self.keys, self.values, self.queries), 20)

    def error(self) -> float:
        """Returns the relative error."""
        arrays = self.q, self.keys, self.values
        found = paged_attention(*arrays, self.queries, scale=self.scale).astype(jnp.float32)
        wide = (a.astype(jnp.float32) for a in arrays)
        expected = paged_attention(*wide, self.queries, scale=self.scale, backend="xla")
        return float(jnp.abs(found - expected).max() / jnp.abs(expected).max())


if __name__ == "__main__":
    main()
