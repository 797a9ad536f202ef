"""Attention of query heads to the same number of key and value heads or fewer, as in the config's `HeadsSpec`."""

from dataclasses import replace

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.config import ModelConfig
from moe_jax.layers.attend import Attend
from moe_jax.layers.cache import KVCache
from moe_jax.layers.linear import Linear, RMSNorm
from moe_jax.layers.paged import LayerPages, PagedAttend
from moe_jax.layers.rope import RopeTables, apply_rope


class Attention(nnx.Module):
    """Multi-head or grouped-query attention: o_proj(attend(rope(q_norm(q_proj x)), rope(k_norm(k_proj x)), v_proj x)).

    `config.mixer` defines biases, sinks, clipping, and the norms of queries and keys: of each head or of all heads together,
    before or after rope.
    """

    def __init__(
        self, config: ModelConfig, *, stack: tuple[int, ...] = (), param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ):
        mixer = config.mixer

        def linear(in_features: int, out_features: int, use_bias: bool = mixer.biases) -> Linear:
            return Linear(
                in_features,
                out_features,
                use_bias=use_bias,
                stddev=config.initializer_range,
                stack=stack,
                param_dtype=param_dtype,
                rngs=rngs,
            )

        def norm(heads: int) -> RMSNorm | None:
            width, eps = mixer.key_dim * (heads if mixer.joint_norms else 1), config.rms_norm_eps
            return RMSNorm(width, eps=eps, stack=stack, param_dtype=param_dtype) if mixer.head_norms else None

        self.q_proj = linear(config.hidden_size, mixer.heads * mixer.key_dim)
        self.k_proj = linear(config.hidden_size, mixer.kv_heads * mixer.key_dim)
        self.v_proj = linear(config.hidden_size, mixer.kv_heads * mixer.value_dim)
        self.o_proj = linear(mixer.heads * mixer.value_dim, config.hidden_size, mixer.biases and mixer.output_bias)
        self.q_norm, self.k_norm = norm(mixer.heads), norm(mixer.kv_heads)
        self.sinks = nnx.Param(jnp.zeros((*stack, mixer.heads), param_dtype)) if mixer.sinks else None
        self.mixer = mixer

    def __call__(
        self, x: Float[Array, "batch seq hidden"], rope: RopeTables, attend: Attend | PagedAttend
    ) -> tuple[Float[Array, "batch seq hidden"], KVCache | LayerPages | None]:
        """Returns the output, and the cache or pages with these tokens in it (None without either)."""
        mixer, heads = self.mixer, []
        for projection, norm in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm), (self.v_proj, None)):
            y = projection(x)
            if norm is not None and mixer.joint_norms:
                y, norm = norm(y), None
            y = y if mixer.clip is None else jnp.clip(y, -mixer.clip, mixer.clip)
            is_value = projection is self.v_proj
            y = y.reshape(*y.shape[:-1], -1, mixer.value_dim if is_value else mixer.key_dim)
            if norm is not None and not mixer.norms_after_rope:
                y, norm = norm(y), None
            y = y if is_value else apply_rope(y, rope, interleaved=mixer.interleaved)
            heads.append(y if norm is None else norm(y))
        q, k, v = heads
        if self.sinks is not None:
            attend = replace(attend, sinks=self.sinks[...])
        out, cache = attend(q, (k, v), scale=mixer.key_dim**-0.5)
        return self.o_proj.of_heads(out), cache
