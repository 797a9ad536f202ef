"""Specs: describe a config's layers under one set of names, so that no other code checks for an architecture's class."""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

Shapes = tuple[tuple[int, ...], ...]


class Mixer(Protocol):
    """The part of a layer that mixes tokens, such as attention. Recurrent mixers keep a state per sequence, not per token."""

    @property
    def name(self) -> str:
        """The name in messages, for example "attention"."""

    @property
    def of_token(self) -> Shapes:
        """Shapes of the arrays that a layer's cache keeps for each token."""

    @property
    def of_sequence(self) -> Shapes:
        """Shapes of the f32 arrays that a layer keeps for each sequence and overwrites with every token."""

    def flops(self, keys: float) -> float:
        """Returns the forward FLOPs of a token that attends to `keys` tokens, without the layer's matmuls."""


@dataclass(frozen=True, kw_only=True)
class HeadsSpec:
    """Multi-head or grouped-query attention (`layers.attention`).

    All counts of elements are per token and layer.

    Attributes:
      heads, kv_heads: query heads, and heads of keys and values.
      key_dim, value_dim: width of a query or key head, and of a value head.
      rotary_dim: dimensions of a head that the rotary embedding rotates.
      biases: True if projections have biases.
      head_norms: True if each query and key head has an RMSNorm.
      sinks: True if each query head has a learned extra score in its softmax, which belongs to no token.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rotary_dim: int
    biases: bool = False
    head_norms: bool = False
    sinks: bool = False

    name: ClassVar[str] = "attention"
    of_sequence: ClassVar[Shapes] = ()

    @property
    def of_token(self) -> Shapes:
        """Shapes of one token's keys and values in the KV cache."""
        return (self.kv_heads, self.key_dim), (self.kv_heads, self.value_dim)

    @property
    def travelling_elements(self) -> int:
        """KV cache elements per token. With context parallelism these are sent to other devices."""
        return sum(map(math.prod, self.of_token))

    @property
    def head_elements(self) -> int:
        """Elements per token of the queries and of the attention output, over all heads."""
        return self.heads * (self.key_dim + self.value_dim)

    @property
    def key_value_elements(self) -> int:
        """Elements per token of keys and values, over all key and value heads."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def latent_value_dim(self) -> int | None:
        """Number of leading columns of a cached latent that serve as values; None if the cache holds keys and values."""
        return None

    @property
    def expansion(self) -> tuple[int, int]:
        """Rows and columns of the matrix that expands latents to keys and values; zeros without latents."""
        return 0, 0

    @property
    def expanded_elements(self) -> int:
        """Elements per token of keys and values expanded from latents; 0 without latents."""
        return self.key_value_elements if self.expansion[0] else 0

    @property
    def moved_elements(self) -> int:
        """Elements per token that norms, rotary embeddings and latent expansion read or write, for cost estimates."""
        return 2 * (self.heads + self.kv_heads) * self.key_dim

    def kept_elements(self, *, expanded: bool) -> int:
        """Returns the elements per token kept as residuals: output, values, and queries and keys before and after norms.

        Args:
          expanded: keys and values that are expanded from latents are kept too; else they are expanded again.
        """
        return self.moved_elements + (self.heads + self.kv_heads) * self.value_dim

    def flops(self, keys: float) -> float:
        """Returns the forward FLOPs per token of q k^T and p v, for `keys` visible keys."""
        return 2 * self.head_elements * keys

    def backward_flops(self, keys: float) -> float:
        """Returns the backward FLOPs per token. Scores that the kernels recompute do not count."""
        return self.heads * (6 * self.key_dim + 4 * self.value_dim) * keys


@dataclass(frozen=True, kw_only=True)
class LatentSpec(HeadsSpec):
    """Multi-head latent attention (MLA): the cache keeps latents, from which keys and values are expanded.

    Attributes:
      rank: width of a latent without its rotary key.
      query_rank: width of the queries' latent; 0 if one matrix computes the queries.
    """

    rank: int
    query_rank: int

    name: ClassVar[str] = "latent attention"

    @property
    def latent_dim(self) -> int:
        """Width of one cached row: the latent, then the rotary key that all heads share."""
        return self.rank + self.rotary_dim

    @property
    def of_token(self) -> Shapes:
        """Shape of one token's latent in the cache."""
        return ((self.latent_dim,),)

    @property
    def latent_value_dim(self) -> int:
        """Width of the latent without the rotary key."""
        return self.rank

    @property
    def expansion(self) -> tuple[int, int]:
        """Rows and columns of the matrix that computes all heads' keys and values, without the rotary part."""
        return self.heads * (self.key_dim - self.rotary_dim + self.value_dim), self.rank

    @property
    def moved_elements(self) -> int:
        """Elements per token that norms, rotary embeddings and latent expansion read or write, for cost estimates."""
        latents = self.query_rank + self.rank + self.latent_dim
        return 2 * (self.heads * self.key_dim + latents) + self.expansion[0] + self.key_value_elements

    def kept_elements(self, *, expanded: bool) -> int:
        """Returns the elements per token kept as residuals, including latents before and after their norms."""
        latents = 2 * self.query_rank + self.rank + self.latent_dim
        return self.head_elements + latents + (self.key_value_elements if expanded else 0)


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """The experts of each sparse layer of a model.

    Attributes:
      num_experts: routed experts of a layer.
      num_experts_per_tok: experts that the router chooses for each token (k).
      moe_intermediate_size: width of one routed expert's activation.
      shared_intermediate_size: total width of the shared experts, which process every token; 0 if there are none.
      num_groups: number of equal groups of consecutive experts. The router first chooses groups; 1 if it chooses among all
        experts.
      norm_topk_prob: True if the chosen experts' weights are divided by their sum.
      softmax_router: True if the router chooses the k largest of a softmax over all experts as weights; False: another rule.
      aux_loss_coef: default factor of the load-balancing loss over a whole batch.
      sequence_loss_coef: default factor of the load-balancing loss within each sequence.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0
    num_groups: int = 1
    norm_topk_prob: bool = True
    softmax_router: bool = True
    aux_loss_coef: float = 0.0
    sequence_loss_coef: float = 0.0
