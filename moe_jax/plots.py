"""Pictures of a training run, as PNG files: the loss over steps, and how evenly the experts are loaded."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SMOOTHING_STEPS = 10
"""How many neighbouring steps the bold loss line averages: enough to hide the difference between batches."""


def plot_loss(steps: Sequence[int], losses: Sequence[float], path: str | Path, *, resumed_at: int | None = None) -> None:
    """Draws the loss of each step and its moving average over `SMOOTHING_STEPS` steps.

    Args:
      steps, losses: of equal length, at least one.
      path: the PNG file to write.
      resumed_at: the step after which the run was interrupted and taken up again, drawn as a vertical line.

    Raises:
      ValueError: `steps` and `losses` are empty or differ in length.
    """
    if not len(steps) or len(steps) != len(losses):
        raise ValueError(f"steps and losses must have one equal length above 0; got {len(steps)} and {len(losses)}")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)", title="Training loss")
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="each step")
    smooth = moving_average(np.asarray(losses, np.float64), SMOOTHING_STEPS)
    axes.plot(steps, smooth, color="tab:blue", linewidth=2, label=f"mean of the last {SMOOTHING_STEPS} steps")
    if resumed_at is not None:
        axes.axvline(resumed_at, color="tab:gray", linestyle="--", label="interrupted, then resumed")
    axes.grid(alpha=0.3)
    axes.legend()
    save_png(figure, path)


def plot_expert_load(
    steps: Sequence[int], loads: Int[np.ndarray, "steps layers experts"], layers: Sequence[int], path: str | Path
) -> None:
    """Draws how many tokens each expert received, relative to an even share (1 is even, 2 is twice its share).

    Above, a heat map of layers by experts, averaged over the last tenth of the run; below, the busiest expert of each layer
    over the steps.

    Args:
      steps: the training steps of `loads`.
      loads: tokens that each expert received in each step.
      layers: the model's indices of the layers, for the labels.
      path: the PNG file to write.

    Raises:
      ValueError: the shapes do not fit, or there is nothing to draw.
    """
    loads = np.asarray(loads)
    if loads.ndim != 3 or not loads.size or loads.shape[:2] != (len(steps), len(layers)):
        raise ValueError(
            f"loads must have the shape (steps, layers, experts)=({len(steps)}, {len(layers)}, any), none of them 0; "
            f"got {loads.shape}"
        )
    relative = relative_load(loads)
    last = relative[-max(1, len(steps) // 10) :].mean(axis=0)
    figure = Figure(figsize=(9, 3.5 + 0.35 * len(layers)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[0.6 + 0.35 * len(layers), 2.5])
    image = above.imshow(last, aspect="auto", cmap="viridis", vmin=0, vmax=max(2.0, float(last.max())))
    above.set(title="Expert load at the end of training", xlabel="expert", ylabel="layer", yticks=range(len(layers)))
    above.set_yticklabels([str(layer) for layer in layers])
    figure.colorbar(image, ax=above, label="share of tokens (1 is even)")
    for index, layer in enumerate(layers):
        below.plot(steps, moving_average(relative[:, index].max(axis=-1), SMOOTHING_STEPS), label=f"layer {layer}")
    below.set(title="The busiest expert of each layer", xlabel="step", ylabel="share (1 is even)", ylim=(0, None))
    below.grid(alpha=0.3)
    if len(layers) <= 12:
        below.legend(ncols=4, fontsize="small")
    save_png(figure, path)


def relative_load(loads: Int[np.ndarray, "*any experts"]) -> Float[np.ndarray, "*any experts"]:
    """load / mean load over the experts; 1 where no expert received a token."""
    mean = loads.mean(axis=-1, keepdims=True)
    return np.where(mean > 0, loads / np.maximum(mean, np.finfo(float).tiny), 1.0)


def moving_average(values: Float[np.ndarray, "steps"], width: int) -> Float[np.ndarray, "steps"]:
    """out[i] = mean of values[max(0, i - width + 1) .. i]."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - width)
    return (total[end] - total[start]) / (end - start)


def save_png(figure: Figure, path: str | Path) -> None:
    """Writes `figure` at once: a reader of `path` sees the old picture or the whole new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        FigureCanvasAgg(figure).print_png(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
