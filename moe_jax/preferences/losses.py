"""Preference losses as plain functions of the log-probabilities of whole answers: one loss for each pair.

A pair is two answers to one prompt, one chosen and one rejected. `policy` is the trained model, `reference` the model before
training. A log-probability of an answer is the sum over its tokens; ORPO, SimPO and IPO use the mean.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


class Pair[Of](NamedTuple):
    """A pair of values, for the chosen and for the rejected answer."""

    chosen: Of
    rejected: Of


LogProbs = Pair[Float[Array, "*pairs"]]
"""The log-probabilities of both answers of each pair."""


def dpo_loss(
    policy: LogProbs, reference: LogProbs, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> Float[Array, "*pairs"]:
    """Computes the loss of direct preference optimization.

        d    = beta * (log p(chosen)/p_ref(chosen) - log p(rejected)/p_ref(rejected))
        loss = -(1 - label_smoothing) * log sigmoid(d) - label_smoothing * log sigmoid(-d)

    Args:
      policy, reference: sums over the tokens of an answer.
      beta: the larger it is, the closer the model stays to the reference.
      label_smoothing: the fraction of pairs whose label is assumed wrong ("conservative DPO").

    References:
      Rafailov et al., 2023, https://arxiv.org/abs/2305.18290; label smoothing: Mitchell, 2023,
      https://ericmitchell.ai/cdpo.pdf
    """
    margin = beta * _margin(policy, reference)
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(margin) - label_smoothing * jax.nn.log_sigmoid(-margin)


def hinge_loss(policy: LogProbs, reference: LogProbs, *, beta: float = 0.1) -> Float[Array, "*pairs"]:
    """Computes relu(1 - d) with the d of `dpo_loss`: pairs beyond the margin 1 / beta have no gradient.

    References:
      Zhao et al., 2023 (SLiC), https://arxiv.org/abs/2305.10425; Liu et al., 2023, https://arxiv.org/abs/2309.06657
    """
    return jax.nn.relu(1 - beta * _margin(policy, reference))


def ipo_loss(policy: LogProbs, reference: LogProbs, *, beta: float = 0.1) -> Float[Array, "*pairs"]:
    """Computes (m - 1 / (2 beta))^2, where m is the margin of the log-ratios, as means over the tokens of an answer.

    References:
      Azar et al., 2023, equation 17, https://arxiv.org/abs/2310.12036
    """
    return (_margin(policy, reference) - 1 / (2 * beta)) ** 2


def orpo_loss(policy: LogProbs, *, beta: float = 0.1) -> Float[Array, "*pairs"]:
    """Computes the odds-ratio loss, which is added to the cross-entropy of the chosen texts and needs no reference.

        odds(y) = p(y) / (1 - p(y)),  log p(y) = mean over tokens
        loss    = -beta * log sigmoid(log odds(chosen) - log odds(rejected))

    References:
      Hong et al., 2024, https://arxiv.org/abs/2403.07691
    """
    log_odds = policy.chosen - policy.rejected - (_log1mexp(policy.chosen) - _log1mexp(policy.rejected))
    return -beta * jax.nn.log_sigmoid(log_odds)


def simpo_loss(policy: LogProbs, *, beta: float = 2.0, gamma: float = 1.0) -> Float[Array, "*pairs"]:
    """Computes -log sigmoid(beta * (log p(chosen) - log p(rejected)) - gamma), with means over tokens; needs no reference.

    Args:
      gamma: the target margin of rewards.

    References:
      Meng et al., 2024, https://arxiv.org/abs/2405.14734
    """
    return -jax.nn.log_sigmoid(beta * (policy.chosen - policy.rejected) - gamma)


def kto_loss(
    policy: Float[Array, "*answers"],
    reference: Float[Array, "*answers"],
    desirable: Shaped[Array, "*answers"],
    kl: Float[Array, ""],
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Array, "*answers"]:
    """Computes the KTO loss (Kahneman-Tversky optimization) per answer, each labeled desirable or not.

        r    = log p(answer)/p_ref(answer)
        loss = desirable_weight * (1 - sigmoid(beta * (r - kl)))       for a desirable answer
               undesirable_weight * (1 - sigmoid(beta * (kl - r)))     for another

    Args:
      policy, reference: sums over the tokens of an answer.
      desirable: nonzero for desirable answers.
      kl: the baseline, `kto_baseline`.
      desirable_weight, undesirable_weight: weights to balance data with more of one kind.

    References:
      Ethayarajh et al., 2024, equation 7, https://arxiv.org/abs/2402.01306
    """
    gain = beta * (policy - reference - kl)
    good = desirable_weight * (1 - jax.nn.sigmoid(gain))
    bad = undesirable_weight * (1 - jax.nn.sigmoid(-gain))
    return jnp.where(desirable != 0, good, bad)


def kto_baseline(mean_log_ratio: Float[Array, ""]) -> Float[Array, ""]:
    """Returns KTO's estimate of KL(p || p_ref), at least 0; no gradient passes through it.

    Args:
      mean_log_ratio: the mean of log p(y)/p_ref(y) over prompts with an answer to another prompt, as in section 4.1 of KTO.
    """
    return jax.lax.stop_gradient(mean_log_ratio.clip(0))


def _margin(policy: LogProbs, reference: LogProbs) -> Float[Array, "*pairs"]:
    return (policy.chosen - reference.chosen) - (policy.rejected - reference.rejected)


def _log1mexp(x: Float[Array, "*pairs"]) -> Float[Array, "*pairs"]:
    """Computes log(1 - exp(x)) of x < 0, without cancellation on either side of -log 2.

    An x rounded to 0 is replaced by the nearest negative number: the result and its derivative stay finite.
    """
    x = jnp.minimum(x, -jnp.finfo(x.dtype).eps)
    is_small = x < -0.6931471805599453
    # Each branch gets arguments only from its side: elsewhere its derivative would be infinite.
    far = jnp.log1p(-jnp.exp(jnp.where(is_small, x, -1)))
    near = jnp.log(-jnp.expm1(jnp.where(is_small, -0.5, x)))
    return jnp.where(is_small, far, near)
