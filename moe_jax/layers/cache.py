"""The cache for autoregressive decoding: keys and values of earlier tokens, or the latents that they are expanded from.

Recurrent layers keep a state for each sequence instead.
"""

from collections import Counter
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.config import ModelConfig
from moe_jax.kernels.shapes import vary_as


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values, or latents, of at most `max_length` tokens per sequence. Tokens beyond that overwrite the last ones.

    An empty cache has a different pytree structure (`written` is None), so `jax.jit` compiles prefill and decode separately.
    A `lax` loop cannot turn one structure into the other: start it with `replace(cache, written=jnp.int32(0))`.

    Attributes:
      kept: the arrays that layers keep for each token (`Mixer.of_token`): rotated keys and values, or the latents for both.
        Tokens from `length` on are unused.
      segment_ids: the cached tokens' segments; 0 (padding, unused rows) is seen by no token of a document.
      written: number of tokens in the cache, the same for every sequence: shorter prompts are padded on the left. None: no
        token has been written yet.
      states: the arrays (f32) that recurrent layers keep for each sequence after its last token.
    """

    kept: tuple[Float[Array, "token_layers batch max_length ..."], ...]
    segment_ids: Int[Array, "batch max_length"]
    written: Int[Array, ""] | None
    states: tuple[Float[Array, "recurrent_layers batch ..."], ...] = ()

    @property
    def is_empty(self) -> bool:
        """True until the first token is written."""
        return self.written is None

    @property
    def length(self) -> Int[Array, ""] | int:
        """Number of tokens in the cache."""
        return 0 if self.written is None else self.written

    def with_segments(self, segment_ids: Int[Array, "batch seq"]) -> "KVCache":
        """Appends the segment ids of new tokens. `length` changes only in `advanced`."""
        # Default segments have the tokens' dtype.
        ids = segment_ids.astype(self.segment_ids.dtype)
        segments = lax.dynamic_update_slice(self.segment_ids, ids, (0, self.length))
        # Inside `jax.shard_map` the rows vary over devices like the tokens.
        kept, states = vary_as((self.kept, self.states), segment_ids)
        return replace(self, kept=kept, states=states, segment_ids=segments)

    def write(self, layer: Int[Array, ""], kept: tuple[Float[Array, "batch seq ..."], ...]) -> "KVCache":
        """Writes one layer's new keys and values. `length` changes only in `advanced`.

        Here and below, `layer` is a row of `cache_rows`.
        """

        def put(all_layers: Array, tokens: Array) -> Array:
            start: list[Array | int] = [layer, 0, self.length, *[0] * (tokens.ndim - 2)]
            return lax.dynamic_update_slice(all_layers, tokens[None].astype(all_layers.dtype), start)

        return replace(self, kept=tuple(map(put, self.kept, kept)))

    def read(self, layer: Int[Array, ""], dtype: DTypeLike) -> tuple[Float[Array, "batch max_length ..."], ...]:
        """Returns the keys and values of all tokens of a layer, cast to `dtype`."""
        return tuple(lax.dynamic_index_in_dim(a, layer, keepdims=False).astype(dtype) for a in self.kept)

    def write_states(self, layer: Int[Array, ""], states: tuple[Float[Array, "batch ..."], ...]) -> "KVCache":
        """Overwrites a recurrent layer's states with the states after the new tokens."""
        put = lax.dynamic_update_index_in_dim
        pairs = zip(self.states, states, strict=True)
        return replace(self, states=tuple(put(rows, new.astype(rows.dtype), layer, 0) for rows, new in pairs))

    def read_states(self, layer: Int[Array, ""]) -> tuple[Float[Array, "batch ..."], ...]:
        """Returns a recurrent layer's states after the cached tokens; zeros for an empty cache."""
        return tuple(lax.dynamic_index_in_dim(rows, layer, keepdims=False) for rows in self.states)

    def advanced(self, num_tokens: int) -> "KVCache":
        """Returns the cache with `length` increased by `num_tokens`; call it after all layers have written."""
        return replace(self, written=jnp.asarray(self.length + num_tokens, jnp.int32))


def init_cache(config: ModelConfig, batch: int, max_length: int, dtype: DTypeLike) -> KVCache:
    """Allocates an empty cache: per layer and sequence, max_length * (sizes of `Mixer.of_token`) elements of `dtype`.

    A recurrent layer has (sizes of `Mixer.of_sequence`) numbers in f32 instead.
    """
    kept: list[Array] = []
    states: list[Array] = []
    counts = Counter((mixer.of_token, mixer.of_sequence) for mixer in config.layer_mixers)
    for (of_token, of_sequence), layers in counts.items():
        kept += [jnp.zeros((layers, batch, max_length, *shape), dtype) for shape in of_token]
        states += [jnp.zeros((layers, batch, *shape), jnp.float32) for shape in of_sequence]
    return KVCache(tuple(kept), jnp.zeros((batch, max_length), jnp.int32), None, tuple(states))


def cache_rows(config: ModelConfig) -> list[int]:
    """Returns each layer's index in the stacked arrays of the cache."""
    kept = [(mixer.of_token, mixer.of_sequence) for mixer in config.layer_mixers]
    return [kept[:layer].count(own) for layer, own in enumerate(kept)]


def join_rows(first: KVCache, second: KVCache) -> KVCache:
    """Concatenates two caches of equal length and capacity along the batch axis."""
    kept, states = jax.tree.map(
        lambda *pair: jnp.concatenate(pair, axis=1), (first.kept, first.states), (second.kept, second.states)
    )
    return KVCache(kept, jnp.concatenate([first.segment_ids, second.segment_ids]), first.written, states)
