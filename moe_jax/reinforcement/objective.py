"""A policy loss as the objective of a training step. Batches are packed rows (`reinforcement.rows`)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.adapters.merge import merged_copy
from moe_jax.kernels.shapes import varying_axes
from moe_jax.kernels.vocabulary import TokenScores, token_log_probs_and_entropies
from moe_jax.layers.lora import has_adapters
from moe_jax.layers.router import load_balancing_loss
from moe_jax.models.decoder import Decoder
from moe_jax.models.output import HiddenStates
from moe_jax.reinforcement import losses
from moe_jax.reinforcement.settings import PolicySettings
from moe_jax.serving.strict_log_probs import with_gradients_of
from moe_jax.train.batch import BATCH_ARRAYS, USED, Batch
from moe_jax.train.loss import hidden_states_of
from moe_jax.train.objective import Objective, refuse_further_predictors

Parts = dict[str, Array]

LOAD = "expert_load"
"""The only metric with an array, which is a sum; other arrays of a micro-batch's parts become maxima."""


@dataclass(frozen=True)
class PolicyLoss(Objective):
    """A policy loss for `train.make_train_step`, of the samples that `policy_rows` packed.

        objective = reinforcement.PolicyLoss(reinforcement.PolicySettings(loss="dapo"))
        step = train.make_train_step(nnx.graphdef(model), optimizer, objective, gradient_accumulation=4)

    The loss is the weighted sum over the batch's tokens, independent of their split into rows, micro-batches and devices. The
    last micro-batches are not computed if they are padding (`policy_rows`), so one program serves any number of rows.
    Experts in the batch are replayed in the forward pass. Further arrays [rows, seq], all optional unless noted:

    - reference_log_probs: of the reference, at the same temperature; needed if beta is not 0.
    - old_log_probs: of the model before a rollout's first update, for further updates without `exact`. Default: the model's
      own, so that all ratios are 1.
    - current_log_probs: exact values of the model, for further updates with `exact`. Default: the sampler's.

    Metrics of a step, in addition to the usual ones. Means are over learned tokens, with TRL's names:

    - loss: the policy loss with the divergence; aux_loss: the router's balance loss, if it has a coefficient.
    - entropy; kl, if beta is not 0.
    - expert_load, int32 [layers, experts], of models with experts: the tokens of each expert.
    - clip_ratio/low_mean, high_mean, region_mean: tokens without a gradient.
    - clip_ratio/low_min, high_max: of the samples' means, on meshes without `context`.
    - cispo_clip_ratio: tokens above `cispo_cap` with a positive advantage.
    - sampling/sampling_logp_difference/mean and max: |log p_old - log b|, with p_old from the ordinary forward pass.
    - sampling/importance_sampling_ratio/min, mean and max, if the loss has factors.

    Raises:
      ValueError: at the first step, a batch without an array that the loss needs, or a model with multi-token prediction
        modules. Also a loss with sums over samples on a mesh that splits sequences (`context`).
    """

    settings: PolicySettings = PolicySettings()

    def prepare(self, batch: Batch, label_weight: Float[Array, ""]) -> Batch:
        """Returns the arrays that the loss reads, each row's micro-batch, and the numbers of used ones and learned tokens."""
        needed = [*BATCH_ARRAYS, "advantage", "sampled_log_probs", *(["reference_log_probs"] if self.settings.beta else [])]
        if missing := [name for name in needed if name not in batch]:
            raise ValueError(f"a batch for PolicyLoss needs the array(s) {', '.join(missing)}")
        optional = ["expert_ids", "current_log_probs" if self.settings.exact else "old_log_probs"]
        prepared = {name: batch[name] for name in needed + optional if name in batch}
        number = jnp.arange(len(batch["tokens"]), dtype=jnp.int32) % self.micro_batches
        used = jnp.where((batch["segment_ids"] != 0).any(axis=1), number + 1, 1).max()
        num_learned = (batch["loss_mask"] != 0).sum().astype(jnp.float32).clip(1)
        return prepared | {"micro_batch": number, USED: used, "num_learned": num_learned}

    def __call__(self, model: Decoder, batch: Batch) -> tuple[Float[Array, ""], Parts]:
        """Returns the micro-batch's part of the loss, and its parts of the metrics; raises as documented in the class."""
        settings, spread = self.settings, model.execution.spread
        refuse_further_predictors(model.config)
        if spread.context is not None and settings.needs_whole_samples:
            raise ValueError(
                f"loss={settings.loss!r}, importance_level={settings.importance_level!r} and off_policy_threshold="
                f"{settings.off_policy_threshold!r} need sums over samples, which the mesh axis context splits; leave it out"
            )
        if settings.exact and has_adapters(model):
            model = merged_copy(model)
        states = hidden_states_of(model, batch)
        scores = sampled_token_scores(model, batch, temperature=settings.temperature, states=states)
        parts, largest = parts_of_tokens(settings, scores, batch)
        if spread.context is not None:
            largest = {name: value for name, value in largest.items() if not name.startswith("clip_ratio")}
        parts = spread.sum(parts)
        value = parts["loss"]
        if model.config.routed_layers:
            parts[LOAD] = spread.sum(states.router.expert_load)
        if settings.balance_coef:
            parts["aux_loss"] = load_balancing_loss(spread.sum(states.router)) / batch[USED]
            value = value + settings.balance_coef * parts["aux_loss"]
        # Parts are summed over micro-batches, so each has its own place for a maximum.
        is_own = jnp.arange(self.micro_batches) == batch["micro_batch"][0]
        largest = {name: jnp.where(is_own, each, 0) for name, each in ({"is_used": jnp.ones(())} | largest).items()}
        # An axis along which a value is the same on all devices is not varying, and pmax refuses it.
        return value, parts | {name: jax.lax.pmax(each, tuple(varying_axes(each))) for name, each in largest.items()}

    def metrics(self, value: Float[Array, ""], aux: Parts, label_weight: Float[Array, ""]) -> dict[str, Array]:
        """Returns the metrics listed in the class."""
        is_used = aux["is_used"] > 0
        found = {name: aux[name] for name in aux if not aux[name].ndim or name == LOAD}
        for name in aux.keys() - found.keys() - {"is_used"}:
            largest = jnp.nan_to_num(jnp.where(is_used, aux[name], -jnp.inf).max(), neginf=0)
            found[name] = -largest if name.endswith(("/min", "_min")) else largest
        return found


def sampled_token_scores(
    model: Decoder, batch: Batch, *, temperature: float = 1.0, states: HiddenStates | None = None
) -> TokenScores:
    """Returns the log-probability and entropy of each token of a batch of samples, computed by the batch's experts.

    For "reference_log_probs" of a reference model, and for "old_log_probs". Values are 0 where `loss_mask` is 0.

    Args:
      temperature: the sampling temperature.
      states: the hidden states of the batch's tokens, if they are known.
    """
    hidden, labels = (hidden_states_of(model, batch) if states is None else states).hidden, batch["labels"]
    hidden = hidden if temperature == 1 else hidden / temperature
    found = token_log_probs_and_entropies(hidden.reshape(-1, hidden.shape[-1]), model.head_weight, labels.reshape(-1))
    return jax.tree.map(lambda each: jnp.where(batch["loss_mask"] != 0, each.reshape(labels.shape), 0), found)


def parts_of_tokens(settings: PolicySettings, scores: TokenScores, batch: Batch) -> tuple[Parts, Parts]:
    """Returns sums over the tokens for the loss and its metrics, and the largest values of others. A minimum is negated."""
    log_probs, entropies = scores.log_probs, jax.lax.stop_gradient(scores.entropies)
    learned, segments, advantage = batch["loss_mask"] != 0, batch["segment_ids"], batch["advantage"]
    sampled, own = jnp.where(learned, batch["sampled_log_probs"], 0), jax.lax.stop_gradient(log_probs)
    if settings.exact:
        log_probs, old = with_gradients_of(log_probs, batch.get("current_log_probs", sampled)), sampled
    else:
        old = batch.get("old_log_probs", own)
    log_ratio = jnp.where(learned, log_probs - old, 0)
    if settings.loss == "gspo":
        log_ratio = losses.sample_mean(log_ratio, learned, segments)

    def mean(values: Array) -> Float[Array, ""]:
        return jnp.where(learned, values, 0).sum() / batch["num_learned"]

    def largest(values: Array) -> Float[Array, ""]:
        return jnp.where(learned, values, -jnp.inf).max()

    parts, extremes = {"entropy": mean(entropies)}, {}
    if settings.loss == "cispo":
        per_token = losses.cispo_loss(log_ratio, advantage, log_probs, cap=settings.cispo_cap)
        parts["cispo_clip_ratio"] = mean((jnp.exp(log_ratio) > settings.cispo_cap) & (advantage > 0))
    else:
        low, high = settings.clip
        dual_clip = settings.dual_clip
        per_token = losses.clipped_loss(log_ratio, advantage, clip_low=low, clip_high=high, dual_clip=dual_clip)
        is_low = (jnp.exp(log_ratio) < 1 - low) & (advantage < 0)
        is_high = (jnp.exp(log_ratio) > 1 + high) & (advantage > 0)
        for name, values in (("low", is_low), ("high", is_high), ("region", is_low | is_high)):
            parts[f"clip_ratio/{name}_mean"] = mean(values)
        of_samples = (losses.sample_mean(x.astype(jnp.float32), learned, segments) for x in (is_low, is_high))
        extremes = {"clip_ratio/low_min": largest(-next(of_samples)), "clip_ratio/high_max": largest(next(of_samples))}
    if (threshold := settings.off_policy_threshold) is not None:
        drift = losses.sample_mean(sampled - log_probs, learned, segments)
        per_token = jnp.where(losses.off_policy_mask(advantage, drift, threshold), per_token, 0)
    difference = jnp.where(learned, batch.get("old_log_probs", own) - sampled, 0)
    parts["sampling/sampling_logp_difference/mean"] = mean(jnp.abs(difference))
    extremes["sampling/sampling_logp_difference/max"] = largest(jnp.abs(difference))
    if settings.importance != "none":
        if settings.importance_level == "sequence":
            difference = losses.sample_sum(difference, segments)
        low, high, drops = settings.importance_low, settings.importance_high, settings.importance == "icepop"
        factor = losses.importance_factor(difference, low=low, high=high, drops=drops)
        per_token = per_token * factor
        parts["sampling/importance_sampling_ratio/mean"] = mean(factor)
        extremes["sampling/importance_sampling_ratio/min"] = largest(-factor)
        extremes["sampling/importance_sampling_ratio/max"] = largest(factor)
    if settings.beta:
        kl = losses.kl_estimate(log_probs, jnp.where(learned, batch["reference_log_probs"], 0), settings.kl)
        kl = kl * jnp.exp(log_ratio) if settings.kl_bias_correction else kl
        per_token = per_token + settings.beta * kl
        parts["kl"] = mean(kl)
    parts["loss"] = jnp.where(learned, batch["loss_mask"] * per_token, 0).sum()
    return parts, jax.lax.stop_gradient(extremes)
