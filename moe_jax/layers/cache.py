"""What later tokens need of earlier ones, for decoding one token after the other: keys and values, or their latents."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Room for `max_length` tokens of every sequence in every layer. What is written beyond overwrites the last ones.

    An empty cache is another pytree than one with tokens in it: that it is empty is known while compiling, of an argument of
    `jax.jit` too. A `lax` loop, which cannot turn one into the other, may begin with `replace(cache, written=jnp.int32(0))`.

    Attributes:
      kept: what the layers keep of each token, `ModelConfig.cache_shapes`: rotated keys, and values, or what both are made of;
        rows from `length` on are unused.
      segment_ids: the cached tokens' segments; 0 (padding, unused rows) is seen by no token of a document.
      written: how many tokens are in, the same for every sequence: shorter prompts are padded on the left; None: none yet.
    """

    kept: tuple[Float[Array, "layers batch max_length ..."], ...]
    segment_ids: Int[Array, "batch max_length"]
    written: Int[Array, ""] | None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written yet."""
        return self.written is None

    @property
    def length(self) -> Int[Array, ""] | int:
        """How many tokens are in."""
        return 0 if self.written is None else self.written

    def write(self, layer: Int[Array, ""], kept: tuple[Float[Array, "batch seq ..."], ...]) -> "KVCache":
        """These tokens behind those of the layer that are in; `length` stays."""

        def put(all_layers: Array, tokens: Array) -> Array:
            start: list[Array | int] = [layer, 0, self.length, *[0] * (tokens.ndim - 2)]
            return lax.dynamic_update_slice(all_layers, tokens[None].astype(all_layers.dtype), start)

        return replace(self, kept=tuple(map(put, self.kept, kept)))

    def read(self, layer: Int[Array, ""], dtype: DTypeLike) -> tuple[Float[Array, "batch max_length ..."], ...]:
        """All rows of the layer."""
        return tuple(lax.dynamic_index_in_dim(a, layer, keepdims=False).astype(dtype) for a in self.kept)


def init_cache(config: ModelConfig, batch: int, max_length: int, dtype: DTypeLike) -> KVCache:
    """An empty cache: layers * batch * max_length * (the sum of the sizes of `config.cache_shapes`) numbers of `dtype`."""
    rows = config.num_hidden_layers, batch, max_length
    kept = tuple(jnp.zeros((*rows, *shape), dtype) for shape in config.cache_shapes)
    return KVCache(kept, jnp.zeros((batch, max_length), jnp.int32), written=None)
