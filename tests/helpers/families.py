"""One row for each family of models: a tiny transformers model, and its parameters and gradients under the hub's names."""

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

SIZES = dict(
    vocab_size=96, hidden_size=64, num_hidden_layers=3, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, attn_implementation="eager", experts_implementation="eager",
)  # fmt: skip
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
WIDE = dict(HEADS, head_dim=32)
EXPERTS = dict(moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3)
DEEPSEEK = dict(
    moe_intermediate_size=32, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3, n_group=1, topk_group=1,
    norm_topk_prob=True, routed_scaling_factor=1.8,
)  # fmt: skip
LATENT = dict(
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=24, qk_rope_head_dim=8,
    v_head_dim=32, intermediate_size=48, mlp_layer_types=["dense", "sparse", "sparse"],
)  # fmt: skip
ALPHA = dict(rope_type="dynamic", alpha=1000.0, factor=1.0, rope_theta=10000.0)
YARN = dict(
    rope_type="yarn", rope_theta=1000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=64,
)  # fmt: skip

FAMILIES = {
    "qwen2_moe": dict(
        HEADS, **EXPERTS, intermediate_size=48, shared_expert_intermediate_size=40, norm_topk_prob=False, qkv_bias=True,
        mlp_only_layers=[1],
    ),
    "mixtral": dict(WIDE, intermediate_size=32, num_local_experts=8, num_experts_per_tok=2, sliding_window=5),
    "olmoe": dict(HEADS, num_experts=8, num_experts_per_tok=3, intermediate_size=32, norm_topk_prob=False, clip_qkv=0.5),
    "glm4_moe": dict(
        WIDE, **DEEPSEEK, intermediate_size=48, first_k_dense_replace=1, attention_bias=True, use_qk_norm=True,
        partial_rotary_factor=0.5,
    ),
    "dots1": dict(
        WIDE, **DEEPSEEK, intermediate_size=48, first_k_dense_replace=1, attention_bias=True, sliding_window=5,
        max_window_layers=2,
    ),
    "minimax_m2": dict(WIDE, intermediate_size=32, num_local_experts=8, num_experts_per_tok=3, rotary_dim=16),
    "ernie4_5_moe": dict(
        HEADS, intermediate_size=48, moe_intermediate_size=32, moe_num_experts=8, moe_k=3, moe_num_shared_experts=2,
        moe_layer_start_index=1, tie_word_embeddings=True,
    ),
    "hunyuan_v1_moe": dict(
        WIDE, intermediate_size=32, num_experts=8, moe_topk=3, rope_parameters=ALPHA, tie_word_embeddings=True,
    ),
    "gpt_oss": dict(
        WIDE, intermediate_size=48, num_local_experts=8, num_experts_per_tok=3, sliding_window=5, swiglu_limit=0.5,
        rope_parameters=YARN,
    ),
    "solar_open": dict(WIDE, **DEEPSEEK),
    "glm4_moe_lite": dict(LATENT, **DEEPSEEK),
    "hy_v3": dict(WIDE, **EXPERTS, intermediate_size=48, num_shared_experts=1, router_scaling_factor=2.826),
    "axk1": dict(LATENT, **DEEPSEEK | dict(n_group=4, topk_group=2)),
}  # fmt: skip
"""{model_type: fields of a tiny config.json, with a value that shows for each switch of the family}."""


def build(model_type: str, rng: np.random.Generator):
    """Returns transformers' tiny model in f32, with random numbers in all parameters and buffers."""
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **FAMILIES[model_type])
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        std = 0.5 if name.endswith(("gate.weight", "router.weight", "wg.weight", "gate_weight", "sinks")) else 0.1
        value.data = torch.tensor(("norm" in name) + std * rng.normal(size=value.shape), dtype=torch.float32)
    return model


def saved(model) -> dict[str, np.ndarray]:
    """Returns the tensors that transformers writes, under the hub's names."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder, "model.safetensors"))


def saved_gradients(model) -> dict[str, np.ndarray]:
    """Returns the gradients under the hub's names. The model's parameters are their gradients afterwards."""
    buffers = {value.data_ptr() for value in model.buffers()}
    for parameter in model.parameters():
        assert parameter.data_ptr() not in buffers
        if parameter.grad is not None:  # ERNIE has biases of the choice among its parameters
            parameter.data = parameter.grad
    return {name: array for name, array in saved(model).items() if not name.endswith(("correction_bias", "expert_bias"))}
