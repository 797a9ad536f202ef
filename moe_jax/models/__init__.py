"""The model architectures: `Decoder` builds each from the specs of its config."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.models.auto import DeepseekV3, Qwen3, Qwen3Moe, from_config
    from moe_jax.models.decoder import Decoder
    from moe_jax.models.output import HiddenStates, ModelOutput

__all__ = ["Decoder", "DeepseekV3", "HiddenStates", "ModelOutput", "Qwen3", "Qwen3Moe", "from_config"]

export_lazily(__name__)
