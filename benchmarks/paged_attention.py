"""Times attention to keys and values in pages: decoding rows by TB/s of pages read, chunks of prompts by TFLOP/s.

    python benchmarks/paged_attention.py             # 32 heads, 4 key heads of 128, as Qwen3-30B-A3B has them
    python benchmarks/paged_attention.py --windows   # the same, with sliding windows
    python benchmarks/paged_attention.py --prompts   # chunks of several prompts
    python benchmarks/paged_attention.py --latents   # 16, 64 and 128 heads that read DeepSeek's latents, and drafts: the kernel
    python benchmarks/paged_attention.py --small     # sizes for a CPU's interpreter, as a smoke test

Pages lie in random places. The error is the largest difference from the op in f32, relative to the largest result. A time is
that of CALLS calls in one program, divided by CALLS. Bytes count whole pages, from a window's first key on, once for all heads.
"""

import argparse
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from timing import median_ms

from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries, paged_attention

DECODING = [(rows, keys) for keys in (128, 1024, 4096, 8192) for rows in (1, 16, 64, 256) if rows * keys <= 2**20]
PROMPTS = [(0, 2, 4096, 0), (0, 8, 1024, 0), (0, 8, 1024, 7168)]
PROMPTS += [(0, 1, chunk, before) for before in (0, 8192) for chunk in (512, 2048, 8192)]
PROMPTS += [(192, 1, 512, before) for before in (1024, 4096)]
"""Rows that decode beside chunks, chunks, their tokens, and the keys before each."""

WINDOWS = [(rows, 8192, window) for window in (128, 1024, 4096) for rows in (1, 16, 64, 128)]

LATENTS = [(1, 8192), (16, 8192), (64, 1024), (64, 8192), (128, 4096), (256, 1024), (256, 4096)]

CALLS = 8

MOST_CHECKED_KEYS = 2**16
"""Keys of all rows up to which a case is compared with the op in f32, which takes much memory."""

MOST_CHECKED_PAIRS = 2**23
"""Pairs of a query and a key up to which chunks are compared."""


class Sizes(NamedTuple):
    """The heads of a model."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    has_values: bool = True
    """False: values are the first columns of the keys."""


def main() -> None:
    """Prints a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--windows", action="store_true", help="decoding rows whose layers have sliding windows")
    parser.add_argument(
        "--latents", action="store_true", help="latents of 512 columns and 64 rotary ones instead of keys and values"
    )
    parser.add_argument("--prompts", action="store_true", help="chunks of several prompts")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU's interpreter")
    args = parser.parse_args()
    sizes = Sizes(args.heads, args.kv_heads, args.head_dim, args.head_dim)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    if args.latents:
        for heads in (16, 64, 128):
            print(f"{heads} heads, latents of 512 + 64")
            sizes = Sizes(heads, 1, 576, 512, has_values=False)
            for rows, keys in [(2, 130)] if args.small else LATENTS:
                decode(sizes, rows, keys)
            decode(sizes, *((2, 130) if args.small else (64, 8192)), queries=3)
        return
    print(f"{sizes.heads} heads, {sizes.kv_heads} key heads of {sizes.key_dim}")
    if args.prompts:
        chunks_of_prompts(sizes, args)
        return
    if args.windows:
        for rows, keys, window in [(2, 300, 100)] if args.small else WINDOWS:
            decode(sizes, rows, keys, window=window)
        return
    for rows, keys in [(2, 130)] if args.small else DECODING:
        decode(sizes, rows, keys)
    chunks_of_prompts(sizes, args)


def chunks_of_prompts(sizes: Sizes, args: argparse.Namespace) -> None:
    """Prints the error and the time of chunks of prompts. TFLOP/s do not count the rows that decode beside them."""
    for rows, chunks, tokens, before in [(2, 2, 20, 64)] if args.small else PROMPTS:
        num_keys = [before] * rows + [before + tokens] * chunks
        case = Case(sizes, [1] * rows + [tokens] * chunks, num_keys, single_query_rows=rows)
        error = f"{case.error():.1e}" if sum(num_keys) * tokens <= MOST_CHECKED_PAIRS else "-"
        flops, ms = chunks * tokens * (before + tokens / 2) * flops_of_pair(sizes), case.ms()
        name = f"{chunks} x {tokens:>4} behind {before:>4}" + (f" beside {rows} rows" if rows else "")
        print(f"{name:<30} error {error:>7} {1e3 * ms:>9.1f} us {flops / ms / 1e9:>6.0f} TFLOP/s", flush=True)


def flops_of_pair(sizes: Sizes) -> int:
    """Returns the operations of one query and one key."""
    return 2 * sizes.heads * (sizes.key_dim + sizes.value_dim)


def decode(sizes: Sizes, rows: int, keys: int, *, window: int | None = None, queries: int = 1) -> None:
    """Prints the error and the time of `queries` queries in each row, of which the last ones are drafts."""
    case = Case(sizes, [queries] * rows, [keys] * rows, window=window, single_query_rows=rows if queries == 1 else 0)
    error = f"{case.error():.1e}" if rows * keys <= MOST_CHECKED_KEYS else "-"
    ms = case.ms()
    pages = -(-keys // PAGE_SIZE) - (0 if window is None else max(keys - window, 0) // PAGE_SIZE)
    name = f"{rows:>4} rows x {keys:>5} keys" + ("" if window is None else f", window {window:>4}")
    name += "" if queries == 1 else f", {queries} queries"
    rate = rows * pages * case.bytes_per_page / ms / 1e9
    flops = rows * queries * min(keys, window or keys) * flops_of_pair(sizes) / ms / 1e9
    print(f"{name}   error {error:>7} {1e3 * ms:>9.1f} us {rate:>6.2f} TB/s {flops:>5.0f} TFLOP/s", flush=True)


class Case:
    """Random queries, and pages of keys and values in random places."""

    def __init__(
        self,
        sizes: Sizes,
        counts: list[int],
        num_keys: list[int],
        *,
        window: int | None = None,
        single_query_rows: int,
    ):
        rng = np.random.default_rng(0)
        per_row = [-(-n // PAGE_SIZE) for n in num_keys]
        order, table = rng.permutation(sum(per_row)) + 1, np.zeros((len(counts), max(per_row)), np.int32)
        for row, (count, end) in enumerate(zip(per_row, np.cumsum(per_row), strict=True)):
            table[row, :count] = order[end - count : end]

        def normal(seed: int, *shape: int) -> jax.Array:
            return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

        of_page = 1 + sum(per_row), sizes.kv_heads, PAGE_SIZE
        self.q = normal(0, sum(counts), sizes.heads, sizes.key_dim)
        self.pages = normal(1, *of_page, sizes.key_dim), normal(2, *of_page, sizes.value_dim) if sizes.has_values else None
        self.bytes_per_page = sum(a[0].nbytes for a in jax.tree.leaves(self.pages))
        first = np.concatenate([[0], np.cumsum(counts)])
        self.queries = PagedQueries(*(jnp.asarray(a, jnp.int32) for a in (first, num_keys, table)))
        self.options = dict(scale=sizes.key_dim**-0.5, window=window, single_query_rows=single_query_rows)
        if not sizes.has_values:
            self.options |= {"value_dim": sizes.value_dim, "backend": "mosaic"}

    def ms(self) -> float:
        """Returns the milliseconds of a call."""

        @jax.jit
        def run(q, pages, queries):
            results = []
            for _ in range(CALLS):
                out = paged_attention(q, *pages, queries, **self.options)
                # The next call waits for this one, and is not the same to XLA.
                q, out = jax.lax.optimization_barrier((q, out))
                # XLA leaves out a call whose result is not returned.
                results.append(out)
            return results

        return median_ms(run, (self.q, self.pages, self.queries), 20) / CALLS

    def error(self) -> float:
        """Returns the relative error."""
        found = paged_attention(self.q, *self.pages, self.queries, **self.options).astype(jnp.float32)
        q, pages = jax.tree.map(lambda a: a.astype(jnp.float32), (self.q, self.pages))
        expected = paged_attention(q, *pages, self.queries, **self.options | {"backend": "xla"})
        return float(jnp.abs(found - expected).max() / jnp.abs(expected).max())


if __name__ == "__main__":
    main()
