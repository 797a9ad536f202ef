"""The router: which experts a token goes to and with what weight, and the losses that keep the experts evenly loaded.

Softmax over all experts, then top-k (Qwen3-MoE, Mixtral); `group_router` has DeepSeek's way. The load-balancing loss is that
of Switch Transformers (Fedus et al., 2021, https://arxiv.org/abs/2101.03961, eq. 4) with every one of the k choices counted;
the z-loss is that of ST-MoE (Zoph et al., 2022, https://arxiv.org/abs/2202.08906, eq. 5).
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.precision import at_least_f32
from moe_jax.kernels.varying import vary_alike, vary_as
from moe_jax.layers.balance import Sequences, sequence_balance
from moe_jax.layers.linear import normal_parameter


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterStatistics:
    """What the balancing losses and the metrics need, summed over the valid tokens (padding left out).

    Attributes:
      expert_load: how many tokens each expert received.
      probability_sum: the sum of the router's probabilities of each expert.
      z_loss_sum: the sum of logsumexp(logits)^2.
      num_tokens: how many tokens were valid.
      num_dropped: how many choices no expert computed for lack of capacity: 0 unless `ExpertParallel.drop` is set.
      num_rounds, num_shadows: rounds of the exchange with other devices' experts, and experts that were copied to all of them
        for the call (`parallel.expert.Exchange`), summed over the devices; without an exchange 1 and 0.
      entropy_sum: the sum of the entropies of the tokens' probabilities, in nats.
      sequence_balance_sum: the sum over the sequences of `balance.sequence_balance`; 0 unless it was asked for.
      num_sequences: how many sequences these are.
    """

    expert_load: Int[Array, "layers experts"]
    probability_sum: Float[Array, "layers experts"]
    z_loss_sum: Float[Array, "layers"]
    num_tokens: Float[Array, ""]
    num_dropped: Int[Array, "layers"]
    num_rounds: Int[Array, "layers"]
    num_shadows: Int[Array, "layers"]
    entropy_sum: Float[Array, "layers"]
    sequence_balance_sum: Float[Array, "layers"]
    num_sequences: Float[Array, ""]


class Routing(NamedTuple):
    """One layer's routing: weights f32 and experts int32 [tokens, k], and the layer's sums for RouterStatistics.

    `load_balancing_loss`, `router_z_loss` and the other losses here take it as they take RouterStatistics.
    """

    weights: Float[Array, "tokens k"]
    experts: Int[Array, "tokens k"]
    expert_load: Int[Array, "experts"]
    probability_sum: Float[Array, "experts"]
    z_loss_sum: Float[Array, ""]
    num_dropped: Int[Array, ""]
    num_rounds: Int[Array, ""]
    num_shadows: Int[Array, ""]
    entropy_sum: Float[Array, ""]
    sequence_balance_sum: Float[Array, ""]
    num_tokens: Float[Array, ""]


class ExpertBias(nnx.Variable):
    """One number an expert, f32, that is added where experts are chosen and nowhere else: a part of the model, and of its
    checkpoints, that no gradient reaches and no optimizer moves."""


class Router(nnx.Module):
    """A linear map to one logit an expert, and `route` on it."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        norm_topk_prob: bool,
        stddev: float = 0.02,
        stack: tuple[int, ...] = (),
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.weight = normal_parameter((*stack, num_experts, hidden_size), stddev, param_dtype, rngs)
        self.num_experts_per_tok = num_experts_per_tok
        self.norm_topk_prob = norm_topk_prob

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        valid: Bool[Array, "tokens"] | None = None,
        *,
        expert_ids: Int[Array, "tokens k"] | None = None,
        force_balanced: bool = False,
        sequences: Sequences | None = None,
    ) -> Routing:
        """Routes each token; see `route`. `force_balanced` deals the experts out in turn, for benchmarks."""
        logits = jnp.einsum("td,ed->te", x, self.weight[...].astype(x.dtype), preferred_element_type=at_least_f32(x.dtype))
        if force_balanced:
            expert_ids = balanced_expert_ids(x.shape[0], self.num_experts_per_tok, logits.shape[1])
        return self._route(logits, valid, expert_ids, sequences)

    def _route(self, logits, valid, expert_ids, sequences) -> Routing:
        return route(logits, self.num_experts_per_tok, self.norm_topk_prob, valid, expert_ids, sequences)


def route(
    logits: Float[Array, "tokens experts"],
    num_experts_per_tok: int,
    norm_topk_prob: bool,
    valid: Bool[Array, "tokens"] | None = None,
    expert_ids: Int[Array, "tokens k"] | None = None,
    sequences: Sequences | None = None,
) -> Routing:
    """p = softmax(logits) in f32; the k largest p are the weights, divided by their sum if `norm_topk_prob`.

    Gradients flow through the weights to all logits; the choice itself has none.

    Args:
      valid: tokens that count in the statistics (all if None); the others are routed and counted nowhere.
      expert_ids: routing replay: these experts instead of the top k, with weights from the live logits (as reinforcement
        learning needs when the rollout engine's choices must be trained on).
      sequences: for the sequence-wise balance loss; None leaves it out.
    """
    logits = logits.astype(at_least_f32(logits.dtype))
    probabilities = jax.nn.softmax(logits, axis=-1)
    experts = jax.lax.top_k(probabilities, num_experts_per_tok)[1] if expert_ids is None else expert_ids
    weights = jnp.take_along_axis(probabilities, experts, axis=-1)
    if norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return with_statistics(weights, experts, probabilities, logits, valid, sequences)


def with_statistics(
    weights: Float[Array, "tokens k"],
    experts: Int[Array, "tokens k"],
    probabilities: Float[Array, "tokens experts"],
    logits: Float[Array, "tokens experts"],
    valid: Bool[Array, "tokens"] | None,
    sequences: Sequences | None,
) -> Routing:
    """The routing with its sums over the valid tokens (all if None). `probabilities` are any scores, divided by their sum."""
    if valid is None:
        valid = jnp.ones(logits.shape[0], bool)
    counted = valid[:, None]
    load = jnp.zeros(logits.shape[1], jnp.int32).at[experts].add(jnp.broadcast_to(counted, experts.shape).astype(jnp.int32))
    z = jnp.where(valid, jnp.square(jax.nn.logsumexp(logits, axis=-1)), 0).sum()
    entropy = jnp.where(counted, jax.scipy.special.entr(jax.lax.stop_gradient(probabilities)), 0).sum()
    balance = jnp.zeros((), logits.dtype)
    if sequences is not None:
        balance = sequence_balance(probabilities, experts.shape[1], sequences)
    return Routing(
        weights=weights,
        experts=experts,
        expert_load=load,
        probability_sum=jnp.where(counted, probabilities, 0).sum(axis=0),
        z_loss_sum=z,
        num_dropped=jnp.zeros((), jnp.int32),
        num_rounds=jnp.ones((), jnp.int32),
        num_shadows=jnp.zeros((), jnp.int32),
        entropy_sum=entropy,
        sequence_balance_sum=balance,
        num_tokens=vary_as(valid.sum().astype(jnp.float32), logits),
    )


def balanced_expert_ids(num_tokens: int, num_experts_per_tok: int, num_experts: int) -> Int[Array, "tokens k"]:
    """Experts dealt out in turn: every expert receives the same number of tokens, up to one."""
    pairs = jnp.arange(num_tokens * num_experts_per_tok, dtype=jnp.int32)
    return (pairs % num_experts).reshape(num_tokens, num_experts_per_tok)


def sum_over_mesh(stats: RouterStatistics, axis_names: str | tuple[str, ...]) -> RouterStatistics:
    """The sums over the tokens of all devices along the mesh axes over which tokens are split; inside `jax.shard_map`.

    Of these sums the losses below, and the loads, are those of the whole batch on one device, not means of the devices' own.
    """
    return jax.tree.map(lambda a: jax.lax.psum(a, axis_names), stats)


def load_balancing_loss(routing: Routing | RouterStatistics, *, mesh_axes: str | tuple[str, ...] = ()) -> Float[Array, ""]:
    """E * sum_e f_e P_e with f and P averaged over the tokens of all layers together, as transformers computes it.

    f_e counts all k choices of a token, so a perfectly even load gives k, not 1.

    Args:
      routing: one layer's, as `MoE` returns it, or a model's (`ModelOutput.router`).
      mesh_axes: inside `jax.shard_map`, the mesh axes over which tokens are split: the loss is of the tokens of all devices.
    """
    expert_load, probability_sum, num_tokens = _sums(routing, mesh_axes, "expert_load", "probability_sum")
    layers, experts = expert_load.shape
    if layers == 0:
        return jnp.zeros((), jnp.float32)
    rows = num_tokens * layers
    fraction = expert_load.sum(axis=0).astype(probability_sum.dtype) / rows
    return experts * jnp.sum(fraction * (probability_sum.sum(axis=0) / rows))


def load_balancing_loss_per_layer(
    routing: Routing | RouterStatistics, *, mesh_axes: str | tuple[str, ...] = ()
) -> Float[Array, "layers"]:
    """E * sum_e f_e P_e of each layer by itself: shows, and can prevent, the collapse of one layer that the mean hides.

    Arguments as in `load_balancing_loss`.
    """
    expert_load, probability_sum, num_tokens = _sums(routing, mesh_axes, "expert_load", "probability_sum")
    fraction = expert_load.astype(probability_sum.dtype) / num_tokens
    return expert_load.shape[1] * jnp.sum(fraction * probability_sum / num_tokens, axis=-1)


def router_z_loss(routing: Routing | RouterStatistics, *, mesh_axes: str | tuple[str, ...] = ()) -> Float[Array, ""]:
    """The mean of logsumexp(logits)^2 over valid tokens and layers: keeps the logits small.

    Arguments as in `load_balancing_loss`.
    """
    z_loss_sum, num_tokens = _sums(routing, mesh_axes, "z_loss_sum")
    return z_loss_sum.sum() / (num_tokens * max(len(z_loss_sum), 1))


def sequence_balance_loss(stats: RouterStatistics) -> Float[Array, ""]:
    """DeepSeek-V3's loss without alpha: the mean over sequences of `balance.sequence_balance`, summed over the layers.

    Each layer has a loss of its own in the paper, so that its alpha = 0.0001 is the factor of this sum. Even loads give the
    number of layers. 0 if the model was not asked for `sequence_balance`.
    """
    return stats.sequence_balance_sum.sum() / jnp.maximum(stats.num_sequences, 1)


def _sums(routing: Routing | RouterStatistics, mesh_axes: str | tuple[str, ...], *names: str) -> list[Array]:
    """The named sums [layers, ...] and the number of tokens, at least 1, over all devices along `mesh_axes`."""
    sums = [getattr(routing, name) for name in names]
    if isinstance(routing, Routing):
        sums = [of_layer[None] for of_layer in sums]
    *sums, num_tokens = vary_alike([*sums, routing.num_tokens])
    if mesh_axes:
        *sums, num_tokens = jax.lax.psum([*sums, num_tokens], mesh_axes)
    return [*sums, jnp.maximum(num_tokens, 1)]
