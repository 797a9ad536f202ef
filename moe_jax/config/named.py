"""Published shapes by name: whole models and layers of experts. No other file lists them.

`moe-jax plan`, `moe-jax check --random-config`, `moe-jax tune --preset`, benchmarks and examples take their shapes from here.
"""

from typing import Any, NamedTuple

from moe_jax.config.base import ModelConfig, RopeParameters
from moe_jax.config.deepseek_v3 import DeepseekV2Config, DeepseekV3Config, KimiK2Config
from moe_jax.config.families import (
    Ernie45MoeConfig,
    GptOssConfig,
    HunyuanMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
)
from moe_jax.config.qwen3 import Qwen3Config, Qwen3MoeConfig
from moe_jax.config.sigmoid_families import (
    AXK1Config,
    Dots1Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    HYV3Config,
    MiniMaxM2Config,
    SolarOpenConfig,
)

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


def _glm(max_position_embeddings: int) -> Glm4MoeConfig:
    """Returns the config of GLM-4.5 and its successors, which differ in the length of their context."""
    return Glm4MoeConfig(
        hidden_size=5120,
        intermediate_size=12288,
        num_hidden_layers=92,
        head_dim=128,
        attention_bias=True,
        use_qk_norm=True,
        moe_intermediate_size=1536,
        num_experts=160,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        max_position_embeddings=max_position_embeddings,
        num_nextn_predict_layers=1,
        **_GLM_TOKENS,
    )


_GLM_TOKENS: dict[str, Any] = dict(
    rope_parameters=RopeParameters(rope_theta=1e6), pad_token_id=151329, eos_token_id=(151329, 151336, 151338)
)
_IN_TURN = "sliding_attention", "full_attention"
_HARMONY_TOKENS: dict[str, Any] = dict(pad_token_id=199999, eos_token_id=200002)

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
    "glm-4.5-air": Glm4MoeConfig(head_dim=128, attention_bias=True, num_nextn_predict_layers=1, **_GLM_TOKENS),
    "glm-4.5": _glm(131072),
    "glm-4.6": _glm(202752),
    "glm-4.7-flash": Glm4MoeLiteConfig(
        rope_parameters=RopeParameters(rope_theta=1e6), num_nextn_predict_layers=1, pad_token_id=154820,
        eos_token_id=(154820, 154827, 154829),
    ),
    "dots.llm1": Dots1Config(
        hidden_size=4096, n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=True,
        routed_scaling_factor=2.5, rope_parameters=RopeParameters(rope_theta=1e7), rms_norm_eps=1e-5,
        max_position_embeddings=32768, sliding_window=None,
    ),
    "solar-open-100b": SolarOpenConfig(),
    "hy3": HYV3Config(max_position_embeddings=262144),
    "a.x-k1": AXK1Config(),
    "minimax-m2": MiniMaxM2Config(partial_rotary_factor=0.5),
    "qwen1.5-moe-a2.7b": Qwen2MoeConfig(max_position_embeddings=8192, rope_parameters=_QWEN3_ROPE),
    "qwen2-57b-a14b": Qwen2MoeConfig(
        hidden_size=3584, intermediate_size=18944, moe_intermediate_size=2560, shared_expert_intermediate_size=20480,
        num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, num_experts=64, num_experts_per_tok=8,
        max_position_embeddings=131072, rope_parameters=_QWEN3_ROPE,
    ),
    "mixtral-8x7b": MixtralConfig(max_position_embeddings=32768),
    "mixtral-8x22b": MixtralConfig(
        hidden_size=6144, intermediate_size=16384, moe_intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48,
        max_position_embeddings=65536,
    ),
    "olmoe-1b-7b": OlmoeConfig(intermediate_size=1024, moe_intermediate_size=1024),
    "ernie-4.5-21b-a3b": Ernie45MoeConfig(moe_layer_end_index=27),
    "ernie-4.5-300b-a47b": Ernie45MoeConfig(
        hidden_size=8192, intermediate_size=28672, moe_intermediate_size=3584, num_hidden_layers=54, num_attention_heads=64,
        num_key_value_heads=8, num_experts_per_tok=8, n_shared_experts=0, moe_layer_start_index=3, moe_layer_end_index=53,
        tie_word_embeddings=False,
    ),
    "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_experts=32, layer_types=_IN_TURN * 12, **_HARMONY_TOKENS),
    "gpt-oss-120b": GptOssConfig(layer_types=_IN_TURN * 18, **_HARMONY_TOKENS),
    "hunyuan-a13b": HunyuanMoeConfig(
        vocab_size=128167, intermediate_size=3072, moe_intermediate_size=3072, num_key_value_heads=8, head_dim=128,
        num_experts=64, num_experts_per_tok=8, tie_word_embeddings=True, max_position_embeddings=32768,
        rope_parameters=RopeParameters(rope_theta=1e4 * 1000 ** (128 / 126)),
    ),
}  # fmt: skip
"""Configs of published models."""

HUB_IDS: dict[str, str] = {
    **{f"Qwen/Qwen3-{size}": f"qwen3-{size.lower()}" for size in "0.6B 1.7B 4B 8B 14B 32B 30B-A3B 235B-A22B".split()},
    "deepseek-ai/DeepSeek-V2-Lite": "deepseek-v2-lite",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "moonshotai/Kimi-K2-Instruct": "kimi-k2",
    "tencent/Hy3": "hy3",
    "zai-org/GLM-4.5-Air": "glm-4.5-air",
    "zai-org/GLM-4.5": "glm-4.5",
    "zai-org/GLM-4.6": "glm-4.6",
    "zai-org/GLM-4.7": "glm-4.6",
    "zai-org/GLM-4.7-Flash": "glm-4.7-flash",
    "rednote-hilab/dots.llm1.inst": "dots.llm1",
    "upstage/Solar-Open-100B": "solar-open-100b",
    "tencent/Hunyuan-A13B-Instruct": "hunyuan-a13b",
    "skt/A.X-K1": "a.x-k1",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2",
    "Qwen/Qwen1.5-MoE-A2.7B": "qwen1.5-moe-a2.7b",
    "Qwen/Qwen2-57B-A14B": "qwen2-57b-a14b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "mistralai/Mixtral-8x22B-v0.1": "mixtral-8x22b",
    "allenai/OLMoE-1B-7B-0924": "olmoe-1b-7b",
    "baidu/ERNIE-4.5-21B-A3B-PT": "ernie-4.5-21b-a3b",
    "baidu/ERNIE-4.5-300B-A47B-PT": "ernie-4.5-300b-a47b",
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
}
"""Layers of experts of published models."""
