"""Qwen3 and Qwen3-MoE (Yang et al., 2025, https://arxiv.org/abs/2505.09388): grouped-query attention.

The feed-forward block is dense; Qwen3-MoE replaces it with experts.
"""

from moe_jax.config import Qwen3Config, Qwen3MoeConfig
from moe_jax.models.decoder import Decoder


class Qwen3(Decoder):
    """A Qwen3 language model; arguments and calls as `Decoder`."""

    config: Qwen3Config


class Qwen3Moe(Qwen3):
    """A Qwen3-MoE language model; arguments and calls as `Decoder`. Layers not in `config.moe_layers` are dense."""

    config: Qwen3MoeConfig
