"""Results of a model's forward pass."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float, Int

from moe_jax.layers.cache import KVCache
from moe_jax.layers.router_sums import RouterSums


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HiddenStates:
    """The final hidden states, before the vocabulary projection.

    Attributes:
      hidden: after the last norm, in the model's dtype. With an adapter of the head it has extra columns, which `head_weight`
        matches.
      router: the router's sums, stacked over MoE layers (zero layers for a dense model).
      expert_ids: experts that each token of each MoE layer went to. Pass them back as `expert_ids` to replay the routing.
      cache: the KV cache with this call's tokens in it; None if none was passed.
    """

    hidden: Float[Array, "batch seq hidden"]
    router: RouterSums
    expert_ids: Int[Array, "moe_layers batch seq k"]
    cache: KVCache | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelOutput:
    """Logits in the model's dtype, the load-balancing loss (f32, equal to transformers'), and the rest of HiddenStates."""

    logits: Float[Array, "batch seq vocab"]
    aux_loss: Float[Array, ""]
    router: RouterSums
    expert_ids: Int[Array, "moe_layers batch seq k"]
    cache: KVCache | None

    @property
    def expert_load(self) -> Int[Array, "moe_layers experts"]:
        """Number of tokens that each expert of each MoE layer received; padding is not counted."""
        return self.router.expert_load
