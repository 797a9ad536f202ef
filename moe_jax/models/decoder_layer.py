"""A decoder layer, dense or with experts: attention and a feed-forward block, each with a norm and a residual sum."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.config import ModelConfig
from moe_jax.layers.attend import Attend
from moe_jax.layers.norm import RMSNorm
from moe_jax.layers.paged import PagedAttend
from moe_jax.layers.router import Routing
from moe_jax.models.forward import LayerInputs, LayerOutput
from moe_jax.parallel.spread import Spread


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with a dense mlp."""

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
        self, x: Float[Array, "batch seq hidden"], inputs: LayerInputs, attend: Attend | PagedAttend, spread: Spread
    ) -> LayerOutput:
        """Applies the layer to the residual stream; `attend` is this layer's attention."""
        attended, cache = self.self_attn(self.input_layernorm(x), inputs.rope, attend)
        x = x + attended
        out, routing = self.feed_forward(self.post_attention_layernorm(x), inputs, spread)
        return LayerOutput(x + out, cache, routing)

    def feed_forward(
        self, x: Float[Array, "batch seq hidden"], inputs: LayerInputs, spread: Spread
    ) -> tuple[Float[Array, "batch seq hidden"], Routing | None]:
        """Returns mlp(x) for normalized x; the caller adds it to the residual stream."""
        return self.mlp(x), None


class SparseDecoderLayer(DecoderLayer):
    """A decoder layer whose feed-forward block is a mixture of experts (`layers.moe.MoE`)."""

    def feed_forward(
        self, x: Float[Array, "batch seq hidden"], inputs: LayerInputs, spread: Spread
    ) -> tuple[Float[Array, "batch seq hidden"], Routing]:
        """Returns moe(x) for normalized x, with the tokens of all sequences routed together."""
        return self.mlp(x, inputs.counted, expert_ids=inputs.expert_ids, spread=spread)
