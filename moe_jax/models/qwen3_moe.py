"""Qwen3-MoE (Yang et al., 2025, https://arxiv.org/abs/2505.09388): Qwen3 with experts in place of the feed-forward block."""

from flax import nnx
from jaxtyping import Array, Float

from moe_jax.config import Qwen3MoeConfig, Stage
from moe_jax.layers.moe import MoE
from moe_jax.layers.router import Routing
from moe_jax.models.qwen3 import DecoderLayer, Qwen3


class Qwen3Moe(Qwen3):
    """A Qwen3-MoE language model; arguments and calls as `Qwen3`. Layers not in `config.moe_layers` are dense."""

    config: Qwen3MoeConfig

    def _decoder_layers(self, stage: Stage, param_dtype, rngs: nnx.Rngs) -> DecoderLayer:
        if not stage.sparse:
            return super()._decoder_layers(stage, param_dtype, rngs)
        config, stack = self.config, (stage.num_layers,)
        moe = MoE(
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
        return SparseDecoderLayer(config, moe, stack=stack, param_dtype=param_dtype, rngs=rngs)


class SparseDecoderLayer(DecoderLayer):
    """A decoder layer whose feed-forward block is a MoE."""

    def feed_forward(
        self, x, valid, expert_ids, force_balanced, expert_parallel
    ) -> tuple[Float[Array, "batch seq hidden"], Routing]:
        """Routes the tokens of all sequences together."""
        tokens = x.reshape(-1, x.shape[-1])
        if expert_ids is not None:
            expert_ids = expert_ids.reshape(tokens.shape[0], -1)
        options = dict(expert_ids=expert_ids, force_balanced=force_balanced, expert_parallel=expert_parallel)
        out, routing = self.mlp(tokens, valid, **options)
        return out.reshape(x.shape), routing
