"""Qwen3-MoE (Yang et al., 2025, https://arxiv.org/abs/2505.09388): Qwen3 with experts in place of the feed-forward block."""

from flax import nnx

from moe_jax.config import Qwen3MoeConfig
from moe_jax.layers.moe import MoE
from moe_jax.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    """A Qwen3-MoE language model; arguments and calls as `Decoder`. Layers not in `config.moe_layers` are dense."""

    config: Qwen3MoeConfig

    def _experts(self, *, stack: tuple[int, ...], param_dtype, rngs: nnx.Rngs) -> MoE:
        config = self.config
        return MoE(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            config.num_experts_per_tok,
            norm_topk_prob=config.norm_topk_prob,
            stddev=config.initializer_range,
            stack=stack,
            param_dtype=param_dtype,
            rngs=rngs,
        )
