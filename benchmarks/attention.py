"""Times attention on one GPU: a training step's, to keys and values in pages, and the prefill of a cache.

    python benchmarks/attention.py                                 # causal, forward and backward, compared with cuDNN's
    python benchmarks/attention.py --shapes 8x4096 --documents 1024     # rows packed with documents of 1024 tokens: only ours
    python benchmarks/attention.py --heads 128 --kv-heads 128 --head-dim 192 --value-dim 128 --shapes 4x4096   # DeepSeek-V3's
    python benchmarks/attention.py paged                           # 32 heads, 4 key heads of 128, as Qwen3-30B-A3B has them
    python benchmarks/attention.py paged --kinds windows           # the same, with sliding windows
    python benchmarks/attention.py paged --kv-dtype fp8            # keys and values in FP8
    python benchmarks/attention.py paged --kinds latents           # 16, 64 and 128 heads read DeepSeek's latents, and drafts
    python benchmarks/attention.py prefill                         # 4 layers of DeepSeek-V3, bf16: about 30 GiB of weights
    python benchmarks/attention.py prefill --config qwen3-30b-a3b --layers 8 --shapes 8x4096 1x32768

Attention over a sequence split over several GPUs is in `parallel_layer.py`.

`training`: TFLOP/s count only keys that a query attends to. With queries of width d and values of width e, the FLOPs are
2*B*H*N*(d+e) forward and B*H*N*(8*d+6*e) with backward. N = S*S/2 pairs (S*documents/2 when packed). Times are the median of 5
groups of `--launches` calls between two synchronisations, on random data. cuDNN is called through the function underneath
`jax.nn.dot_product_attention(implementation="cudnn")`, which itself refuses values of another width than the keys.

`paged`: pages are in random places. The error is the largest difference from the op in f32, relative to the largest result. A
time is that of CALLS calls in one program, divided by CALLS. Bytes count whole pages, from a window's first key on, once for
all heads. Decoding rows have TB/s of pages read. TFLOP/s of chunks of prompts do not count the rows that decode next to them.

`prefill`: *empty* is generation's way: the prompt attends to itself by `kernels.attention`, and the cache is written. *any*
attends to all rows of the cache in XLA, as later tokens do. *no cache* is the forward pass alone. All have the same random
weights and tokens and `--room` further rows in the cache, and end with the last token's logits. Times are medians of `--runs`
calls after a first call. *peak* is the memory of a call with weights and cache, as the compiler reports it. First the hidden
states and caches of *empty* and *any* are compared for two prompts, one padded on the left: a difference is a failure.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from harness import Case, compiled, main, median_ms, median_s, one_of, program_gib, reason, relative_error
from inputs import config_of
from jax._src.cudnn import fused_attention_stablehlo

from moe_jax.config import NAMED_CONFIGS
from moe_jax.kernels.attention.mosaic.flash import flash_attention
from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries, paged_attention
from moe_jax.kernels.attention.paged.fp8 import FP8Pages, quantised, read
from moe_jax.layers.cache import KVCache, init_cache
from moe_jax.models.random_weights import random_model


@dataclass(kw_only=True)
class Training(Case):
    """A row for each shape and system."""

    shapes: tuple[str, ...] = ("8x4096", "4x8192", "1x32768")  # batch x tokens
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128  # width of queries and keys
    value_dim: int | None = None  # width of values; default: that of the keys
    documents: int | None = None  # tokens of each document; default: a row is one document
    window: int | None = None
    launches: int = 10

    SMALL = dict(shapes=("1x128",), heads=1, kv_heads=1, head_dim=64, launches=1)

    def results(self):
        """Yields the milliseconds of a forward pass, and of a forward pass with the gradients to q, k and v."""
        key_dim, value_dim = self.head_dim, self.value_dim or self.head_dim
        for shape in self.shapes:
            batch, tokens = map(int, shape.split("x"))
            documents = self.documents or tokens
            segment_ids = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32) // documents, (batch, tokens))
            scale = key_dim**-0.5

            def ours(q, k, v, segment_ids=segment_ids, scale=scale):
                return flash_attention(q, k, v, scale=scale, segment_ids=segment_ids, window=self.window)[0]

            def cudnn(q, k, v, scale=scale):
                causal = fused_attention_stablehlo.MaskType.CAUSAL
                return fused_attention_stablehlo.dot_product_attention(q, k, v, scale=scale, mask_type=causal)

            systems = {"moe_jax": ours}
            # JAX's cuDNN attention supports neither documents nor a causal window.
            if self.documents is None and self.window is None:
                systems["cudnn"] = cudnn
            window = min(self.window or documents, documents)
            pairs = batch * self.heads * tokens * (window - window**2 / documents / 2)
            forward_flops = 2 * pairs * (key_dim + value_dim)
            both_flops = forward_flops + pairs * (6 * key_dim + 4 * value_dim)
            for name, attention in systems.items():
                row = dict(shape=shape, system=name, forward_ms=None, forward_tflops=None, both_ms=None, both_tflops=None)
                try:
                    forward_ms, both_ms = self.times(attention, batch, tokens, (key_dim, value_dim))
                except Exception as error:
                    if name == "moe_jax":
                        raise
                    yield row | {"note": reason(error)}
                    continue
                row |= dict(forward_ms=forward_ms, forward_tflops=forward_flops / forward_ms / 1e9)
                yield row | dict(both_ms=both_ms, both_tflops=both_flops / both_ms / 1e9)

    def times(self, attention, batch: int, tokens: int, widths: tuple[int, int]) -> tuple[float, float]:
        """Returns the milliseconds of a forward pass, and of both passes."""
        keys, (key_dim, value_dim) = jax.random.split(jax.random.key(time.time_ns() % 2**31), 4), widths
        of_heads = (self.heads, key_dim), (self.kv_heads, key_dim), (self.kv_heads, value_dim), (self.heads, value_dim)
        q, k, v, dy = (
            jax.random.normal(key, (batch, tokens, *each), jnp.bfloat16) for key, each in zip(keys, of_heads, strict=True)
        )

        def both(q, k, v, dy):
            y, backward = jax.vjp(attention, q, k, v)
            return y, backward(dy)

        forward_ms = median_ms(jax.jit(attention), (q, k, v), self.launches)
        return forward_ms, median_ms(jax.jit(both), (q, k, v, dy), self.launches)


CALLS = 8

MOST_CHECKED_KEYS = 2**16
"""Keys of all rows up to which a case is compared with the op in f32, which takes much memory."""

MOST_CHECKED_PAIRS = 2**23
"""Pairs of a query and a key up to which chunks are compared."""

DECODING = [(rows, keys) for keys in (128, 1024, 4096, 8192) for rows in (1, 16, 64, 256) if rows * keys <= 2**20]
PROMPTS = [(0, 2, 4096, 0), (0, 8, 1024, 0), (0, 8, 1024, 7168)]
PROMPTS += [(0, 1, chunk, before) for before in (0, 8192) for chunk in (512, 2048, 8192)]
PROMPTS += [(192, 1, 512, before) for before in (1024, 4096)]
"""Rows that decode, chunks computed in the same call, their tokens, and the keys before each."""

WINDOWS = [(rows, 8192, window) for window in (128, 1024, 4096) for rows in (1, 16, 64, 128)]
LATENTS = [(1, 8192), (16, 8192), (64, 1024), (64, 8192), (128, 4096), (256, 1024), (256, 4096)]


class Heads(NamedTuple):
    """The heads of a model."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    has_values: bool = True
    """False: values are the first columns of the keys."""

    @property
    def flops_of_pair(self) -> int:
        """Returns the operations of one query and one key."""
        return 2 * self.heads * (self.key_dim + self.value_dim)


@dataclass(kw_only=True)
class Paged(Case):
    """A row for each number of rows and keys."""

    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    kinds: tuple[Literal["decoding", "prompts", "windows", "latents"], ...] = ("decoding", "prompts")
    kv_dtype: Literal["model", "fp8"] = "model"  # of the pages, but for latents

    SMALL = dict(heads=4, kv_heads=2)

    def results(self):
        """Yields the errors, times and rates."""
        heads = Heads(self.heads, self.kv_heads, self.head_dim, self.head_dim)
        small = self.small
        if "decoding" in self.kinds:
            for rows, keys in [(2, 130)] if small else DECODING:
                yield self.decode(heads, rows, keys)
        if "windows" in self.kinds:
            for rows, keys, window in [(2, 300, 100)] if small else WINDOWS:
                yield self.decode(heads, rows, keys, window=window)
        if "latents" in self.kinds:
            for number in (16,) if small else (16, 64, 128):
                latents = Heads(number, 1, 576, 512, has_values=False)
                for rows, keys in [(2, 130)] if small else LATENTS:
                    yield self.decode(latents, rows, keys)
                yield self.decode(latents, *((2, 130) if small else (64, 8192)), queries=3)
        if "prompts" in self.kinds:
            for case in [(2, 2, 20, 64)] if small else PROMPTS:
                yield self.prompts(heads, *case)

    def decode(self, heads: Heads, rows: int, keys: int, *, window: int | None = None, queries: int = 1) -> dict:
        """Returns the row of `queries` queries in each of `rows` rows; the last ones are drafts."""
        in_fp8, single = self.kv_dtype == "fp8" and heads.has_values, rows if queries == 1 else 0
        pages = Pages(heads, [queries] * rows, [keys] * rows, window=window, single_query_rows=single, in_fp8=in_fp8)
        error = pages.error() if rows * keys <= MOST_CHECKED_KEYS else None
        ms = pages.ms(1 if self.small else 20)
        read = -(-keys // PAGE_SIZE) - (0 if window is None else max(keys - window, 0) // PAGE_SIZE)
        flops = rows * queries * min(keys, window or keys) * heads.flops_of_pair
        row = dict(heads=heads.heads, rows=rows, keys=keys, window=window, queries=queries, error=error, us=1e3 * ms)
        return row | dict(tb_per_s=rows * read * pages.bytes_per_page / ms / 1e9, tflops=flops / ms / 1e9)

    def prompts(self, heads: Heads, rows: int, chunks: int, tokens: int, before: int) -> dict:
        """Returns the row of some chunks of prompts."""
        num_keys = [before] * rows + [before + tokens] * chunks
        in_fp8 = self.kv_dtype == "fp8"
        pages = Pages(heads, [1] * rows + [tokens] * chunks, num_keys, single_query_rows=rows, in_fp8=in_fp8)
        error = pages.error() if sum(num_keys) * tokens <= MOST_CHECKED_PAIRS else None
        flops, ms = chunks * tokens * (before + tokens / 2) * heads.flops_of_pair, pages.ms(1 if self.small else 20)
        row = dict(heads=heads.heads, chunks=chunks, tokens=tokens, keys_before=before, decoding_rows=rows, error=error)
        return row | dict(us=1e3 * ms, tflops=flops / ms / 1e9)


class Pages:
    """Random queries, and pages of keys and values in random places."""

    def __init__(
        self,
        heads: Heads,
        counts: list[int],
        num_keys: list[int],
        *,
        window: int | None = None,
        single_query_rows: int,
        in_fp8: bool = False,
    ):
        rng = np.random.default_rng(0)
        per_row = [-(-n // PAGE_SIZE) for n in num_keys]
        order, table = rng.permutation(sum(per_row)) + 1, np.zeros((len(counts), max(per_row)), np.int32)
        for row, (count, end) in enumerate(zip(per_row, np.cumsum(per_row), strict=True)):
            table[row, :count] = order[end - count : end]

        def normal(seed: int, *shape: int) -> jax.Array:
            return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

        of_page = 1 + sum(per_row), heads.kv_heads, PAGE_SIZE
        self.q = normal(0, sum(counts), heads.heads, heads.key_dim)
        self.pages = normal(1, *of_page, heads.key_dim), normal(2, *of_page, heads.value_dim) if heads.has_values else None
        if in_fp8:
            self.pages = tuple(FP8Pages(*jax.jit(quantised)(pages)) for pages in self.pages)
        self.bytes_per_page = sum(a[0].nbytes for a in jax.tree.leaves(self.pages))
        first = np.concatenate([[0], np.cumsum(counts)])
        self.queries = PagedQueries(*(jnp.asarray(a, jnp.int32) for a in (first, num_keys, table)))
        self.options = dict(scale=heads.key_dim**-0.5, window=window, single_query_rows=single_query_rows)
        if not heads.has_values:
            self.options |= {"value_dim": heads.value_dim, "backend": "mosaic"}

    def ms(self, launches: int) -> float:
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

        return median_ms(run, (self.q, self.pages, self.queries), launches) / CALLS

    def error(self) -> float:
        """Returns the relative error."""
        found = paged_attention(self.q, *self.pages, self.queries, **self.options).astype(jnp.float32)
        every = jnp.arange(self.pages[0].shape[0])
        pages = [None if pages is None else read(pages, every, jnp.float32) for pages in self.pages]
        expected = paged_attention(self.q.astype(jnp.float32), *pages, self.queries, **self.options | {"backend": "xla"})
        return float(jnp.abs(found - expected).max() / jnp.abs(expected).max())


TOLERANCE = {"bfloat16": 5e-2, "float32": 1e-5}
"""Largest accepted difference of hidden states and caches, relative in the Frobenius norm."""


@dataclass(kw_only=True)
class Prefill(Case):
    """A row for each shape and system."""

    config: one_of(NAMED_CONFIGS) = "deepseek-v3"
    layers: int = 4  # the first three of DeepSeek-V3 are dense
    shapes: tuple[str, ...] = ("4x4096", "1x16384")  # batch x tokens of a prompt
    room: int = 64  # rows of the cache for tokens to come
    runs: int = 5
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    systems: tuple[Literal["empty", "any", "no cache"], ...] = ("empty", "any", "no cache")

    SMALL = dict(dtype="float32", layers=4, shapes=("2x200",), runs=2)

    def results(self):
        """Yields times and memory for prompts of each shape; no time if the device's memory is too small."""
        self.of_model = config_of(self.config, small=self.small, layers=self.layers).without_mtp()
        self.graph, weights = nnx.split(random_model(self.of_model, jnp.dtype(self.dtype)))
        difference = self.difference(weights)
        # A comparison with NaN is false.
        failure = {} if difference < TOLERANCE[self.dtype] else {"failure": "empty and any differ"}
        for shape in self.shapes:
            for system in self.systems:
                row = dict(prompts=shape, cache=system, tokens_per_s=None, ms=None, peak_gib=None, difference=difference)
                yield row | self.measure(system, weights, shape) | failure

    def measure(self, system: str, weights, shape: str) -> dict:
        """Returns times and memory for prompts of one shape."""
        batch, tokens = map(int, shape.split("x"))
        prompts = jax.random.randint(jax.random.key(0), (batch, tokens), 0, self.of_model.vocab_size)

        def prefill(weights, prompts):
            model = nnx.merge(self.graph, weights)
            cache = None if system == "no cache" else self.cache(system, batch, tokens + self.room, model.dtype)
            states = model.hidden_states(prompts, positions_of(jnp.ones_like(prompts)), cache=cache)
            return jnp.einsum("bd,vd->bv", states.hidden[:, -1], model.head_weight.astype(model.dtype)), states.cache

        found = {}
        try:
            run, _ = compiled(prefill, weights, prompts)
            found["peak_gib"] = program_gib(run)
            seconds = median_s(partial(run, weights, prompts), self.runs)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return found | {"note": "out of memory"}
        return found | {"tokens_per_s": batch * tokens / seconds, "ms": 1e3 * seconds}

    def cache(self, system: str, batch: int, rows: int, dtype) -> KVCache:
        """Returns an empty cache; for system "any" the compiler does not know that it is empty."""
        cache = init_cache(self.of_model, batch, rows, dtype)
        return replace(cache, written=jnp.int32(0)) if system == "any" else cache

    def difference(self, weights) -> float:
        """Returns the largest relative difference (Frobenius norm) of hidden states and of each layer's cache entries.

        The prompts have 600 and 500 tokens; both systems use the same experts.
        """
        tokens = jax.random.randint(jax.random.key(1), (2, 600), 0, self.of_model.vocab_size)
        segment_ids = (jnp.arange(600) >= jnp.array([[0], [100]])).astype(jnp.int32)

        @partial(jax.jit, static_argnums=0)
        def run(system, weights, expert_ids):
            model, cache = nnx.merge(self.graph, weights), self.cache(system, 2, 640, jnp.dtype(self.dtype))
            options = dict(cache=cache, expert_ids=expert_ids)
            states = model.hidden_states(tokens, positions_of(segment_ids), segment_ids, **options)
            layers = [of_layer[:, :600] for of_all in states.cache.kept for of_layer in of_all]
            valid = [jnp.where((segment_ids != 0)[..., None], a.reshape(2, 600, -1), 0) for a in (states.hidden, *layers)]
            return valid, states.expert_ids

        first, chosen = run("empty", weights, None)
        second, _ = run("any", weights, chosen)
        # Python's max would ignore NaN.
        return float(jnp.stack([relative_error(a, b) for a, b in zip(first, second, strict=True)]).max())


def positions_of(segment_ids):
    """Returns the index of each token in its prompt."""
    return jnp.maximum(jnp.cumsum(segment_ids, axis=1) - 1, 0)


CASES = {"training": Training, "paged": Paged, "prefill": Prefill}

if __name__ == "__main__":
    main(__doc__, CASES)
