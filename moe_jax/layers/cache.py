"""The keys and values of earlier tokens, for decoding one token after the other."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Room for `max_length` tokens of every sequence in every layer.

    Attributes:
      k, v: rotated keys, and values, of all layers; rows from `length` on are unused.
      segment_ids: the cached tokens' segments; 0 (padding, unused rows) is seen by no token of a document.
      length: how many tokens are in, the same for every sequence: shorter prompts are padded on the left.
    """

    k: Float[Array, "layers batch max_length kv_heads key_dim"]
    v: Float[Array, "layers batch max_length kv_heads value_dim"]
    segment_ids: Int[Array, "batch max_length"]
    length: Int[Array, ""]


def init_cache(config: ModelConfig, batch: int, max_length: int, dtype) -> KVCache:
    """An empty cache: layers * batch * max_length * kv_heads * (key_dim + value_dim) numbers of `dtype`."""
    shape = (config.num_hidden_layers, batch, max_length, config.num_key_value_heads)
    k, v = (jnp.zeros((*shape, width), dtype) for width in (config.key_dim, config.value_dim))
    return KVCache(k, v, jnp.zeros((batch, max_length), jnp.int32), jnp.zeros((), jnp.int32))
