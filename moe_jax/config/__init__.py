"""Model configurations with Hugging Face's field names (one file for each family), and their config.json."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.config.base import LayerKind, ModelConfig, RopeParameters, Stage
    from moe_jax.config.deepseek_v3 import DeepseekV2Config, DeepseekV3Config, KimiK2Config
    from moe_jax.config.hf_json import CONFIG_CLASSES, config_from_dict, config_to_dict, load_config
    from moe_jax.config.named import EXPERT_LAYERS, HUB_IDS, NAMED_CONFIGS, ExpertLayer
    from moe_jax.config.qwen3 import Qwen3Config, Qwen3MoeConfig
    from moe_jax.config.specs import ExpertsSpec, HeadsSpec, LatentSpec, Mixer, RouterRule

__all__ = [
    "CONFIG_CLASSES", "EXPERT_LAYERS", "HUB_IDS", "NAMED_CONFIGS", "DeepseekV2Config", "DeepseekV3Config", "ExpertLayer",
    "ExpertsSpec", "HeadsSpec", "KimiK2Config", "LatentSpec", "LayerKind", "Mixer", "ModelConfig", "Qwen3Config",
    "Qwen3MoeConfig", "RopeParameters", "RouterRule", "Stage", "config_from_dict", "config_to_dict", "load_config",
]  # fmt: skip

export_lazily(__name__)
