"""Small transformers models with random weights everywhere, as the reference that ours must equal."""

import tempfile
from pathlib import Path

import jax.numpy as jnp
import torch
import transformers

import moe_jax

SMALL = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    rope_theta=1e6,
    attn_implementation="eager",
)
SMALL_DEEPSEEK = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=8,
    n_routed_experts=16,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=0,
    max_position_embeddings=64,
    attn_implementation="eager",
    experts_implementation="eager",
)
SMALL_MOE = dict(SMALL, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, experts_implementation="eager")


def reference(model_type: str, seed: int, *, router_std: float = 0.5, **overrides):
    """Returns a transformers model in f32 with random values in every parameter, norms and biases included.

    The default `router_std` spreads the router's logits, so that rounding cannot flip a choice between two implementations.
    """
    torch.manual_seed(seed)
    sizes = {"qwen3": SMALL, "qwen3_moe": SMALL_MOE}.get(model_type, SMALL_DEEPSEEK)
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = router_std if name.endswith("mlp.gate.weight") else 0.1
            parameter.normal_(1.0 if "norm" in name else 0.0, std)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model.eval()


def load_ours(model, **options):
    """Returns our model in f32 with the same weights, loaded from a checkpoint folder."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return moe_jax.from_pretrained(Path(folder), **{"dtype": jnp.float32, "progress": False, **options})
