"""The router chooses each token's experts and their weights; the losses here keep the experts evenly loaded.

Softmax over all experts, then top-k (Qwen3-MoE, Mixtral), or DeepSeek's router. It chooses experts within a few groups
(DeepSeek-V2, 2024, https://arxiv.org/abs/2405.04434, section 2.1.3: a group is a device). DeepSeek-V3 has sigmoid scores, and a
bias that keeps the load even and does not affect the weights (2024, https://arxiv.org/abs/2412.19437, eq. 12 to 16).

The load-balancing loss is
equation 4 of Switch Transformers (Fedus et al., 2021, https://arxiv.org/abs/2101.03961) with each of the k choices counted.
The z-loss is equation 5 of ST-MoE (Zoph et al., 2022, https://arxiv.org/abs/2202.08906).
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer

from moe_jax.config import RouterRule
from moe_jax.config.specs import TINY
from moe_jax.kernels.experts.routing import int32_ids, is_an_expert
from moe_jax.kernels.shapes import vary_alike
from moe_jax.kernels.top_k import top_k_indices
from moe_jax.layers.balance import Sequences
from moe_jax.layers.linear import LinearProduct, TicketedMatrix, TicketHolder, linear_map, linear_product_like, normal_parameter
from moe_jax.layers.lora import Adapter
from moe_jax.layers.router_sums import RouterSums


class Routing(NamedTuple):
    """The router's decision for one layer: experts, weights and statistics. Losses accept it or a model's `RouterSums`.

    Attributes:
      weights: f32 weight of each chosen expert.
      experts: the chosen experts' ids, int32; the number of experts for a replayed id outside the range.
      sums: the layer's statistics over the valid tokens.
    """

    weights: Float[Array, "tokens k"]
    experts: Int[Array, "tokens k"]
    sums: RouterSums


class ExpertBias(nnx.Variable):
    """A per-expert f32 bias added to the scores only to choose experts (auxiliary-loss-free balancing).

    It is part of the model and its checkpoints. It has no gradient, and the optimizer does not change it.
    """


class Router(TicketHolder):
    """A linear map to one logit per expert, then `route_by_groups` with `rule` (default: `RouterRule()`).

    `rule.choice_bias` adds an `ExpertBias`, and `rule.linear_bias` a trained bias of the logits; both are initially zero.
    """

    lora: Adapter | None = None
    expert_bias: ExpertBias | None = None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        rule: RouterRule | None = None,
        *,
        stddev: float = 0.02,
        stack: tuple[int, ...] = (),
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.weight: nnx.Variable = normal_parameter((*stack, num_experts, hidden_size), stddev, param_dtype, rngs)
        self.num_experts_per_tok = num_experts_per_tok
        self.rule = RouterRule() if rule is None else rule
        self.bias = nnx.Param(jnp.zeros((*stack, num_experts), param_dtype)) if self.rule.linear_bias else None
        self.expert_bias = ExpertBias(jnp.zeros((*stack, num_experts), jnp.float32)) if self.rule.choice_bias else None

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        valid: Bool[Array, "tokens"] | Sequences | None = None,
        *,
        expert_ids: Integer[Array, "tokens k"] | Literal["balanced"] | None = None,
    ) -> Routing:
        """Routes each token.

        Args:
          valid: as in `RouterSums.of`.
          expert_ids: routing replay, as in `route_by_groups`; "balanced" assigns experts in turn, for benchmarks.

        Raises:
          ValueError: `expert_ids` is a text other than "balanced".
        """
        matrix = TicketedMatrix(self.weight[...], self.held_ticket, None if self.lora is None else self.lora.factors)
        logits = linear_map(x, matrix, jnp.promote_types(x.dtype, jnp.float32))
        if self.bias is not None:
            logits = logits + self.bias[...].astype(logits.dtype)
        if isinstance(expert_ids, str):
            check_expert_choice(expert_ids)
            expert_ids = balanced_expert_ids(x.shape[0], self.num_experts_per_tok, logits.shape[1])
        bias = None if self.expert_bias is None else self.expert_bias[...]
        return route_by_groups(logits, self.num_experts_per_tok, self.rule, bias, valid, expert_ids)

    def products_like(self, x: Float[Array, "tokens hidden"]) -> LinearProduct:
        """Returns arrays with the shapes of the operands of the weight's gradient."""
        return linear_product_like(x, self.weight, jnp.promote_types(x.dtype, jnp.float32))


def route(
    logits: Float[Array, "tokens experts"],
    num_experts_per_tok: int,
    norm_topk_prob: bool,
    valid: Bool[Array, "tokens"] | Sequences | None = None,
    expert_ids: Integer[Array, "tokens k"] | None = None,
) -> Routing:
    """Computes p = softmax(logits) in f32 and uses the k largest p as weights, divided by their sum if `norm_topk_prob`.

    Gradients flow through the weights to all logits; the choice itself has none. Arguments as in `route_by_groups`.
    """
    return route_by_groups(logits, num_experts_per_tok, RouterRule(norm_topk_prob=norm_topk_prob), None, valid, expert_ids)


def route_by_groups(
    logits: Float[Array, "tokens experts"],
    num_experts_per_tok: int,
    rule: RouterRule,
    bias: Float[Array, "experts"] | None = None,
    valid: Bool[Array, "tokens"] | Sequences | None = None,
    expert_ids: Integer[Array, "tokens k"] | None = None,
) -> Routing:
    """Chooses the k largest s + bias in the best groups, with s = sigmoid or softmax of the logits in f32.

        weights = factor * s / (sum of the chosen s + 1e-20)       (without `norm_topk_prob` factor * s)

    Gradients flow through the weights to the chosen experts' s, and from there to their logits (with softmax, to all). The
    choice, the bias and the experts not chosen have no gradient. The probabilities in the routing's sums are s / sum_e s_e
    (DeepSeek-V3, eq. 18).

    Args:
      valid: as in `RouterSums.of`. Tokens that are not valid are not routed or counted.
      expert_ids: routing replay: these experts instead of the best, with weights from the live logits. Reinforcement learning
        needs this to train on the rollout engine's choices. An id outside [0, experts), such as -1, adds nothing: its weight is
        0, and it is not counted. The token's other weights are normalised without it. Any integer dtype.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    is_sigmoid, is_replayed = rule.scoring_func == "sigmoid", expert_ids is not None
    scores = jax.nn.sigmoid(logits) if is_sigmoid else jax.nn.softmax(logits, axis=-1)
    if expert_ids is None:
        experts = checkpoint_name(_choose(scores if bias is None else scores + bias, num_experts_per_tok, rule), "router")
        weights = jnp.take_along_axis(scores, experts, axis=-1)
    else:
        weights, experts = scores_of_replayed(scores, expert_ids)
    if rule.norm_topk_prob:
        total = weights.sum(axis=-1, keepdims=True)
        if rule.added_to_sum:
            total = total + rule.added_to_sum
        elif is_replayed:
            # A token without any expert would compute 0 / 0.
            total = jnp.where((experts < logits.shape[1]).any(axis=-1, keepdims=True), total, 1)
        if rule.least_sum:
            total = jnp.maximum(total, rule.least_sum)
        weights = weights / total
    probabilities = scores / (scores.sum(axis=-1, keepdims=True) + TINY) if is_sigmoid else scores
    sums = RouterSums.of(probabilities, logits, experts, valid)
    return Routing(weights if rule.routed_scaling_factor == 1 else weights * rule.routed_scaling_factor, experts, sums)


def _choose(preference: Float[Array, "tokens experts"], num_experts_per_tok: int, rule: RouterRule) -> Int[Array, "tokens k"]:
    """Returns the most preferred experts of the best groups."""
    tokens = preference.shape[0]
    if rule.groups_per_token < rule.num_groups:
        groups = preference.reshape(tokens * rule.num_groups, -1)
        group_scores = jnp.take_along_axis(groups, top_k_indices(groups, rule.group_score_size), axis=1).sum(axis=1)
        best = top_k_indices(group_scores.reshape(tokens, -1), rule.groups_per_token)
        is_best = (best[:, :, None] == jnp.arange(rule.num_groups)).any(axis=1)
        preference = jnp.where(is_best.reshape(-1, 1), groups, -jnp.inf).reshape(preference.shape)
    return top_k_indices(preference, num_experts_per_tok)


def scores_of_replayed(
    scores: Float[Array, "tokens experts"], expert_ids: Integer[Array, "tokens k"]
) -> tuple[Float[Array, "tokens k"], Int[Array, "tokens k"]]:
    """Returns scores and int32 ids of replayed experts; an id outside [0, experts) gets score 0 and id `experts`."""
    num_experts = scores.shape[1]
    known = is_an_expert(expert_ids, num_experts)
    ids = jnp.where(known, int32_ids(expert_ids, num_experts), num_experts)
    return jnp.take_along_axis(scores, ids, axis=-1, mode="fill", fill_value=0), ids


def check_expert_choice(text: str) -> None:
    """Checks that text passed as expert ids is "balanced".

    Raises:
      ValueError: the text is not "balanced".
    """
    if text != "balanced":
        raise ValueError(f"expert_ids must be an array of ids, None or 'balanced'; got {text!r}")


def balanced_expert_ids(num_tokens: int, num_experts_per_tok: int, num_experts: int) -> Int[Array, "tokens k"]:
    """Assigns experts round-robin, so that their token counts differ by at most one."""
    pairs = jnp.arange(num_tokens * num_experts_per_tok, dtype=jnp.int32)
    return (pairs % num_experts).reshape(num_tokens, num_experts_per_tok)


def load_balancing_loss(routing: Routing | RouterSums, *, mesh_axes: str | tuple[str, ...] = ()) -> Float[Array, ""]:
    """Computes the loss E * sum_e f_e P_e, with f and P averaged over tokens of all layers, as transformers does.

    f_e counts all k choices of a token, so a perfectly even load yields k, not 1.

    Args:
      routing: one layer's, returned by `MoE`, or a model's (`ModelOutput.router`).
      mesh_axes: inside `jax.shard_map`, the mesh axes over which tokens are split. The loss is over the tokens of all devices.
    """
    sums = _layers(routing, mesh_axes)
    layers, experts = sums.expert_load.shape
    if layers == 0:
        return jnp.zeros((), jnp.float32)
    rows = jnp.maximum(sums.num_tokens, 1) * layers
    fraction = sums.expert_load.sum(axis=0).astype(sums.probability_sum.dtype) / rows
    return experts * jnp.sum(fraction * (sums.probability_sum.sum(axis=0) / rows))


def load_balancing_loss_per_layer(
    routing: Routing | RouterSums, *, mesh_axes: str | tuple[str, ...] = ()
) -> Float[Array, "layers"]:
    """Computes E * sum_e f_e P_e separately for each layer, shape [layers].

    It reveals, and can prevent, the collapse of one layer that a mean hides.

    Arguments as in `load_balancing_loss`.
    """
    sums = _layers(routing, mesh_axes)
    num_tokens = jnp.maximum(sums.num_tokens, 1)
    fraction = sums.expert_load.astype(sums.probability_sum.dtype) / num_tokens
    return sums.expert_load.shape[1] * jnp.sum(fraction * sums.probability_sum / num_tokens, axis=-1)


def router_z_loss(routing: Routing | RouterSums, *, mesh_axes: str | tuple[str, ...] = ()) -> Float[Array, ""]:
    """Computes the mean of logsumexp(logits)^2 over valid tokens and layers, which keeps the logits small.

    Arguments as in `load_balancing_loss`.
    """
    sums = _layers(routing, mesh_axes)
    return sums.z_loss_sum.sum() / (jnp.maximum(sums.num_tokens, 1) * max(len(sums.z_loss_sum), 1))


def sequence_balance_loss(routing: Routing | RouterSums, *, mesh_axes: str | tuple[str, ...] = ()) -> Float[Array, ""]:
    """Computes DeepSeek-V3's loss without alpha: the mean over sequences of `balance.sequence_balance`, summed over layers.

    In the paper each layer has its own loss, so its alpha = 0.0001 is the factor of this sum. Even loads yield the number of
    layers. The loss is 0 unless the model was called with `sequence_balance`. Arguments as in `load_balancing_loss`.
    """
    sums = _layers(routing, mesh_axes)
    return sums.sequence_balance_sum.sum() / jnp.maximum(sums.num_sequences, 1)


def _layers(routing: Routing | RouterSums, mesh_axes: str | tuple[str, ...]) -> RouterSums:
    """Returns the sums with a layers axis, over all devices along `mesh_axes`."""
    sums = routing.sums if isinstance(routing, Routing) else routing
    if sums.z_loss_sum.ndim == 0:
        sums = RouterSums.stack([sums])
    sums = vary_alike(sums)
    return sums.psum(mesh_axes) if mesh_axes else sums
