"""Qwen3's attention: grouped queries with their own head size, RMSNorm on each query and key head, rotary positions."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.config import Qwen3Config
from moe_jax.layers.attend import Attend
from moe_jax.layers.cache import KVCache
from moe_jax.layers.linear import Linear
from moe_jax.layers.norm import RMSNorm
from moe_jax.layers.paged import LayerPages, PagedAttend
from moe_jax.layers.rope import RopeTables, apply_rope


class Attention(nnx.Module):
    """o_proj(attend(rope(q_norm(q_proj x)), rope(k_norm(k_proj x)), v_proj x))."""

    def __init__(
        self, config: Qwen3Config, *, stack: tuple[int, ...] = (), param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ):
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim

        def linear(in_features: int, out_features: int) -> Linear:
            return Linear(
                in_features,
                out_features,
                use_bias=config.attention_bias,
                stddev=config.initializer_range,
                stack=stack,
                param_dtype=param_dtype,
                rngs=rngs,
            )

        self.q_proj = linear(config.hidden_size, query_size)
        self.k_proj = linear(config.hidden_size, key_size)
        self.v_proj = linear(config.hidden_size, key_size)
        self.o_proj = linear(query_size, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, stack=stack, param_dtype=param_dtype)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, stack=stack, param_dtype=param_dtype)
        self.head_dim = config.head_dim

    def __call__(
        self, x: Float[Array, "batch seq hidden"], rope: RopeTables, attend: Attend | PagedAttend
    ) -> tuple[Float[Array, "batch seq hidden"], KVCache | LayerPages | None]:
        """Returns the output, and the cache or pages with these tokens in it (None without either)."""
        q = apply_rope(self.q_norm(self.q_proj.to_heads(x, self.head_dim)), rope)
        k = apply_rope(self.k_norm(self.k_proj.to_heads(x, self.head_dim)), rope)
        out, cache = attend(q, (k, self.v_proj.to_heads(x, self.head_dim)), scale=self.head_dim**-0.5)
        return self.o_proj.of_heads(out), cache
