"""Policy losses as plain functions of log-probabilities, a value for each token.

`log_probs` is log p of the trained model, `sampled` log b of the sampler, and `advantage` A. `log_ratio` is log p - log p_old,
with p_old the model before the update, and r = exp(log_ratio). The loss of a batch is a weighted sum over its tokens
(`advantages.token_weights`).
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer


def clipped_loss(
    log_ratio: Float[Array, "*tokens"],
    advantage: Float[Array, "*tokens"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> Float[Array, "*tokens"]:
    """Computes the loss of GRPO, Dr. GRPO and DAPO, whose weights differ, and of GSPO (`sample_mean` of the log-ratios).

        loss = -min(min(r, dual_clip) A, clip(r, 1 - clip_low, 1 + clip_high) A)

    `dual_clip`, greater than 1 + clip_high, bounds the loss where A < 0. Sources: GRPO, https://arxiv.org/abs/2402.03300; two
    bounds, DAPO, https://arxiv.org/abs/2503.14476; dual clip, https://arxiv.org/abs/1912.09729.
    """
    ratio = jnp.exp(log_ratio)
    clipped = ratio.clip(1 - clip_low, 1 + clip_high)
    if dual_clip is not None:
        ratio = jnp.minimum(ratio, dual_clip)
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def cispo_loss(
    log_ratio: Float[Array, "*tokens"], advantage: Float[Array, "*tokens"], log_probs: Float[Array, "*tokens"], cap: float = 5.0
) -> Float[Array, "*tokens"]:
    """Computes -min(r, cap) A log p with a constant ratio, so all tokens have gradients (https://arxiv.org/abs/2506.13585).

    `cap` is the maximum ratio itself, as in TRL; others add 1 to it.
    """
    return -jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio), cap)) * advantage * log_probs


def kl_estimate(
    log_probs: Float[Array, "*tokens"], reference: Float[Array, "*tokens"], kind: Literal["k1", "k2", "k3"] = "k3"
) -> Float[Array, "*tokens"]:
    """Computes an estimate of KL(p || reference) at each drawn token (http://joschu.net/blog/kl-approx.html).

        k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d,  d = log p - log reference

    k1 and k3 are unbiased; k2 and k3 are never negative. The expected gradient of k3 is not that of the divergence. The one of
    k3 * r is (https://arxiv.org/abs/2512.02556).
    """
    d = log_probs - reference
    match kind:
        case "k1":
            return d
        case "k2":
            return d**2 / 2
        case _:
            return jnp.exp(-d) - 1 + d


def importance_factor(
    log_difference: Float[Array, "*tokens"], *, low: float = 0.0, high: float, drops: bool = False
) -> Float[Array, "*tokens"]:
    """Computes exp(log p_old - log b) without a gradient, which corrects for a sampler that computes other values.

    Factors outside [low, high] are clipped (truncated importance sampling, https://fengyao.notion.site/off-policy-rl), or with
    `drops` 0 (IcePop, https://arxiv.org/abs/2510.18855). `log_difference` is a token's, or the sum over a sample.
    """
    factor = jnp.exp(jax.lax.stop_gradient(log_difference))
    return jnp.where((factor < low) | (factor > high), 0, factor) if drops else factor.clip(low, high)


def off_policy_mask(
    advantage: Float[Array, "*tokens"], mean_log_difference: Float[Array, "*tokens"], threshold: float
) -> Bool[Array, "*tokens"]:
    """Returns False for samples with A < 0 and mean(log b - log p) > threshold (https://arxiv.org/abs/2512.02556)."""
    return (advantage >= 0) | (jax.lax.stop_gradient(mean_log_difference) <= threshold)


def distillation_advantage(sampled: Float[Array, "*tokens"], teacher: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """Computes log teacher - log b, the advantage of on-policy distillation: it minimizes the divergence KL(p || teacher).

    It is an advantage for each token (https://thinkingmachines.ai/blog/on-policy-distillation).
    """
    return teacher - sampled


def sample_sum(values: Float[Array, "rows seq"], segments: Integer[Array, "rows seq"]) -> Float[Array, "rows seq"]:
    """Returns for each token the sum over the tokens of its segment, in a fixed order."""
    # XLA fuses this into a sum over a row, without an array [rows, seq, seq]. A scatter would add in any order on a GPU.
    inside = segments[:, :, None] == segments[:, None, :]
    return jnp.where(inside, values[:, None, :], 0).sum(-1)


def sample_mean(
    values: Float[Array, "rows seq"], counted: Bool[Array, "rows seq"], segments: Integer[Array, "rows seq"]
) -> Float[Array, "rows seq"]:
    """Returns for each token the mean over the counted tokens of its segment; 0 if there are none.

    GSPO's log-ratio is the mean of its tokens' log-ratios (https://arxiv.org/abs/2507.18071).
    """
    number = sample_sum(counted.astype(values.dtype), segments)
    return sample_sum(jnp.where(counted, values, 0), segments) / number.clip(1)
