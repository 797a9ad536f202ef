"""A preference loss as the objective of a training step."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.layers.lora import has_adapters
from moe_jax.layers.router import load_balancing_loss
from moe_jax.layers.spread import OneDevice
from moe_jax.models.decoder import Decoder
from moe_jax.preferences import losses
from moe_jax.preferences.answers import AnswerSums, answer_log_probs, answer_sums, reference_log_probs, sum_of_rows
from moe_jax.preferences.batches import KL
from moe_jax.preferences.losses import Pair
from moe_jax.preferences.settings import PreferenceSettings
from moe_jax.train.batch import BATCH_ARRAYS, Batch
from moe_jax.train.objective import Objective, refuse_further_predictors

Parts = dict[str, Float[Array, ""]]


@dataclass(frozen=True)
class Preference(Objective):
    """A preference loss for `train.make_train_step`. Batches are as in `preferences.batches`.

        objective = preferences.Preference(preferences.PreferenceSettings("dpo", beta=0.1))
        step = train.make_train_step(nnx.graphdef(model), optimizer, objective, gradient_accumulation=4)

    Chosen and rejected answers run in one forward pass. The loss is the mean over all pairs, or answers, of the whole batch,
    however they are dealt out to micro-batches and devices. ORPO adds the cross-entropy of the chosen texts, a mean over
    their tokens, prompts too. KTO's baseline is the mean over a micro-batch, on all devices.

    The reference of a model with adapters is the same model with its adapters left off. For other models the batch has
    "reference_log_probs" (`preferences.reference_log_probs`). Where it is there, it is used.

    Metrics of a step, beside those of every step:

    - loss: the preference loss; aux_loss: the router's, if it has a coefficient.
    - reward_chosen, reward_rejected: means of beta * log p/p_ref, or of beta * mean log p for losses without a reference.
      KTO's are means over desirable and over other answers.
    - reward_margin: their difference; reward_accuracy: the part of pairs whose chosen answer has the higher reward.
    - log_prob_chosen, log_prob_rejected: means over answers; ORPO's and SimPO's answers have means over tokens.
    - kl: of pairs with a reference, the mean over the answers' tokens of log p - log p_ref; of KTO its baseline.
    - chosen_cross_entropy: a term of ORPO's loss.

    Raises:
      ValueError: at the first step, a model without adapters and a batch without "reference_log_probs"; or a batch without
        the arrays that the loss needs. Also modules that predict further tokens.
    """

    settings: PreferenceSettings = PreferenceSettings()

    def prepare(self, batch: Batch, label_weight: Float[Array, ""]) -> Batch:
        """Returns the arrays that the loss reads, and the numbers of the whole batch that its means are divided by."""
        loss, of_pairs = self.settings.loss, self.settings.of_pairs
        names = [*BATCH_ARRAYS, "example"] + ([] if of_pairs else ["desirable", *(KL + name for name in BATCH_ARRAYS)])
        if missing := [name for name in names if name not in batch]:
            raise ValueError(f"a batch for loss={loss!r} needs the array(s) {', '.join(missing)}")
        if of_pairs and "desirable" in batch:
            raise ValueError(f"loss={loss!r} needs pairs of answers; the batch has single ones, for loss='kto'")
        prepared = {name: batch[name] for name in names}
        if self.settings.needs_reference and "reference_log_probs" in batch:
            prepared["reference_log_probs"] = batch["reference_log_probs"]
        present = batch["example"] >= 0
        counts = {"num_examples": present}
        if not of_pairs:
            counts |= {"num_chosen": present & (batch["desirable"] != 0), "num_rejected": present & (batch["desirable"] == 0)}
        if loss == "orpo":
            # All tokens of chosen texts but the last of each.
            counts["num_chosen_labels"] = jnp.append(batch["segment_ids"].ravel() % 2, -1 * present.ravel())
        if of_pairs and self.settings.needs_reference:
            counts["num_answer_labels"] = batch["loss_mask"] != 0
        return prepared | {name: counted.sum().astype(jnp.float32).clip(1) for name, counted in counts.items()}

    def __call__(self, model: Decoder, batch: Batch) -> tuple[Float[Array, ""], Parts]:
        """Returns the micro-batch's part of the loss, and its parts of the metrics; raises as the class says."""
        refuse_further_predictors(model.config)
        spread, coefficient = model.execution.spread, self.settings.aux_loss_coef
        examples = batch["example"].shape[1]
        states = model.hidden_states(batch["tokens"], batch["positions"], batch["segment_ids"])
        found = answer_sums(model, states, batch, 2 * examples if self.settings.of_pairs else examples)
        reference = self._reference(model, batch)
        if self.settings.of_pairs:
            parts = parts_of_pairs(self.settings, found, reference, batch)
        else:
            mismatched = answer_log_probs(model, batch, examples, KL)
            kl = baseline_parts(mismatched - reference[..., 1], batch, spread, self.micro_batches)
            parts = parts_of_answers(self.settings, found.log_probs, reference[..., 0], kl, batch)
        parts = sum_of_rows(spread, parts)
        value = parts["loss"]
        if coefficient:
            parts["aux_loss"] = load_balancing_loss(spread.sum(states.router)) / self.micro_batches
            value = value + coefficient * parts["aux_loss"]
        return value, parts

    def metrics(self, value: Float[Array, ""], aux: Parts, label_weight: Float[Array, ""]) -> dict[str, Array]:
        """Returns the metrics that the class lists."""
        return aux | {"reward_margin": aux["reward_chosen"] - aux["reward_rejected"]}

    def _reference(self, model: Decoder, batch: Batch) -> Float[Array, "batch examples 2"]:
        """Returns the reference's log-probabilities; zeros for losses without a reference."""
        if not self.settings.needs_reference:
            return jnp.zeros((*batch["example"].shape, 2))
        if "reference_log_probs" in batch:
            return batch["reference_log_probs"]
        if not has_adapters(model):
            raise ValueError(
                f"loss={self.settings.loss!r} compares with a reference model: train adapters (adapters.add_lora), or put "
                'batch["reference_log_probs"] = preferences.reference_log_probs(reference_model, batch) into each batch'
            )
        return reference_log_probs(model, batch)


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
            per_pair = losses.dpo_loss(sums, of_reference, beta=beta, label_smoothing=settings.label_smoothing)
        case "hinge":
            per_pair = losses.hinge_loss(sums, of_reference, beta=beta)
        case "ipo":
            of_means = Pair(*(summed / length.clip(1) for summed, length in zip(of_reference, lengths, strict=True)))
            per_pair = losses.ipo_loss(means, of_means, beta=beta)
        case "orpo":
            per_pair = losses.orpo_loss(means, beta=beta)
        case _:
            per_pair = losses.simpo_loss(means, beta=beta, gamma=settings.gamma)

    def mean(values: Float[Array, "batch examples"]) -> Float[Array, ""]:
        return jnp.where(batch["example"] >= 0, values, 0).sum() / batch["num_examples"]

    rewards = Pair(*(beta * (own - other) for own, other in zip(log_probs, of_reference, strict=True)))
    parts = {
        "loss": mean(per_pair),
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


def baseline_parts(log_ratios: Float[Array, "batch examples"], batch: Batch, spread: OneDevice, micro_batches: int) -> tuple:
    """Returns KTO's baseline of a micro-batch, by its mismatched answers' log p/p_ref on all devices, and its part of `kl`."""
    present = batch["example"] >= 0
    summed, count = jnp.where(present, log_ratios, 0).sum(), present.sum().astype(jnp.float32)
    total, total_count = sum_of_rows(spread, (summed, count))
    kl = losses.kto_baseline(total / total_count.clip(1))
    return kl, kl * count / total_count.clip(1) / micro_batches


def parts_of_answers(
    settings: PreferenceSettings,
    policy: Float[Array, "batch examples"],
    reference: Float[Array, "batch examples"],
    baseline: tuple[Float[Array, ""], Float[Array, ""]],
    batch: Batch,
) -> Parts:
    """Returns the parts of KTO's loss.

    Args:
      policy, reference: sums of log-probabilities.
      baseline: as `baseline_parts` returns it.
      batch: with "num_examples", "num_chosen" (desirable) and "num_rejected" of the whole batch.
    """
    present, desirable, (kl, kl_part) = batch["example"] >= 0, batch["desirable"] != 0, baseline
    weights: Any = dict(desirable_weight=settings.desirable_weight, undesirable_weight=settings.undesirable_weight)
    per_answer = losses.kto_loss(policy, reference, desirable, kl, beta=settings.scale, **weights)
    parts = {"loss": jnp.where(present, per_answer, 0).sum() / batch["num_examples"], "kl": kl_part}
    for name, kind in (("chosen", desirable), ("rejected", ~desirable)):
        rewards, log_probs = (
            jnp.where(present & kind, values, 0).sum() / batch[f"num_{name}"]
            for values in (settings.scale * (policy - reference), policy)
        )
        parts |= {f"reward_{name}": rewards, f"log_prob_{name}": log_probs}
    return parts
