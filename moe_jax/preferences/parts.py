"""A device's parts of a preference loss and of its metrics: their sums over micro-batches and devices are the batch's means."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.layers.spread import OneDevice
from moe_jax.preferences.answers import AnswerSums
from moe_jax.preferences.losses import (
    Pair,
    dpo_loss,
    hinge_loss,
    ipo_loss,
    kto_baseline,
    kto_loss,
    orpo_loss,
    simpo_loss,
)
from moe_jax.preferences.settings import PreferenceSettings
from moe_jax.train.batch import Batch

Parts = dict[str, Float[Array, ""]]


def parts_of_pairs(
    settings: PreferenceSettings, found: AnswerSums, reference: Float[Array, "batch examples 2"], batch: Batch
) -> Parts:
    """Returns the parts of a loss of pairs.

    Args:
      found: of the segments of the rows; chosen and rejected answers take turns.
      reference: sums of log-probabilities; zeros for a loss without a reference.
      batch: with "num_examples" of the whole batch; with "num_answer_labels" for a loss with a reference.
    """
    sums, means, lengths = (Pair(each[:, ::2], each[:, 1::2]) for each in (found.log_probs, found.means, found.lengths))
    of_reference, beta = Pair(reference[..., 0], reference[..., 1]), settings.scale
    # Rewards of losses with a reference are of whole answers, even where the loss is of means.
    log_probs = sums if settings.needs_reference else means
    match settings.loss:
        case "dpo":
            losses = dpo_loss(sums, of_reference, beta=beta, label_smoothing=settings.label_smoothing)
        case "hinge":
            losses = hinge_loss(sums, of_reference, beta=beta)
        case "ipo":
            of_means = Pair(*(summed / length.clip(1) for summed, length in zip(of_reference, lengths, strict=True)))
            losses = ipo_loss(means, of_means, beta=beta)
        case "orpo":
            losses = orpo_loss(means, beta=beta)
        case _:
            losses = simpo_loss(means, beta=beta, gamma=settings.gamma)

    def mean(values: Float[Array, "batch examples"]) -> Float[Array, ""]:
        return jnp.where(batch["example"] >= 0, values, 0).sum() / batch["num_examples"]

    rewards = Pair(*(beta * (own - other) for own, other in zip(log_probs, of_reference, strict=True)))
    parts = {
        "loss": mean(losses),
        "reward_chosen": mean(rewards.chosen),
        "reward_rejected": mean(rewards.rejected),
        "reward_accuracy": mean((rewards.chosen > rewards.rejected).astype(jnp.float32)),
        "log_prob_chosen": mean(log_probs.chosen),
        "log_prob_rejected": mean(log_probs.rejected),
    }
    if settings.needs_reference:
        ratios = sum(own - other for own, other in zip(sums, of_reference, strict=True))
        parts["kl"] = jnp.where(batch["example"] >= 0, ratios, 0).sum() / batch["num_answer_labels"]
    if settings.loss == "orpo":
        cross_entropy = -found.text_log_probs[:, ::2].sum() / batch["num_chosen_labels"]
        parts |= {"loss": parts["loss"] + cross_entropy, "chosen_cross_entropy": cross_entropy}
    return parts


class Baseline(NamedTuple):
    """KTO's baseline, and this device's part of the metric of that name."""

    kl: Float[Array, ""]
    part: Float[Array, ""]


def baseline_parts(log_ratios: Float[Array, "batch examples"], batch: Batch, spread: OneDevice, micro_batches: int) -> Baseline:
    """Returns KTO's baseline of a micro-batch, from its mismatched answers' log p/p_ref on all devices."""
    present = batch["example"] >= 0
    summed, count = jnp.where(present, log_ratios, 0).sum(), present.sum().astype(jnp.float32)
    total, total_count = spread.sum((summed, count))
    kl = kto_baseline(total / total_count.clip(1))
    return Baseline(kl, kl * count / total_count.clip(1) / micro_batches)


def parts_of_answers(
    settings: PreferenceSettings,
    policy: Float[Array, "batch examples"],
    reference: Float[Array, "batch examples"],
    baseline: Baseline,
    batch: Batch,
) -> Parts:
    """Returns the parts of KTO's loss.

    Args:
      policy, reference: sums of log-probabilities.
      batch: with "num_examples", "num_chosen" (desirable) and "num_rejected" of the whole batch.
    """
    present, desirable = batch["example"] >= 0, batch["desirable"] != 0
    weights: Any = dict(desirable_weight=settings.desirable_weight, undesirable_weight=settings.undesirable_weight)
    losses = kto_loss(policy, reference, desirable, baseline.kl, beta=settings.scale, **weights)
    parts = {"loss": jnp.where(present, losses, 0).sum() / batch["num_examples"], "kl": baseline.part}
    for name, kind in (("chosen", desirable), ("rejected", ~desirable)):
        rewards, log_probs = (
            jnp.where(present & kind, values, 0).sum() / batch[f"num_{name}"]
            for values in (settings.scale * (policy - reference), policy)
        )
        parts |= {f"reward_{name}": rewards, f"log_prob_{name}": log_probs}
    return parts
