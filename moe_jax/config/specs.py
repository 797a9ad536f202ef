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
      output_bias: False if, with `biases`, only the projections of queries, keys and values have them.
      head_norms: True if each query and key head has an RMSNorm.
      joint_norms: True if one norm covers all query heads, and one all key heads, in place of a norm for each head.
      norms_after_rope: True if rotated heads are normed, False if normed heads are rotated.
      interleaved: True if rotary pairs are neighbors, False if they are `rotary_dim / 2` apart.
      clip: largest absolute value of projected queries, keys and values; None if there is no limit.
      sinks: True if each query head has a learned extra score in its softmax, which belongs to no token.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rotary_dim: int
    biases: bool = False
    output_bias: bool = True
    head_norms: bool = False
    joint_norms: bool = False
    norms_after_rope: bool = False
    interleaved: bool = False
    clip: float | None = None
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


TINY = 1e-20
"""Added to sums of scores before dividing by them, as in DeepSeek and transformers."""


@dataclass(frozen=True)
class RouterRule:
    """The rule from a router's logits to choices and weights (`layers.router.route_by_groups`). Defaults: Qwen3-MoE's.

    Attributes:
      scoring_func: "sigmoid" of each logit, or "softmax" over all.
      num_groups: number of equal groups of consecutive experts. The router first chooses groups; 1 if it chooses among all
        experts.
      groups_per_token: largest number of groups that hold a token's experts.
      group_score_size: number of a group's best scores that are summed to the group's score.
      norm_topk_prob: True divides a token's weights by their sum.
      routed_scaling_factor: factor on the weights after that division.
      added_to_sum: added to the sum before that division; 0 replaces the sum of a token without any expert by 1.
      least_sum: smallest divisor.
      choice_bias: True if a bias of each expert is added to its score, only for the choice.
      linear_bias: True if a trained bias of each expert is added to its logit.
    """

    scoring_func: str = "softmax"
    num_groups: int = 1
    groups_per_token: int = 1
    group_score_size: int = 2
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    added_to_sum: float = 0.0
    least_sum: float = 0.0
    choice_bias: bool = False
    linear_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """The experts of each sparse layer of a model.

    Attributes:
      num_experts: routed experts of a layer.
      num_experts_per_tok: experts that the router chooses for each token (k).
      moe_intermediate_size: width of one routed expert's activation.
      shared_intermediate_size: total width of the shared experts, which process every token; 0 if there are none.
      shared_gate: True if the shared experts' output is multiplied by the sigmoid of a learned score of each token.
      output_norm: True if an RMSNorm follows the sum of routed and shared experts.
      biases: True if each matrix of a routed expert has a bias.
      activation: alpha, limit and offset of the gated activation (`kernels.Activation`).
      rule: how the router chooses experts, and their weights.
      aux_loss_coef: default factor of the load-balancing loss over a whole batch.
      sequence_loss_coef: default factor of the load-balancing loss within each sequence.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    output_norm: bool = False
    biases: bool = False
    activation: tuple[float, float | None, float] = (1.0, None, 0.0)
    rule: RouterRule = RouterRule()
    aux_loss_coef: float = 0.0
    sequence_loss_coef: float = 0.0
