"""Mixture-of-Experts language models in JAX: load from Hugging Face, fine-tune, generate, write back."""

from moe_jax import kernels, parallel, train
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.config import DeepseekV2Config, DeepseekV3Config, Qwen3Config, Qwen3MoeConfig, load_config
from moe_jax.generation import chat, complete, generate
from moe_jax.models.auto import from_config

__all__ = [
    "DeepseekV2Config",
    "DeepseekV3Config",
    "Qwen3Config",
    "Qwen3MoeConfig",
    "chat",
    "complete",
    "from_config",
    "from_pretrained",
    "generate",
    "kernels",
    "load_config",
    "parallel",
    "train",
]

__version__ = "0.1.0"
