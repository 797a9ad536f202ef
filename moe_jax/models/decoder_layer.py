"""A decoder layer: attention and a feed-forward block, each behind a norm and beside a residual; dense, or with experts."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.config import ModelConfig
from moe_jax.layers.attend import Attend
from moe_jax.layers.norm import RMSNorm
from moe_jax.layers.router import Routing


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the mlp is dense here."""

    def __init__(
        self,
        config: ModelConfig,
        mlp: nnx.Module,
        attention: nnx.Module,
        *,
        stack: tuple[int, ...] = (),
        param_dtype: DTypeLike = jnp.float32,
    ):
        norm = partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, stack=stack, param_dtype=param_dtype)
        self.input_layernorm = norm()
        self.self_attn = attention
        self.post_attention_layernorm = norm()
        self.mlp = mlp

    def __call__(
        self,
        x: Float[Array, "batch seq hidden"],
        cos,
        sin,
        attend: Attend,
        valid,
        expert_ids,
        force_balanced,
        expert_parallel,
        sequences,
    ):
        """Returns (x, the cache that `attend` gave, the routing or None)."""
        attended, memory = self.self_attn(self.input_layernorm(x), cos, sin, attend)
        x = x + attended
        x_norm = self.post_attention_layernorm(x)
        out, routing = self.feed_forward(x_norm, valid, expert_ids, force_balanced, expert_parallel, sequences)
        return x + out, memory, routing

    def feed_forward(
        self, x, valid, expert_ids, force_balanced, expert_parallel, sequences
    ) -> tuple[Float[Array, "batch seq hidden"], Routing | None]:
        """The second half of the layer before its residual sum."""
        return self.mlp(x), None


class SparseDecoderLayer(DecoderLayer):
    """A decoder layer whose feed-forward block is a MoE."""

    def feed_forward(
        self, x, valid, expert_ids, force_balanced, expert_parallel, sequences
    ) -> tuple[Float[Array, "batch seq hidden"], Routing]:
        """Routes the tokens of all sequences together."""
        tokens = x.reshape(-1, x.shape[-1])
        if expert_ids is not None:
            expert_ids = expert_ids.reshape(tokens.shape[0], -1)
        out, routing = self.mlp(
            tokens,
            valid,
            expert_ids=expert_ids,
            force_balanced=force_balanced,
            expert_parallel=expert_parallel,
            sequences=sequences,
        )
        return out.reshape(x.shape), routing
