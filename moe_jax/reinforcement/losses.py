"""Policy losses as plain functions of log-probabilities, a value for each token. All are differentiable.

Names: `log_probs` log p of the trained model, b the sampler, `log_ratio` d = log p - log p_old with p_old the model before the
update, ratio r = exp(d), `advantage` A. The loss of a batch is a weighted sum over its tokens (`advantages.token_weights`).
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

    Args:
      dual_clip: greater than 1 + clip_high; bounds the loss where A < 0.

    References:
      GRPO: Shao et al., 2024, https://arxiv.org/abs/2402.03300; two bounds: DAPO, Yu et al., 2025,
      https://arxiv.org/abs/2503.14476; dual clip: Ye et al., 2020, https://arxiv.org/abs/1912.09729
    """
    ratio = jnp.exp(log_ratio)
    clipped = ratio.clip(1 - clip_low, 1 + clip_high)
    if dual_clip is not None:
        ratio = jnp.minimum(ratio, dual_clip)
    return -jnp.minimum(ratio * advantage, clipped * advantage)


def cispo_loss(
    log_ratio: Float[Array, "*tokens"],
    advantage: Float[Array, "*tokens"],
    log_probs: Float[Array, "*tokens"],
    *,
    cap: float = 5.0,
) -> Float[Array, "*tokens"]:
    """Computes -min(r, cap) A log p, with a constant ratio: all tokens have gradients.

    References:
      MiniMax-M1, 2025, equation 4, https://arxiv.org/abs/2506.13585. `cap` is the maximum ratio itself, as in TRL.
    """
    return -jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio), cap)) * advantage * log_probs


def kl_estimate(
    log_probs: Float[Array, "*tokens"], reference: Float[Array, "*tokens"], kind: Literal["k1", "k2", "k3"] = "k3"
) -> Float[Array, "*tokens"]:
    """Computes an estimate of KL(p || reference) at each drawn token.

        k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d,  d = log p - log reference

    k1 and k3 are unbiased, and k2 and k3 are never negative. The gradient of k3 * r at r = 1 is that of the divergence, and
    k3 alone has another gradient.

    References:
      Schulman, 2020, http://joschu.net/blog/kl-approx.html; k3 * r: DeepSeek-V3.2, 2025, https://arxiv.org/abs/2512.02556
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

    Values outside [low, high] are clipped (truncated importance sampling, TIS), or become 0 with `drops` (IcePop).

    Args:
      log_difference: log p_old - log b of a token, or their sum over a sample.

    References:
      TIS: Yao et al., 2025, https://fengyao.notion.site/off-policy-rl; IcePop: Ling team, 2025,
      https://arxiv.org/abs/2510.18855
    """
    factor = jnp.exp(jax.lax.stop_gradient(log_difference))
    return jnp.where((factor < low) | (factor > high), 0, factor) if drops else factor.clip(low, high)


def off_policy_mask(
    advantage: Float[Array, "*tokens"], mean_log_difference: Float[Array, "*tokens"], threshold: float
) -> Bool[Array, "*tokens"]:
    """Returns False for samples with a negative advantage that have become unlikely: mean(log b - log p) > threshold.

    References:
      DeepSeek-V3.2, 2025, https://arxiv.org/abs/2512.02556
    """
    return (advantage >= 0) | (jax.lax.stop_gradient(mean_log_difference) <= threshold)


def distillation_advantage(sampled: Float[Array, "*tokens"], teacher: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """Computes log teacher - log b of each drawn token: the advantage that minimizes the reverse KL(p || teacher).

    References:
      on-policy distillation: Thinking Machines Lab, 2025, https://thinkingmachines.ai/blog/on-policy-distillation
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

    GSPO's log-ratio is the mean of its tokens' log-ratios.

    References:
      GSPO: Zheng et al., 2025, https://arxiv.org/abs/2507.18071
    """
    number = sample_sum(counted.astype(values.dtype), segments)
    return sample_sum(jnp.where(counted, values, 0), segments) / number.clip(1)
