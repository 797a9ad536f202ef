"""DeepSeek-V3 (DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437) and DeepSeek-V2 (https://arxiv.org/abs/2405.04434).

Latent attention, dense first layers, and experts of two kinds. Every token uses the shared experts, and k of the others, which
the router chooses within a few groups. Modules after the last layer predict later tokens (`models.mtp`).
"""

from flax import nnx

from moe_jax.config import DeepseekV3Config, Mixer
from moe_jax.layers.latent_attention import LatentAttention
from moe_jax.layers.router import GroupRouter, GroupRule
from moe_jax.models.decoder import Decoder


class DeepseekV3(Decoder):
    """A DeepSeek-V3 or V2 language model; arguments and calls as `Decoder`."""

    config: DeepseekV3Config

    def _mixer(self, mixer: Mixer, *, stack: tuple[int, ...], param_dtype, rngs: nnx.Rngs) -> LatentAttention:
        return LatentAttention(self.config, stack=stack, param_dtype=param_dtype, rngs=rngs)

    def _router(self, **options) -> GroupRouter:
        config, has_bias = self.config, self.config.topk_method == "noaux_tc"
        rule = GroupRule(
            scoring_func=config.scoring_func,
            num_groups=config.num_groups,
            groups_per_token=config.topk_group,
            group_score_size=2 if has_bias else 1,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
        )
        sizes = config.hidden_size, config.n_routed_experts, config.num_experts_per_tok
        return GroupRouter(*sizes, rule, has_bias=has_bias, **options)
