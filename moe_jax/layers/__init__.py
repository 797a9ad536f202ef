"""Flax NNX modules that the models share; their inputs and outputs are plain arrays."""

from typing import TYPE_CHECKING

from moe_jax.runtime.lazy import export_lazily

if TYPE_CHECKING:
    from moe_jax.layers.attend import Attend
    from moe_jax.layers.attention import Attention
    from moe_jax.layers.balance import Sequences, move_bias
    from moe_jax.layers.cache import KVCache
    from moe_jax.layers.latent_attention import LatentAttention
    from moe_jax.layers.linear import Embedding, Linear, RMSNorm
    from moe_jax.layers.mlp import MLP
    from moe_jax.layers.moe import Experts, MoE
    from moe_jax.layers.router import (
        ExpertBias,
        Router,
        Routing,
        load_balancing_loss,
        load_balancing_loss_per_layer,
        router_z_loss,
        sequence_balance_loss,
    )
    from moe_jax.layers.router_sums import RouterSums

__all__ = [
    "MLP",
    "Attend",
    "Attention",
    "Embedding",
    "ExpertBias",
    "Experts",
    "KVCache",
    "LatentAttention",
    "Linear",
    "MoE",
    "RMSNorm",
    "Router",
    "RouterSums",
    "Routing",
    "Sequences",
    "load_balancing_loss",
    "load_balancing_loss_per_layer",
    "move_bias",
    "router_z_loss",
    "sequence_balance_loss",
]

export_lazily(__name__)
