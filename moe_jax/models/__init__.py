"""The model architectures, one file each, read from top to bottom like their papers."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.models.auto import from_config
    from moe_jax.models.decoder import Decoder
    from moe_jax.models.deepseek_v3 import DeepseekV3
    from moe_jax.models.output import HiddenStates, ModelOutput
    from moe_jax.models.qwen3 import Qwen3, Qwen3Moe

__all__ = ["Decoder", "DeepseekV3", "HiddenStates", "ModelOutput", "Qwen3", "Qwen3Moe", "from_config"]

export_lazily(__name__)
