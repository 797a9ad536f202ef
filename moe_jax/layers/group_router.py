"""DeepSeek's router: chooses experts within a few groups; a bias keeps their load even and has no part in the weights.

Group-limited routing is DeepSeek-V2's (2024, https://arxiv.org/abs/2405.04434, section 2.1.3: a group is a device), sigmoid
scores and the bias are DeepSeek-V3's (2024, https://arxiv.org/abs/2412.19437, eq. 12 to 16: a group is a node).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer

from moe_jax.kernels.top_k import top_k_indices
from moe_jax.layers.balance import Sequences
from moe_jax.layers.router import ExpertBias, Router, Routing, scores_of_replayed
from moe_jax.layers.router_sums import RouterSums

TINY = 1e-20
"""Added to sums of scores before a division by them, as DeepSeek and transformers do."""


@dataclass(frozen=True)
class GroupRule:
    """The rule that makes choices and weights from scores.

    Attributes:
      scoring_func: "sigmoid" of each logit, or "softmax" over all.
      num_groups: number of equal groups of consecutive experts.
      groups_per_token: largest number of groups that hold a token's experts.
      group_score_size: number of a group's best scores that are summed to the group's score.
      norm_topk_prob: True divides a token's weights by their sum.
      routed_scaling_factor: factor on the weights after that division.
    """

    scoring_func: str = "sigmoid"
    num_groups: int = 1
    groups_per_token: int = 1
    group_score_size: int = 2
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


class GroupRouter(Router):
    """A linear map to one logit per expert, and `route_by_groups` on the logits; `has_bias` adds an `ExpertBias` of zeros."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        rule: GroupRule,
        *,
        has_bias: bool = True,
        stddev: float = 0.02,
        stack: tuple[int, ...] = (),
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            hidden_size,
            num_experts,
            num_experts_per_tok,
            norm_topk_prob=rule.norm_topk_prob,
            stddev=stddev,
            stack=stack,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.rule = rule
        self.expert_bias = ExpertBias(jnp.zeros((*stack, num_experts), jnp.float32)) if has_bias else None

    def _route(self, logits, valid, expert_ids) -> Routing:
        bias = None if self.expert_bias is None else self.expert_bias[...]
        return route_by_groups(logits, self.num_experts_per_tok, self.rule, bias, valid, expert_ids)


def route_by_groups(
    logits: Float[Array, "tokens experts"],
    num_experts_per_tok: int,
    rule: GroupRule,
    bias: Float[Array, "experts"] | None = None,
    valid: Bool[Array, "tokens"] | Sequences | None = None,
    expert_ids: Integer[Array, "tokens k"] | None = None,
) -> Routing:
    """Chooses the k largest s + bias in the best groups, with s = sigmoid or softmax of the logits in f32.

        weights = factor * s / (sum of the chosen s + 1e-20)       (without `norm_topk_prob` factor * s)

    Gradients flow through the weights to the chosen experts' s, and from there to their logits (with softmax, to all). The
    choice has no gradient; neither have the bias and the experts not chosen. The probabilities in the routing's sums are
    s / sum_e s_e (DeepSeek-V3, eq. 18).

    Args:
      valid, expert_ids: as in `route`.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    scores = jax.nn.sigmoid(logits) if rule.scoring_func == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    if expert_ids is None:
        expert_ids = _choose(scores if bias is None else scores + bias, num_experts_per_tok, rule)
        weights = jnp.take_along_axis(scores, expert_ids, axis=-1)
    else:
        weights, expert_ids = scores_of_replayed(scores, expert_ids)
    if rule.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + TINY)
    probabilities = scores / (scores.sum(axis=-1, keepdims=True) + TINY) if rule.scoring_func == "sigmoid" else scores
    sums = RouterSums.of(probabilities, logits, expert_ids, valid)
    return Routing(weights * rule.routed_scaling_factor, expert_ids, sums)


def _choose(preference: Float[Array, "tokens experts"], num_experts_per_tok: int, rule: GroupRule) -> Int[Array, "tokens k"]:
    """Returns the most preferred experts of the best groups."""
    tokens = preference.shape[0]
    if rule.groups_per_token < rule.num_groups:
        groups = preference.reshape(tokens * rule.num_groups, -1)
        group_scores = jnp.take_along_axis(groups, top_k_indices(groups, rule.group_score_size), axis=1).sum(axis=1)
        best = top_k_indices(group_scores.reshape(tokens, -1), rule.groups_per_token)
        is_best = (best[:, :, None] == jnp.arange(rule.num_groups)).any(axis=1)
        preference = jnp.where(is_best.reshape(-1, 1), groups, -jnp.inf).reshape(preference.shape)
    return top_k_indices(preference, num_experts_per_tok)
