"""Advantages of samples from the rewards of their group, and the weight of each token in the loss."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from moe_jax.reinforcement.samples import Group, Sample
from moe_jax.reinforcement.settings import PolicySettings

EPSILON = 1e-4
"""Added to a group's standard deviation, as in TRL."""


def total_rewards(group: Group, settings: PolicySettings) -> Float[np.ndarray, " samples"]:
    """Returns each sample's sum over functions of weight * reward, plus DAPO's penalty of overlong answers.

        penalty = -overlong_factor * clip((length - (max_new_tokens - overlong_buffer)) / overlong_buffer, 0, 1)

    A NaN leaves its function out. Samples that every function left out, or that failed, have NaN. The penalty is equation 13 of
    https://arxiv.org/abs/2503.14476. With advantage_scale="gdpo" (https://arxiv.org/abs/2601.05242) the rewards of each
    function, and the penalty, are first normalized within the group. All functions then have the same spread.

    Raises:
      ValueError: a group without rewards, an infinite reward, or another number of functions than `reward_weights` has.
    """
    if group.rewards is None:
        raise ValueError(f"group {group.key} has no rewards: call reinforcement.score first")
    if np.isinf(group.rewards).any():
        sample, function = np.argwhere(np.isinf(group.rewards))[0]
        raise ValueError(f"group {group.key}: sample {sample} has an infinite reward of function {function}; give a number")
    functions, given = group.rewards.shape[1], settings.reward_weights
    if given is not None and len(given) != functions:
        raise ValueError(f"reward_weights={given!r} must have a weight for each of the {functions} reward functions")
    rewards, weights = group.rewards.astype(np.float64), np.ones(functions) if given is None else np.asarray(given)
    left_out = np.isnan(rewards).all(axis=1) | np.array([has_failed(sample) for sample in group.samples], bool)
    if buffer := settings.overlong_buffer:
        excess = np.array([sample.own.sum() for sample in group.samples]) - (settings.max_new_tokens - buffer)
        penalty = -settings.overlong_factor * np.clip(excess / buffer, 0, 1)
        rewards, weights = np.column_stack([rewards, penalty]), np.append(weights, 1.0)
    rewards[left_out] = np.nan
    if settings.advantage_scale == "gdpo":
        rewards = np.column_stack([_normalized(of_function, True) for of_function in rewards.T])
    return np.where(left_out, np.nan, np.nansum(rewards * weights, axis=1))


def advantages(
    rewards: Sequence[Float[np.ndarray, " samples"]], settings: PolicySettings
) -> list[Float[np.ndarray, " samples"]]:
    """Returns the advantages of each group's samples, f32.

        A_i = (R_i - mean R) / (std R + 1e-4),  std with samples - 1

    Without scale the divisor is 1. With "gdpo" mean and std are of the whole batch. A NaN is no part of them, and has the
    advantage 0. So have groups without spread, and with "gdpo" batches without spread. Sources: GRPO,
    https://arxiv.org/abs/2402.03300; without scale, Dr. GRPO, https://arxiv.org/abs/2503.20783; GDPO,
    https://arxiv.org/abs/2601.05242.

    Args:
      rewards: `total_rewards` of each group.
    """
    if settings.advantage_scale == "gdpo":
        ends = np.cumsum([len(of_group) for of_group in rewards])[:-1]
        return [each.astype(np.float32) for each in np.split(_normalized(np.concatenate(rewards), True), ends)]
    return [_normalized(of_group, settings.scales_advantages).astype(np.float32) for of_group in rewards]


def kept_groups(groups: Sequence[Group], settings: PolicySettings) -> list[Group]:
    """Returns the groups to learn from: all, or with `keep_groups="with_spread"` those whose rewards differ.

    The latter is the dynamic sampling of DAPO (https://arxiv.org/abs/2503.14476).
    """
    return [group for group in groups if settings.keep_groups == "all" or has_spread(total_rewards(group, settings))]


def has_spread(rewards: Float[np.ndarray, " samples"]) -> bool:
    """Returns True if two rewards differ; NaN is no reward."""
    present = rewards[~np.isnan(rewards)]
    return len(present) > 0 and bool(present.max() > present.min())


def token_weights(groups: Sequence[Group], settings: PolicySettings) -> list[list[Float[np.ndarray, " answer"]]]:
    """Returns the weight of each token of each group's answers, f32. The loss is the weighted sum over all tokens.

        dapo, cispo   1 / (tokens of all samples)
        grpo, gspo    1 / (samples * tokens of the sample)
        dr_grpo       1 / (samples * max_new_tokens)

    Only tokens that the model wrote count. Failed samples have weights of 0 and are not counted. Truncated samples also have
    weights of 0 with `mask_truncated`, but count as samples.
    """
    samples = [sample for group in groups for sample in group.samples]
    number = max(1, sum(not has_failed(sample) for sample in samples))
    tokens = max(1, sum(int(_learned(sample, settings).sum()) for sample in samples))

    def weights(sample: Sample) -> Float[np.ndarray, " answer"]:
        learned = _learned(sample, settings)
        match settings.loss:
            case "grpo" | "gspo":
                divisor = number * max(1, int(learned.sum()))
            case "dr_grpo":
                divisor = number * settings.max_new_tokens
            case _:
                divisor = tokens
        return (learned / divisor).astype(np.float32)

    return [[weights(sample) for sample in group.samples] for group in groups]


def has_failed(sample: Sample) -> bool:
    """Returns True if the answer did not end by itself or by its length: its request or environment failed."""
    return sample.finish_reason in ("abort", "error")


def _learned(sample: Sample, settings: PolicySettings) -> np.ndarray:
    is_masked = has_failed(sample) or (settings.mask_truncated and sample.finish_reason == "length")
    return sample.own & (not is_masked)


def _normalized(rewards: Float[np.ndarray, " samples"], is_scaled: bool) -> Float[np.ndarray, " samples"]:
    if not has_spread(rewards):
        return np.zeros(len(rewards))
    centered = rewards - np.nanmean(rewards)
    if is_scaled:
        centered /= np.nanstd(rewards, ddof=1) + EPSILON
    return np.nan_to_num(centered, nan=0.0)
