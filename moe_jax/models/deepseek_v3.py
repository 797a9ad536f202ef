"""DeepSeek-V3 (DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437) and DeepSeek-V2 (https://arxiv.org/abs/2405.04434).

Latent attention, dense first layers, and experts of two kinds. Every token uses the shared experts, and k of the others, which
the router chooses within a few groups. Modules after the last layer predict later tokens (`models.mtp`).
"""

from moe_jax.config import DeepseekV3Config
from moe_jax.models.decoder import Decoder


class DeepseekV3(Decoder):
    """A DeepSeek-V3 or V2 language model; arguments and calls as `Decoder`."""

    config: DeepseekV3Config
