"""Published shapes by name: whole models and layers of experts. No other file lists them.

`moe-jax plan`, `moe-jax check --random-config`, `moe-jax tune --preset`, benchmarks and examples take their shapes from here.
"""

from typing import NamedTuple

from moe_jax.config.base import ModelConfig, RopeParameters
from moe_jax.config.deepseek_v3 import DeepseekV2Config, DeepseekV3Config, KimiK2Config
from moe_jax.config.qwen3 import Qwen3Config, Qwen3MoeConfig

_QWEN3_ROPE = RopeParameters(rope_theta=1e6)


def _qwen3(hidden_size: int, intermediate_size: int, layers: int, heads: int, *, tied: bool = False) -> Qwen3Config:
    """Returns a dense Qwen3 config. All sizes have 8 key-value heads and heads of width 128."""
    return Qwen3Config(
        hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, max_position_embeddings=40960, tie_word_embeddings=tied, rope_parameters=_QWEN3_ROPE,
        bos_token_id=151643, eos_token_id=151645,
    )  # fmt: skip


def _deepseek_rope(mscale: float) -> RopeParameters:
    return RopeParameters(
        rope_type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1,
        mscale=mscale, mscale_all_dim=mscale,
    )  # fmt: skip


NAMED_CONFIGS: dict[str, ModelConfig] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
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
    "kimi-k2": KimiK2Config(
        vocab_size=163840, num_attention_heads=64, num_key_value_heads=64, n_routed_experts=384, first_k_dense_replace=1,
        n_group=1, topk_group=1, routed_scaling_factor=2.827, num_nextn_predict_layers=0, max_position_embeddings=131072,
        rope_parameters=RopeParameters(
            rope_theta=50000.0, rope_type="yarn", factor=32, original_max_position_embeddings=4096, beta_fast=1, beta_slow=1,
            mscale=1.0, mscale_all_dim=1.0,
        ),
        bos_token_id=163584, eos_token_id=163585,
    ),
}  # fmt: skip
"""Configs of published models."""

HUB_IDS: dict[str, str] = {
    **{f"Qwen/Qwen3-{size}": f"qwen3-{size.lower()}" for size in "0.6B 1.7B 4B 8B 14B 32B 30B-A3B 235B-A22B".split()},
    "deepseek-ai/DeepSeek-V2-Lite": "deepseek-v2-lite",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "moonshotai/Kimi-K2-Instruct": "kimi-k2",
}
"""{hub id: name in `NAMED_CONFIGS`}, so that these configs need no network."""


class ExpertLayer(NamedTuple):
    """Sizes of the experts of one MoE layer, as the kernels name them."""

    hidden: int
    inter: int
    experts: int
    top_k: int


EXPERT_LAYERS: dict[str, ExpertLayer] = {
    name: ExpertLayer(config.hidden_size, spec.moe_intermediate_size, spec.num_experts, spec.num_experts_per_tok)
    for name, config in NAMED_CONFIGS.items()
    if (spec := config.experts)
} | {
    # No config class describes Mixtral.
    "mixtral-8x7b": ExpertLayer(hidden=4096, inter=14336, experts=8, top_k=2)
}
"""Layers of experts of published models."""
