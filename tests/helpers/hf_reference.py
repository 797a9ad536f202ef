"""Small transformers models with random weights everywhere, as the reference that ours must equal."""

import re
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
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


def hub_gradients(model) -> dict[str, np.ndarray]:
    """Gradients under the checkpoint's names: the fused experts taken apart."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            continue  # a block that the config leaves out
        gradient = parameter.grad.numpy()
        if name.endswith("experts.gate_up_proj"):
            half = gradient.shape[1] // 2
            for expert, rows in enumerate(gradient):
                prefix = name.replace("gate_up_proj", str(expert))
                gradients[f"{prefix}.gate_proj.weight"] = rows[:half]
                gradients[f"{prefix}.up_proj.weight"] = rows[half:]
        elif name.endswith("experts.down_proj"):
            for expert, rows in enumerate(gradient):
                gradients[name.replace("down_proj", f"{expert}.down_proj.weight")] = rows
        else:
            gradients[name] = gradient
    return gradients


def by_parameter(names) -> dict[str, list[str]]:
    """Returns the checkpoint's names by transformers' parameter: one parameter holds gate and up rows of all experts."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parameter = re.sub(r"experts\.\d+\.(gate|up)_proj.weight", "experts.gate_up_proj", name)
        groups.setdefault(re.sub(r"experts\.\d+\.down_proj.weight", "experts.down_proj", parameter), []).append(name)
    return groups
