"""Multi-head latent attention (DeepSeek-V2, 2024, https://arxiv.org/abs/2405.04434, section 2.1).

A token's keys and values of all heads come from one short vector, its latent, and one rotary key that the heads share: what a
cache has to hold, kv_lora_rank + qk_rope_head_dim numbers a token.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.config import DeepseekV3Config
from moe_jax.layers.attention import Attend
from moe_jax.layers.linear import Linear
from moe_jax.layers.norm import RMSNorm
from moe_jax.layers.rope import apply_rope, mscale_of_scores

LATENT_NORM_EPS = 1e-6
"""Of the norms on the latents, whatever `rms_norm_eps` is: so in DeepSeek's code and in transformers."""


class LatentAttention(nnx.Module):
    """o_proj(attend(q, k, v)), with nope and rope the parts of a head without and with a position:

        q            = q_b_proj(norm(q_a_proj x)), or q_proj x where q_lora_rank is None; its rope part turned
        latent, rope = split(kv_a_proj_with_mqa x); the latent normed, the rope part turned
        k, v         = split(kv_b_proj latent) in each head, the rope part behind every k

    A query and a key head are wider (qk_nope_head_dim + qk_rope_head_dim) than a value head (v_head_dim).
    """

    def __init__(self, config: DeepseekV3Config, *, stack: tuple[int, ...] = (), param_dtype=jnp.float32, rngs: nnx.Rngs):
        heads, rope_dim = config.num_attention_heads, config.qk_rope_head_dim

        def linear(in_features: int, out_features: int, use_bias: bool = False) -> Linear:
            return Linear(
                in_features,
                out_features,
                use_bias=use_bias,
                stddev=config.initializer_range,
                stack=stack,
                param_dtype=param_dtype,
                rngs=rngs,
            )

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, eps=LATENT_NORM_EPS, stack=stack, param_dtype=param_dtype)

        if config.q_lora_rank is None:
            self.q_proj = linear(config.hidden_size, heads * config.key_dim)
        else:
            self.q_a_proj = linear(config.hidden_size, config.q_lora_rank, config.attention_bias)
            self.q_a_layernorm = norm(config.q_lora_rank)
            self.q_b_proj = linear(config.q_lora_rank, heads * config.key_dim)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, config.kv_lora_rank + rope_dim, config.attention_bias)
        self.kv_a_layernorm = norm(config.kv_lora_rank)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size, config.attention_bias)
        self.config = config
        self.scale = config.key_dim**-0.5 * mscale_of_scores(config.rope_parameters, config.max_position_embeddings)

    def __call__(
        self,
        x: Float[Array, "batch seq hidden"],
        cos: Float[Array, "batch seq half"],
        sin: Float[Array, "batch seq half"],
        attend: Attend,
    ) -> tuple[Float[Array, "batch seq hidden"], Any]:
        """Returns the output and whatever `attend` gave beside it."""
        q = self.queries(x, cos, sin)
        k, v = self.expand(*self.latents(x, cos, sin))
        out, extra = attend(q, k, v, scale=self.scale)
        return self.o_proj(out.reshape(*x.shape[:-1], -1)), extra

    def queries(self, x: Float[Array, "batch seq hidden"], cos, sin) -> Float[Array, "batch seq heads key_dim"]:
        """The part without positions, then the one with them, turned."""
        q = self.q_proj(x) if self.config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(*x.shape[:-1], -1, self.config.key_dim)
        q_nope, q_rope = jnp.split(q, [self.config.qk_nope_head_dim], axis=-1)
        return jnp.concatenate([q_nope, self._turned(q_rope, cos, sin)], axis=-1)

    def latents(
        self, x: Float[Array, "batch seq hidden"], cos, sin
    ) -> tuple[Float[Array, "batch seq kv_lora_rank"], Float[Array, "batch seq rope_dim"]]:
        """(the latent, the key with positions that all heads share): all that later tokens need of these."""
        latent, k_rope = jnp.split(self.kv_a_proj_with_mqa(x), [self.config.kv_lora_rank], axis=-1)
        return self.kv_a_layernorm(latent), self._turned(k_rope[:, :, None], cos, sin)[:, :, 0]

    def expand(
        self, latent: Float[Array, "batch seq kv_lora_rank"], k_rope: Float[Array, "batch seq rope_dim"]
    ) -> tuple[Float[Array, "batch seq heads key_dim"], Float[Array, "batch seq heads value_dim"]]:
        """Keys and values of every head."""
        heads = self.config.num_attention_heads
        of_heads = self.kv_b_proj(latent).reshape(*latent.shape[:-1], heads, -1)
        k_nope, v = jnp.split(of_heads, [self.config.qk_nope_head_dim], axis=-1)
        shared = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:-1], k_rope.shape[-1]))
        return jnp.concatenate([k_nope, shared], axis=-1), v

    def _turned(self, x: Float[Array, "batch seq heads rope_dim"], cos, sin) -> Float[Array, "batch seq heads rope_dim"]:
        return apply_rope(x, cos, sin, interleaved=self.config.rope_interleave)
