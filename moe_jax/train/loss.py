"""The training loss: next-token cross-entropy, the router's balancing losses and z-loss, and the multi-token prediction (MTP)
loss.

    part  = ce_sum / num_labels + aux_loss_coef * load_balancing_loss + sequence_loss_coef * sequence_balance_loss
            + z_loss_coef * router_z_loss
    total = part of the model + mtp_loss_coef * mean over its modules of (part of the module)

An MTP module (`models.mtp`) has its own labels and router sums. Its cross-entropy is divided by the model's number of labels,
which has a few more than the module. So the total matches DeepSeek-V3's equations 24 and 25 (https://arxiv.org/abs/2412.19437).

If labels have weights (a loss_mask of f32), each label's loss is multiplied by its weight. num_labels is then their sum.
`log_probs` is the building block for your own losses (DPO, GRPO, distillation).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.kernels import cross_entropy
from moe_jax.kernels.vocabulary import TokenScores, token_log_probs, token_log_probs_and_entropies
from moe_jax.layers.router import load_balancing_loss, router_z_loss, sequence_balance_loss
from moe_jax.layers.router_sums import RouterSums
from moe_jax.layers.segments import has_successor, shift_left
from moe_jax.layers.spread import OneDevice
from moe_jax.models.decoder import Decoder
from moe_jax.models.output import HiddenStates
from moe_jax.train.batch import Batch, as_divisor


@dataclass(frozen=True)
class LossWeights:
    """The coefficients of the losses other than the cross-entropy.

    Attributes:
      aux_loss_coef: of the load-balancing loss.
      sequence_loss_coef: of the balance loss within each sequence.
      z_loss_coef: of the router's z-loss.
      mtp_loss_coef: of the MTP modules, if the model has any. 0: they are not run.
    """

    aux_loss_coef: float = 0.0
    sequence_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    mtp_loss_coef: float = 0.1


class LossParts(NamedTuple):
    """The terms of the training loss, unweighted router losses, and router statistics, summed over devices.

    Attributes:
      cross_entropy: summed over the labels, each times its weight.
      num_labels: the sum of the labels' weights, which is their number if all weights are 1.
      aux_loss, z_loss: `load_balancing_loss` and `router_z_loss` of the model.
      sequence_loss: `sequence_balance_loss` of the model; 0 if its coefficient is 0.
      router: the router's sums. The MTP modules' rows follow the rows of the model's layers. `num_tokens` counts the model's
        tokens. `num_rounds` and `num_shadows` are means over the devices.
      routed_tokens: the number of tokens that each row of `router` counts.
      mtp_cross_entropy: the MTP modules' cross-entropy, summed over labels, as a mean over modules; 0 without modules.
    """

    cross_entropy: Float[Array, ""]
    num_labels: Float[Array, ""]
    aux_loss: Float[Array, ""]
    sequence_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    router: RouterSums
    routed_tokens: Float[Array, "moe_layers"]
    mtp_cross_entropy: Float[Array, ""]


def loss(
    model: Decoder,
    batch: Batch,
    weights: LossWeights = LossWeights(),
    *,
    num_labels: Float[Array, ""] | None = None,
    router_share: float = 1.0,
) -> tuple[Float[Array, ""], LossParts]:
    """Computes the training loss (f32) and its `LossParts`; the [batch*seq, vocab] logits never exist.

    `model.execution` defines recomputation and, inside `jax.shard_map`, how the call is spread over devices. Total and parts
    are then sums over all devices of `spread.mesh_axes`. So are gradients under `check_vma`, taken inside or outside.

    Args:
      num_labels: the divisor of the cross-entropy; default: the sum of the weights of this batch's labels. A micro-batch is
        given the whole batch's sum, so that losses and gradients of micro-batches add up to the batch's.
      router_share: a factor on the router's losses: 1 / the number of micro-batches.

    Raises:
      ValueError: the spread's `mesh_axes` lack the axis of its `context`.
    """
    spread = model.execution.spread
    # Sums over devices would leave out the axis that splits the sequences.
    if spread.context is not None and spread.context.axis_name not in spread.mesh_axes:
        raise ValueError(
            f"mesh_axes must name the axis of Spread.context, {spread.context.axis_name!r}; got {spread.mesh_axes}"
        )
    tokens = (batch["tokens"], batch["positions"], batch["segment_ids"])
    states = model.hidden_states(*tokens, sequence_balance=weights.sequence_loss_coef != 0)
    return loss_of_states(model, states, batch, weights, num_labels=num_labels, router_share=router_share)


def loss_of_states(
    model: Decoder,
    states: HiddenStates,
    batch: Batch,
    weights: LossWeights = LossWeights(),
    *,
    num_labels: Float[Array, ""] | None = None,
    router_share: float = 1.0,
) -> tuple[Float[Array, ""], LossParts]:
    """Computes `loss` from hidden states that were already computed. MTP modules run here.

    Args:
      states: from a call with `sequence_balance` if the loss has that term. Other arguments as in `loss`.
    """
    spread = model.execution.spread
    tokens, segments = (batch["tokens"], batch["positions"], batch["segment_ids"]), batch["segment_ids"]
    sequence_balance = weights.sequence_loss_coef != 0
    parts = _parts(model, states, batch["labels"], batch["loss_mask"], spread)
    divisor = as_divisor(parts.num_labels if num_labels is None else num_labels)

    def weighted(parts: LossParts) -> Float[Array, ""]:
        balance = weights.aux_loss_coef * parts.aux_loss + weights.sequence_loss_coef * parts.sequence_loss
        return parts.cross_entropy / divisor + router_share * (balance + weights.z_loss_coef * parts.z_loss)

    if not (weights.mtp_loss_coef and model.config.mtp_stages):
        return weighted(parts), parts
    modules = []
    further = model.mtp_hidden_states(states.hidden, *tokens, sequence_balance=sequence_balance)
    for k, of_module in enumerate(further, start=1):
        labels, mask = (shift_left(batch[name], k, spread.context) for name in ("labels", "loss_mask"))
        modules.append(_parts(model, of_module, labels, mask * has_successor(segments, k, spread.context), spread))
    total = weighted(parts) + weights.mtp_loss_coef / len(modules) * sum(map(weighted, modules))
    return total, parts._replace(
        router=RouterSums.concatenate([p.router for p in (parts, *modules)]),
        routed_tokens=jnp.concatenate([p.routed_tokens for p in (parts, *modules)]),
        mtp_cross_entropy=jnp.stack([p.cross_entropy for p in modules]).mean(),
    )


def _parts(model: Decoder, states: HiddenStates, labels, mask, spread: OneDevice) -> LossParts:
    """Returns the parts for the model's hidden states, or one module's, summed over devices."""
    hidden = states.hidden.reshape(-1, states.hidden.shape[-1])
    mask = mask if jnp.issubdtype(mask.dtype, jnp.floating) else mask != 0
    own_sums = cross_entropy(hidden, model.head_weight, labels.reshape(-1), mask.reshape(-1))
    summed, num_labels = spread.sum(own_sums)
    router = spread.sum(states.router)
    devices = math.prod(map(jax.lax.axis_size, spread.mesh_axes))
    return LossParts(
        cross_entropy=summed,
        num_labels=num_labels,
        aux_loss=load_balancing_loss(router),
        sequence_loss=sequence_balance_loss(router),
        z_loss=router_z_loss(router),
        router=replace(router, num_rounds=router.num_rounds / devices, num_shadows=router.num_shadows / devices),
        routed_tokens=jnp.full_like(router.entropy_sum, router.num_tokens),
        mtp_cross_entropy=jnp.zeros_like(summed),
    )


def log_probs(model: Decoder, batch: Batch) -> Float[Array, "batch seq"]:
    """Returns log p(label) of each label, f32 [batch, seq], 0 where `loss_mask` is 0; logits never exist in full.

        sequence_log_probs = train.log_probs(model, batch).sum(axis=1)
        cross_entropy = -train.log_probs(model, batch).sum() / batch["loss_mask"].sum()

    Weights in `loss_mask` do not multiply them.
    `model.execution` defines recomputation and how the call is spread over devices. On a mesh the result is for the device's
    own tokens.

    Args:
      batch: "tokens", "labels", "loss_mask", all [batch, seq]. Also "segment_ids", if rows hold more than one document each.
        "positions" follow from the segments unless they are given. "expert_ids" [batch, seq, moe_layers, k], if given, are the
        experts of each token (routing replay).

    Raises:
      ValueError: shapes that do not match.
    """
    return _of_labels(token_log_probs, model, batch)


def log_probs_and_entropies(model: Decoder, batch: Batch) -> TokenScores:
    """Returns `log_probs`, and the entropy of the model's prediction at each label, in nats; both [batch, seq].

    Entropies are 0 where `loss_mask` is 0. They need no extra pass over the logits. Arguments and errors as in `log_probs`.
    """
    return _of_labels(token_log_probs_and_entropies, model, batch)


def _of_labels(function: Callable, model: Decoder, batch: Batch) -> Any:
    states, labels = hidden_states_of(model, batch), batch["labels"]
    found = function(states.hidden.reshape(-1, states.hidden.shape[-1]), model.head_weight, labels.reshape(-1))
    return jax.tree.map(lambda each: jnp.where(batch["loss_mask"] != 0, each.reshape(labels.shape), 0), found)


def hidden_states_of(model: Decoder, batch: Batch) -> HiddenStates:
    """Returns the hidden states of a batch's tokens, computed by the experts of "expert_ids" if the batch has them."""
    ids, segments = batch.get("expert_ids"), batch.get("segment_ids")
    if ids is not None:
        ids = jnp.moveaxis(ids, 2, 0).astype(jnp.int32)
        if segments is not None:
            # Padding is routed to the first experts, as in a strict pass: other ids would give gradients with other bits.
            ids = jnp.where(segments[..., None] != 0, ids, jnp.arange(ids.shape[-1], dtype=jnp.int32))
    return model.hidden_states(batch["tokens"], batch.get("positions"), segments, expert_ids=ids)
