"""The published shapes, by name: for benchmarks, examples, `moe-jax plan` and `moe-jax check --random-config`."""

from moe_jax.config.base import ModelConfig, RopeParameters
from moe_jax.config.deepseek_v3 import DeepseekV2Config, DeepseekV3Config
from moe_jax.config.qwen3 import Qwen3Config, Qwen3MoeConfig

_QWEN3_ROPE = RopeParameters(rope_theta=1e6)


def _deepseek_rope(mscale: float) -> RopeParameters:
    return RopeParameters(
        rope_type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1,
        mscale=mscale, mscale_all_dim=mscale,
    )  # fmt: skip


NAMED_CONFIGS: dict[str, ModelConfig] = {
    "qwen3-0.6b": Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        max_position_embeddings=40960, tie_word_embeddings=True, rope_parameters=_QWEN3_ROPE,
        bos_token_id=151643, eos_token_id=151645,
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        num_hidden_layers=48, max_position_embeddings=40960, norm_topk_prob=True, rope_parameters=_QWEN3_ROPE,
        bos_token_id=151643, eos_token_id=151645,
    ),
    "qwen3-235b-a22b": Qwen3MoeConfig(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=94, num_attention_heads=64, moe_intermediate_size=1536,
        max_position_embeddings=40960, norm_topk_prob=True, rope_parameters=_QWEN3_ROPE,
        bos_token_id=151643, eos_token_id=151645,
    ),
    "deepseek-v2-lite": DeepseekV2Config(
        hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27, num_attention_heads=16,
        num_key_value_heads=16, q_lora_rank=None, num_experts_per_tok=6, first_k_dense_replace=1,
        max_position_embeddings=163840, rope_parameters=_deepseek_rope(0.707), bos_token_id=100000, eos_token_id=100001,
    ),
    "deepseek-v3": DeepseekV3Config(max_position_embeddings=163840, rope_parameters=_deepseek_rope(1.0)),
}  # fmt: skip
