"""Pictures of a training run, as PNG files: the loss over steps, rewards, and how evenly the experts are loaded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from moe_jax.runtime.files import save_png
from moe_jax.train.metrics import read_records

SMOOTHING_STEPS = 10
"""The number of neighbouring steps that the bold loss line averages: enough to hide the difference between batches."""

REWARDS = (
    *("reward_margin", "reward_accuracy", "reward", "frac_reward_zero_std", "completions/mean_length"),
    *("completions/clipped_ratio", "clip_ratio/region_mean", "entropy", "kl"),
)
"""Metrics in rewards.png, as far as a run has them."""


def plot_run(
    run: str | Path, output: str | Path | None = None, *, step: int | None = None, resumed_at: int | None = None
) -> list[Path]:
    """Draws the log of a training run, and returns the paths of the pictures.

    They are loss.png, and rewards.png for a run with rewards or expert_load.png for another model with experts.

    Args:
      run: the output folder of `finetune`, `prefer` or `grpo`; the run may still be in progress.
      output: the folder to write to (default: `run`).
      step: the step whose load is shown expert by expert (default: the last tenth of the run, averaged).
      resumed_at: as in `plot_loss`.

    Raises:
      FileNotFoundError: `run` is not such a folder, or has no step yet.
      ValueError: the run has no such `step`.
    """
    run = Path(run).expanduser()
    output = run if output is None else Path(output).expanduser()
    metrics, loads = read_records(run / "metrics.jsonl"), read_records(run / "expert_load.jsonl")
    if not metrics:
        raise FileNotFoundError(f"no metrics.jsonl with a step in {run}: give the output folder of a training run")
    steps, losses = ([record[name] for record in metrics] for name in ("step", "loss"))
    held_out = {record["step"]: record["eval_loss"] for record in metrics if "eval_loss" in record}
    rewarded = bool({"reward", "reward_margin"} & metrics[0].keys())
    unit = None if rewarded else "nats per token"
    plot_loss(steps, losses, output / "loss.png", held_out=held_out, resumed_at=resumed_at, unit=unit)
    if rewarded:
        plot_rewards(metrics, output / "rewards.png")
        return [output / "loss.png", output / "rewards.png"]
    if not loads:
        return [output / "loss.png"]
    plot_expert_load(
        [record["step"] for record in loads],
        np.array([record["expert_load"] for record in loads]),
        loads[0]["layers"],
        output / "expert_load.png",
        step=step,
    )
    return [output / "loss.png", output / "expert_load.png"]


def plot_loss(
    steps: Sequence[int],
    losses: Sequence[float],
    path: str | Path,
    *,
    held_out: Mapping[int, float] | None = None,
    resumed_at: int | None = None,
    unit: str | None = "nats per token",
) -> None:
    """Draws the loss of each step and its moving average over `SMOOTHING_STEPS` steps.

    Args:
      steps, losses: of equal length, at least one.
      path: the PNG file to write.
      held_out: the loss on held-out data at some steps.
      resumed_at: the step after which the run was interrupted and resumed, drawn as a vertical line.
      unit: the unit of the loss.

    Raises:
      ValueError: `steps` and `losses` are empty or differ in length.
    """
    if not len(steps) or len(steps) != len(losses):
        raise ValueError(f"steps and losses must have one equal length above 0; got {len(steps)} and {len(losses)}")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel=f"loss ({unit})" if unit else "loss", title="Training loss")
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="each step")
    smooth = moving_average(np.asarray(losses, np.float64), SMOOTHING_STEPS)
    axes.plot(steps, smooth, color="tab:blue", linewidth=2, label=f"mean of the last {SMOOTHING_STEPS} steps")
    if held_out:
        axes.plot(list(held_out), list(held_out.values()), "o-", color="tab:orange", markersize=4, label="held out")
    if resumed_at is not None:
        axes.axvline(resumed_at, color="tab:gray", linestyle="--", label="interrupted, then resumed")
    axes.grid(alpha=0.3)
    axes.legend()
    save_png(figure, path)


def plot_rewards(records: Sequence[Mapping[str, float]], path: str | Path) -> None:
    """Plots rewards over steps, also held-out ones: margin and accuracy of preferences, or rewards, lengths and clipped shares.

    Args:
      records: the lines of metrics.jsonl.
      path: the PNG file to write.
    """
    names = [name for name in records[0] if name in REWARDS or (name.startswith("rewards/") and name.endswith("/mean"))]
    figure = Figure(figsize=(8, 2.5 * len(names)), layout="constrained")
    for axes, name in zip(figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0], names, strict=True):
        measured = [record for record in records if name in record]
        values = moving_average(np.array([record[name] for record in measured], np.float64), SMOOTHING_STEPS)
        axes.plot([record["step"] for record in measured], values, label=f"mean of the last {SMOOTHING_STEPS} steps")
        if held_out := {record["step"]: record[f"eval_{name}"] for record in records if f"eval_{name}" in record}:
            axes.plot(list(held_out), list(held_out.values()), "o-", markersize=4, label="held out")
        axes.set(ylabel=name.replace("_", " "))
        axes.grid(alpha=0.3)
    axes.set(xlabel="step")
    axes.legend()
    save_png(figure, path)


def plot_learning_rates(
    rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], suggested: float, path: str | Path
) -> None:
    """Plots loss against learning rate for a rate sweep, with the suggested rate as a vertical line.

    Args:
      rates, losses, smoothed: of equal length, at least one.
      path: the PNG file to write.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="learning rate", ylabel="loss (nats per token)", xscale="log", title="Learning rates")
    axes.plot(rates, losses, color="tab:blue", alpha=0.3, linewidth=1, label="each step")
    axes.plot(rates, smoothed, color="tab:blue", linewidth=2, label="smoothed")
    axes.axvline(suggested, color="tab:orange", linestyle="--", label=f"suggested: {suggested:.1e}")
    axes.grid(alpha=0.3)
    axes.legend()
    save_png(figure, path)


def plot_expert_load(
    steps: Sequence[int],
    loads: Int[np.ndarray, "steps layers experts"],
    layers: Sequence[int],
    path: str | Path,
    *,
    step: int | None = None,
) -> None:
    """Plots each expert's token count relative to an even share (1 is even, 2 is twice the share).

    The top is a heat map of layers by experts. Below it, a heat map of layers by steps shows each layer's busiest expert. The
    bottom shows, over the steps, the busiest and the idlest expert of the worst layer and of the layers' mean.

    Args:
      steps: the training steps of `loads`.
      loads: tokens that each expert received in each step.
      layers: the layers' indices in the model, for the labels.
      path: the PNG file to write.
      step: the step of the upper heat map; None averages the last tenth of the run.

    Raises:
      ValueError: the shapes do not match, there is nothing to draw, or `step` is not in `steps`.
    """
    loads = np.asarray(loads)
    if loads.ndim != 3 or not loads.size or loads.shape[:2] != (len(steps), len(layers)):
        raise ValueError(
            f"loads must have the shape (steps, layers, experts)=({len(steps)}, {len(layers)}, any), none of them 0; "
            f"got {loads.shape}"
        )
    if step is not None and step not in steps:
        raise ValueError(f"step {step} is none of the {len(steps)} steps from {steps[0]} to {steps[-1]}")
    relative = relative_load(loads)
    if step is None:
        shown, when = relative[-max(1, len(steps) // 10) :].mean(axis=0), "at the end of training"
    else:
        shown, when = relative[list(steps).index(step)], f"at step {step}"
    rows = 0.6 + min(0.35 * len(layers), 8)
    figure = Figure(figsize=(9, 2 * rows + 3.5), layout="constrained")
    by_expert, by_step, worst = figure.subplots(3, 1, height_ratios=[rows, rows, 2.5])
    _heat_map(figure, by_expert, shown, layers)
    by_expert.set(title=f"Load of each expert {when} (1 is an even share)", xlabel="expert")
    by_expert.locator_params(axis="x", integer=True)
    # A cell ends at its step: steps need not be evenly spaced.
    edges = np.concatenate([[steps[0] - 1], np.asarray(steps)])
    busiest, idlest = relative.max(axis=-1), relative.min(axis=-1)
    _heat_map(figure, by_step, busiest.T, layers, edges)
    by_step.set(title="Load of the busiest expert of each layer (1 is an even share)", xlabel="step")
    for values, label in (
        (busiest.max(axis=1), "busiest of the worst layer"),
        (busiest.mean(axis=1), "busiest, mean of the layers"),
        (idlest.mean(axis=1), "idlest, mean of the layers"),
        (idlest.min(axis=1), "idlest of the worst layer"),
    ):
        worst.plot(steps, moving_average(values, SMOOTHING_STEPS), label=label)
    worst.set(title="Busiest and idlest experts", xlabel="step", ylabel="share (1 is even)", ylim=(0, None))
    worst.grid(alpha=0.3)
    worst.legend(ncols=2, fontsize="small")
    save_png(figure, path)


def _heat_map(
    figure: Figure, axes: Any, values: Float[np.ndarray, "layers columns"], layers: Sequence[int], edges=None
) -> None:
    """Draws relative loads, a row for each layer; `edges` bound the columns (default: one column per expert)."""
    edges = np.arange(values.shape[1] + 1) - 0.5 if edges is None else edges
    mesh = axes.pcolormesh(
        edges, np.arange(len(layers) + 1) - 0.5, values, cmap="viridis", vmin=0, vmax=max(2.0, float(values.max()))
    )
    every = -(-len(layers) // 24)
    axes.set(ylabel="layer", yticks=range(0, len(layers), every), yticklabels=[str(layer) for layer in layers[::every]])
    axes.invert_yaxis()
    # The titles name the unit: next to a map of two layers a label would be longer than the bar and cut off.
    figure.colorbar(mesh, ax=axes)


def relative_load(loads: Int[np.ndarray, "*any experts"]) -> Float[np.ndarray, "*any experts"]:
    """Returns load / mean load over experts; 1 for all if no expert received a token."""
    mean = loads.mean(axis=-1, keepdims=True)
    return np.where(mean > 0, loads / np.maximum(mean, np.finfo(float).tiny), 1.0)


def moving_average(values: Float[np.ndarray, "steps"], width: int) -> Float[np.ndarray, "steps"]:
    """Returns out[i] = mean of values[max(0, i - width + 1) .. i]."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - width)
    return (total[end] - total[start]) / (end - start)
