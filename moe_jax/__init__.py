"""Mixture-of-Experts language models in JAX: load from Hugging Face, fine-tune, generate, write back."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax import adapters, checkpoint, config, generation, kernels, layers, models, parallel, recipes, serving, train
    from moe_jax.adapters.load import from_pretrained
    from moe_jax.checkpoint.hf_save import save_pretrained
    from moe_jax.checkpoint.tokenizer import load_tokenizer
    from moe_jax.config import DeepseekV2Config, DeepseekV3Config, KimiK2Config, Qwen3Config, Qwen3MoeConfig, load_config
    from moe_jax.generation import chat, complete, generate
    from moe_jax.layers.moe import MoE
    from moe_jax.models.auto import from_config

__all__ = [
    "DeepseekV2Config", "DeepseekV3Config", "KimiK2Config", "MoE", "Qwen3Config", "Qwen3MoeConfig", "adapters", "chat",
    "checkpoint", "complete", "config", "from_config", "from_pretrained", "generate", "generation", "kernels", "layers",
    "load_config", "load_tokenizer", "models", "parallel", "recipes", "save_pretrained", "serving", "train",
]  # fmt: skip

__version__ = "0.1.0"

export_lazily(__name__)
