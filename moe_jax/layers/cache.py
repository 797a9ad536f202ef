"""The KV cache for decoding one token after the other: keys and values of earlier tokens, or the latents they come from."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.config import ModelConfig
from moe_jax.kernels.varying import vary_as


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Room for `max_length` tokens of every sequence in every layer. Tokens beyond that overwrite the last ones.

    An empty cache has a different pytree structure (`written` is None), so `jax.jit` compiles prefill and decode separately.
    A `lax` loop cannot turn one structure into the other: start it with `replace(cache, written=jnp.int32(0))`.

    Attributes:
      kept: the arrays that layers keep of each token (`ModelConfig.cache_shapes`): rotated keys, and values, or the latents
        that both are made from. Rows from `length` on are unused.
      segment_ids: the cached tokens' segments; 0 (padding, unused rows) is seen by no token of a document.
      written: number of tokens in the cache, the same for every sequence (shorter prompts are padded on the left); None: no
        token was written yet.
    """

    kept: tuple[Float[Array, "layers batch max_length ..."], ...]
    segment_ids: Int[Array, "batch max_length"]
    written: Int[Array, ""] | None

    @property
    def is_empty(self) -> bool:
        """True until the first token is written."""
        return self.written is None

    @property
    def length(self) -> Int[Array, ""] | int:
        """Number of tokens in the cache."""
        return 0 if self.written is None else self.written

    def with_segments(self, segment_ids: Int[Array, "batch seq"]) -> "KVCache":
        """Writes the segments of new tokens behind the earlier tokens' segments; `length` stays (see `advanced`)."""
        # Segments that a call made itself have the tokens' dtype.
        ids = segment_ids.astype(self.segment_ids.dtype)
        segments = lax.dynamic_update_slice(self.segment_ids, ids, (0, self.length))
        # Inside `jax.shard_map` the rows vary over the devices as the tokens do.
        return replace(self, kept=vary_as(self.kept, segment_ids), segment_ids=segments)

    def write(self, layer: Int[Array, ""], kept: tuple[Float[Array, "batch seq ..."], ...]) -> "KVCache":
        """Writes one layer's new tokens behind its earlier ones; `length` stays (see `advanced`)."""

        def put(all_layers: Array, tokens: Array) -> Array:
            start: list[Array | int] = [layer, 0, self.length, *[0] * (tokens.ndim - 2)]
            return lax.dynamic_update_slice(all_layers, tokens[None].astype(all_layers.dtype), start)

        return replace(self, kept=tuple(map(put, self.kept, kept)))

    def read(self, layer: Int[Array, ""], dtype: DTypeLike) -> tuple[Float[Array, "batch max_length ..."], ...]:
        """Returns all rows of the layer as `dtype`."""
        return tuple(lax.dynamic_index_in_dim(a, layer, keepdims=False).astype(dtype) for a in self.kept)

    def advanced(self, num_tokens: int) -> "KVCache":
        """Counts `num_tokens` more tokens per sequence, after every layer has written them."""
        return replace(self, written=jnp.asarray(self.length + num_tokens, jnp.int32))


def init_cache(config: ModelConfig, batch: int, max_length: int, dtype: DTypeLike) -> KVCache:
    """Makes an empty cache: layers * batch * max_length * (sum of the sizes of `config.cache_shapes`) numbers of `dtype`."""
    rows = config.num_hidden_layers, batch, max_length
    kept = tuple(jnp.zeros((*rows, *shape), dtype) for shape in config.cache_shapes)
    return KVCache(kept, jnp.zeros((batch, max_length), jnp.int32), written=None)


def join_rows(first: KVCache, second: KVCache) -> KVCache:
    """Returns one cache with the sequences of both, which hold equally many tokens and have equal room."""
    kept = tuple(jnp.concatenate(pair, axis=1) for pair in zip(first.kept, second.kept, strict=True))
    return KVCache(kept, jnp.concatenate([first.segment_ids, second.segment_ids]), first.written)
