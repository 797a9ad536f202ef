"""A preference loss as the objective of a training step, and the log-probabilities of answers that it compares.

Each answer is a segment of a packed row (`preferences.batches`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from moe_jax.adapters.merge import with_zero_changes, without_adapter
from moe_jax.kernels.shapes import vary_as
from moe_jax.kernels.vocabulary import token_log_probs
from moe_jax.layers.lora import has_adapters
from moe_jax.layers.router import load_balancing_loss
from moe_jax.layers.spread import OneDevice
from moe_jax.models.decoder import Decoder
from moe_jax.models.output import HiddenStates
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.preferences import losses
from moe_jax.preferences.batches import KL, PreferenceBatches
from moe_jax.preferences.losses import Pair
from moe_jax.preferences.settings import PreferenceSettings
from moe_jax.train.batch import BATCH_ARRAYS, Batch, put_batch
from moe_jax.train.objective import Objective, refuse_further_predictors
from moe_jax.train.on_devices import on_devices

Parts = dict[str, Float[Array, ""]]


class AnswerSums(NamedTuple):
    """Sums over the tokens of each answer (segment). The last axis is the segment number minus 1."""

    log_probs: Float[Array, "batch segments"]
    """Sums of log-probabilities over each answer's tokens."""
    lengths: Float[Array, "batch segments"]
    """The number of the answer's tokens."""
    text_log_probs: Float[Array, "batch segments"]
    """The same sums over all of a text's tokens, including the prompt."""

    @property
    def means(self) -> Float[Array, "batch segments"]:
        """The mean log-probability per token of each answer; 0 for segments that are absent from the row."""
        return self.log_probs / self.lengths.clip(1)


@dataclass(frozen=True)
class Preference(Objective):
    """A preference loss for `train.make_train_step`. Batches are as in `preferences.batches`.

        objective = preferences.Preference(preferences.PreferenceSettings("dpo", beta=0.1))
        step = train.make_train_step(nnx.graphdef(model), optimizer, objective, gradient_accumulation=4)

    Chosen and rejected answers run in one forward pass. The loss is the mean over all pairs, or answers, of the whole batch,
    independent of their split into micro-batches and devices. ORPO adds the cross-entropy of the chosen texts, a mean over
    their tokens including prompts. KTO's baseline is the mean over a micro-batch, on all devices.

    The reference of a model with adapters is the same model without them. For other models the batch has "reference_log_probs"
    (`preferences.reference_log_probs`), which always takes precedence.

    Metrics of a step, in addition to the usual ones:

    - loss: the preference loss; aux_loss: the router's, if it has a coefficient.
    - reward_chosen, reward_rejected: means of beta * log p/p_ref, or of beta * mean log p for losses without a reference.
      KTO's are means over desirable and over other answers.
    - reward_margin: their difference; reward_accuracy: the fraction of pairs whose chosen answer has the higher reward.
    - log_prob_chosen, log_prob_rejected: means over answers; ORPO's and SimPO's answers have means over tokens.
    - kl: of pairs with a reference, the mean over the answers' tokens of log p - log p_ref; of KTO its baseline.
    - chosen_cross_entropy: a term of ORPO's loss.
    - expert_load, int32 [layers, experts], of models with experts: tokens of the model's pass; the reference's do not count.

    Raises:
      ValueError: at the first step, a model without adapters and a batch without "reference_log_probs"; or a batch without
        the arrays that the loss needs. Also multi-token prediction modules.
    """

    settings: PreferenceSettings = PreferenceSettings()

    def prepare(self, batch: Batch, label_weight: Float[Array, ""]) -> Batch:
        """Returns the arrays that the loss reads, with the whole batch's counts, by which its means are divided."""
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
            # All tokens of chosen texts except the last of each.
            counts["num_chosen_labels"] = jnp.append(batch["segment_ids"].ravel() % 2, -1 * present.ravel())
        if of_pairs and self.settings.needs_reference:
            counts["num_answer_labels"] = batch["loss_mask"] != 0
        return prepared | {name: counted.sum().astype(jnp.float32).clip(1) for name, counted in counts.items()}

    def __call__(self, model: Decoder, batch: Batch) -> tuple[Float[Array, ""], Parts]:
        """Returns the micro-batch's part of the loss, and its parts of the metrics; raises as documented in the class."""
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
        if model.config.routed_layers:
            parts["expert_load"] = spread.sum(states.router.expert_load)
        if coefficient:
            parts["aux_loss"] = load_balancing_loss(spread.sum(states.router)) / self.micro_batches
            value = value + coefficient * parts["aux_loss"]
        return value, parts

    def metrics(self, value: Float[Array, ""], aux: Parts, label_weight: Float[Array, ""]) -> dict[str, Array]:
        """Computes the metrics listed in the class docstring from the summed parts."""
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
    """Computes the summed loss and metrics of a pairwise loss (DPO, IPO, hinge, ORPO or SimPO).

    Args:
      found: sums of the rows' segments; chosen and rejected answers alternate.
      reference: sums of log-probabilities; zeros for a loss without a reference.
      batch: has the whole batch's "num_examples", and "num_answer_labels" for a loss with a reference.
    """
    sums, means, lengths = (Pair(each[:, ::2], each[:, 1::2]) for each in (found.log_probs, found.means, found.lengths))
    of_reference, beta = Pair(reference[..., 0], reference[..., 1]), settings.scale
    # With a reference, rewards use sums over answers even if the loss uses means.
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
    """Computes KTO's baseline from the micro-batch's mismatched log-ratios, and its contribution to metric `kl`."""
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
    """Computes the summed loss and metrics of KTO.

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


def answer_sums(model: Decoder, states: HiddenStates, batch: Batch, num_segments: int) -> AnswerSums:
    """Sums log-probabilities over the tokens of each answer, without materializing [tokens, vocab] logits."""
    hidden, labels, segments, spread = states.hidden, batch["labels"], batch["segment_ids"], model.execution.spread
    found = token_log_probs(hidden.reshape(-1, hidden.shape[-1]), model.head_weight, labels.reshape(-1)).reshape(labels.shape)
    answered = batch["loss_mask"] != 0

    def of_segments(values: Array) -> Array:
        inside = segments[:, :, None] == jnp.arange(1, num_segments + 1)
        summed = jnp.where(inside, values[:, :, None], 0).sum(1)
        return summed if spread.context is None else jax.lax.psum(summed, spread.context.axis_name)

    # Neighbours in a sequence may be on other devices, so the last token of a text is found by its position.
    lengths = jnp.pad(of_segments(jnp.ones_like(segments)), [(0, 0), (1, 0)])
    predicted = batch["positions"] + 1 < jnp.take_along_axis(lengths, segments, axis=1)
    return AnswerSums(
        of_segments(jnp.where(answered, found, 0)),
        of_segments(answered.astype(found.dtype)),
        of_segments(jnp.where(predicted, found, 0)),
    )


def row_axes(spread: OneDevice) -> tuple[str, ...]:
    """Returns the mesh axes that split rows. Sums over a row's tokens are already equal along `context`."""
    return tuple(axis for axis in spread.mesh_axes if spread.context is None or axis != spread.context.axis_name)


def sum_of_rows[Values](spread: OneDevice, values: Values) -> Values:
    """Sums arrays over all devices with different rows (psum over `row_axes`); unchanged on one device."""
    axes = row_axes(spread)
    return jax.lax.psum(values, axes) if axes else values


def answer_log_probs(model: Decoder, batch: Batch, num_segments: int, prefix: str = "") -> Float[Array, "batch segments"]:
    """Returns the log-probability of each answer, without gradients; `prefix` selects the arrays ("kl_", ...)."""
    model = _without_gradients(model)
    arrays = {name: batch[prefix + name] for name in BATCH_ARRAYS}
    states = model.hidden_states(arrays["tokens"], arrays["positions"], arrays["segment_ids"])
    return answer_sums(model, states, arrays, num_segments).log_probs


def reference_log_probs(model: Decoder, batch: Batch) -> Float[Array, "batch examples 2"]:
    """Returns the reference model's log-probabilities, to be added to the batch as "reference_log_probs".

    The last axis is (chosen, rejected), or for single answers (the answer, the mismatched answer). A model with adapters runs
    without them, as its own reference. For another reference model call this with it before each step:

        batch["reference_log_probs"] = nnx.jit(preferences.reference_log_probs)(reference_model, batch)
    """
    if has_adapters(model):
        model = with_zero_changes(model) if model.precision is not None else without_adapter(model)
    examples = batch["example"].shape[1]
    if KL + "tokens" in batch:
        return jnp.stack([answer_log_probs(model, batch, examples, prefix) for prefix in ("", KL)], axis=-1)
    return answer_log_probs(model, batch, 2 * examples).reshape(-1, examples, 2)


def reference_table(
    model: Decoder,
    batches: PreferenceBatches,
    on_batch: Callable[[int, int], Any] | None = None,
    *,
    parallelism: Parallelism | None = None,
) -> Float[np.ndarray, "examples 2"]:
    """Precomputes `reference_log_probs` of all examples, indexed like the data; NaN for skipped examples.

        in_order = preferences.preference_batches(data, tokenizer, seq_len=4096, batch_size=8, seed=None)
        table = preferences.reference_table(model, in_order)
        batches = preferences.preference_batches(data, tokenizer, seq_len=4096, batch_size=8, reference=table)

    Args:
      batches: at their beginning, in the data's order (`seed=None`). They are closed.
      on_batch: called with the number of examples done, and the total.
      parallelism: the model's mesh, as in `train.make_train_step`.

    Raises:
      ValueError: batches that are shuffled or have begun.
    """
    if batches.seed is not None or batches.position:
        raise ValueError("a table of the reference needs batches in the data's order, from their beginning: give seed=None")
    graph, params, *rest = nnx.split(model, nnx.Param, ...)
    (fixed,), number = rest, len(batches.preferences)
    table = np.full((number, 2), np.nan, np.float32)
    options = None if parallelism is None else parallelism.compiler_options
    compute = jax.jit(on_devices(_of_all_rows, graph, parallelism=parallelism), compiler_options=options)
    try:
        while batches.position < number:
            batch = next(batches)
            found = np.asarray(compute(params, fixed, put_batch(batch, params, parallelism)))
            present = batch["example"] >= 0
            table[batch["example"][present]] = found[present]
            if on_batch is not None:
                on_batch(min(batches.position, number), number)
    finally:
        batches.close()
    return table


def _of_all_rows(model: Decoder, batch: Batch) -> Float[Array, "all_rows examples 2"]:
    """Returns the `reference_log_probs` of all devices' rows, on each device."""
    found, axes = reference_log_probs(model, batch), row_axes(model.execution.spread)
    if not axes:
        return found
    devices, rows = jax.lax.axis_size(axes), len(found)
    whole = vary_as(jnp.zeros((devices * rows, *found.shape[1:]), found.dtype), found)
    return jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(whole, found, jax.lax.axis_index(axes) * rows, 0), axes)


def _without_gradients(model: Decoder) -> Decoder:
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(jax.lax.stop_gradient, state))
