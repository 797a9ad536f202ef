"""Qwen3-MoE (Yang et al., 2025, https://arxiv.org/abs/2505.09388): Qwen3 with experts in place of the feed-forward block."""

from flax import nnx

from moe_jax.config import Qwen3MoeConfig
from moe_jax.layers.moe import MoE
from moe_jax.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    """A Qwen3-MoE language model; arguments and calls as `Decoder`. Layers not in `config.moe_layers` are dense."""

    config: Qwen3MoeConfig

    def _experts(self, *, stack: tuple[int, ...], param_dtype, rngs: nnx.Rngs) -> MoE:
        config, spec = self.config, self.config.experts
        assert spec is not None
        return MoE(
            config.hidden_size,
            spec.moe_intermediate_size,
            spec.num_experts,
            spec.num_experts_per_tok,
            norm_topk_prob=config.norm_topk_prob,
            shared_intermediate_size=spec.shared_intermediate_size,
            stddev=config.initializer_range,
            stack=stack,
            param_dtype=param_dtype,
            rngs=rngs,
        )
