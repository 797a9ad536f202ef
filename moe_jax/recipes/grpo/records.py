"""The log of a step of reinforcement learning: metrics with TRL's names, and all samples."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moe_jax.reinforcement.advantages import advantages, has_spread, total_rewards
from moe_jax.reinforcement.samples import Group
from moe_jax.reinforcement.settings import PolicySettings


def metrics_of(groups: Sequence[Group], names: Sequence[str], settings: PolicySettings) -> dict[str, float]:
    """Returns metrics of the groups' rewards and answers, with TRL's names.

    Means and deviations of rewards leave out NaN. Lengths count all tokens after the prompt. A metric without any value is
    absent: `completions/*_terminated_length` if no answer ended by itself. `num_tokens` counts prompts with each answer.

    Args:
      names: the name of each reward function.
    """
    totals = _sums(groups, settings)
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([len(sample.tokens) for sample in samples])
    ended = np.array([sample.finish_reason == "stop" for sample in samples])
    found = {
        "reward": _mean(np.concatenate(totals)),
        "reward_std": _mean(np.array([_std(of_group) for of_group in totals])),
        "frac_reward_zero_std": _mean(np.array([not has_spread(of_group) for of_group in totals])),
    }
    for name, values in zip(names, np.concatenate([group.rewards for group in groups]).T, strict=True):
        found |= {f"rewards/{name}/mean": _mean(values), f"rewards/{name}/std": _std(values)}
    for kind, chosen in (("", lengths), ("terminated_", lengths[ended])):
        for of, function in (("mean", np.mean), ("min", np.min), ("max", np.max)):
            found[f"completions/{of}_{kind}length"] = float(function(chosen)) if len(chosen) else np.nan
    found["completions/clipped_ratio"] = float(1 - ended.mean())
    found["num_tokens"] = float(lengths.sum() + sum(len(group.samples) * len(group.prompt_tokens) for group in groups))
    found["weights_version"] = float(min(sample.weights_version for sample in samples))
    if calls := sum(sample.tool_calls for sample in samples):
        failures = sum(sample.tool_failures for sample in samples)
        found |= {"tools/call_frequency": calls / len(samples), "tools/failure_frequency": failures / calls}
    for name in {name for group in groups for name in group.metrics}:
        found[name] = _mean(np.array([group.metrics[name] for group in groups if name in group.metrics]))
    return {name: value for name, value in found.items() if not np.isnan(value)}


def record_of_samples(step: int, groups: Sequence[Group], names: Sequence[str], settings: PolicySettings) -> dict[str, Any]:
    """Returns the line of samples.jsonl for a step: all answers, with their rewards and advantages."""
    totals, of_groups = _sums(groups, settings), advantages([total_rewards(group, settings) for group in groups], settings)
    samples = [
        {
            "prompt": group.row["prompt"],
            "text": sample.text,
            "reward": _or_none(total[i]),
            "rewards": {name: _or_none(value) for name, value in zip(names, group.rewards[i], strict=True)},
            "advantage": float(advantage[i]),
            "key": group.key,
            "seed": sample.seed,
            "finish_reason": sample.finish_reason,
            "length": len(sample.tokens),
            "weights_version": sample.weights_version,
            **{name: values[i] for name, values in group.extras.items()},
        }
        for group, total, advantage in zip(groups, totals, of_groups, strict=True)
        for i, sample in enumerate(group.samples)
        if group.rewards is not None
    ]
    return {"step": step, "samples": samples}


def _sums(groups: Sequence[Group], settings: PolicySettings) -> list[np.ndarray]:
    """Returns the weighted sums of rewards, which GDPO would normalize."""
    return [total_rewards(group, replace(settings, advantage_scale=None)) for group in groups]


def _mean(values: np.ndarray) -> float:
    present = values[~np.isnan(values.astype(float))]
    return float(present.mean()) if len(present) else np.nan


def _std(values: np.ndarray) -> float:
    """Returns the deviation with a divisor of n - 1, as TRL's; 0 for a single value."""
    present = values[~np.isnan(values)]
    return (float(present.std(ddof=1)) if len(present) > 1 else 0.0) if len(present) else np.nan


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
