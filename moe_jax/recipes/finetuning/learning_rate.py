"""Finds a learning rate: a short run from the start state at rising rates (Smith, https://arxiv.org/abs/1506.01186)."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moe_jax.models.decoder import Decoder
from moe_jax.recipes.finetuning.loop import load_training
from moe_jax.recipes.finetuning.prepare import plan_run
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.runtime.files import write_text
from moe_jax.runtime.processes import is_first_process
from moe_jax.train.batch import put_batch

FOLDER = "learning_rate"
"""The folder in a run's output for the losses and their picture."""
STEPS = 100
"""Default maximum number of steps of a sweep."""
LOWEST, HIGHEST = 1e-2, 1e3
"""The ends of a sweep, as multiples of the default rate of the run's kind."""
SMOOTHING = 0.9
"""The weight of earlier steps in the smoothed loss, an exponential mean."""
DIVERGED = 1.5
"""A sweep ends when the smoothed loss reaches this multiple of its smallest value."""
BELOW = 10
"""The suggestion is the rate at the smallest smoothed loss, divided by this number."""


class LearningRates(NamedTuple):
    """The result of a sweep: one entry for each step."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    suggested: float
    """A tenth of the rate at which the smoothed loss was smallest."""

    def table(self, rows: int = 12) -> str:
        """Returns some of the steps as lines of rate, loss and smoothed loss."""
        chosen = sorted({round(i) for i in np.linspace(0, len(self.rates) - 1, min(rows, len(self.rates)))})
        lines = [f"{self.rates[i]:>13.1e}  {self.losses[i]:>8.4f}  {self.smoothed[i]:>8.4f}" for i in chosen]
        return "\n".join([f"{'learning rate':>13}  {'loss':>8}  {'smoothed':>8}", *lines])


def find_learning_rate(
    settings: FinetuneSettings, *, model: Decoder | None = None, tokenizer: Any = None, steps: int = STEPS
) -> LearningRates:
    """Runs steps at rising learning rates, prints the losses, and suggests a rate for the run.

    The trained weights are discarded.

    Rates rise by a constant factor per step, from 1/100 to 1000 times the default of the run's kind. The sweep ends early when
    the loss has diverged. Files are written only to `output/learning_rate`: losses.json and loss.png.

    Args:
      settings: the run. Its own rate and number of steps have no effect.
      model, tokenizer: as in `finetune`; the model's arrays are consumed.
      steps: maximum number of steps, at least 10.

    Raises:
      ValueError: fewer steps than 10, or the loss is not finite at the first step.
      FileNotFoundError, ValueError: as `finetune` raises before it reads weights.
    """
    if steps < 10:
        raise ValueError(f"steps={steps} must be at least 10")
    folder = Path(settings.output).expanduser() / FOLDER
    # In its own folder no checkpoint of another run interferes.
    run = plan_run(replace(settings, output=str(folder), dry_run=False, find_learning_rate=False), model, tokenizer)
    default = settings.default_learning_rate
    rates = np.geomspace(LOWEST * default, HIGHEST * default, steps).tolist()
    try:
        found = _swept(run, model, rates)
    finally:
        run.batches.close()
    if is_first_process():
        # Imported here: it is slow, and training does not need it.
        from moe_jax.train.plots import plot_learning_rates

        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "losses.json", json.dumps(found._asdict(), indent=2) + "\n")
        plot_learning_rates(*found, folder / "loss.png")
        print(found.table())
        print(
            f"suggested: --learning-rate {found.suggested:.1e}, a tenth of the rate with the smallest smoothed loss"
            f"{_remark(found, rates)}; picture in {folder / 'loss.png'}"
        )
    return found


def _swept(run: Any, model: Decoder | None, rates: Sequence[float]) -> LearningRates:
    """Trains one step at each rate, until the loss has diverged."""
    training = load_training(run, model, schedule=_schedule(rates))
    state, losses, smoothed, mean = training.state, list[float](), list[float](), 0.0
    if is_first_process():
        print("compiling the first step ...", flush=True)
    for step in range(len(rates)):
        state, metrics = training.step(state, put_batch(next(run.batches), state.params, run.parallelism))
        loss = float(jax.device_get(metrics["loss"]))
        if not math.isfinite(loss):
            break
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        losses.append(loss)
        # Divided by the sum of all weights, since the mean began at zero.
        smoothed.append(mean / (1 - SMOOTHING ** (step + 1)))
        if smoothed[-1] > DIVERGED * min(smoothed):
            break
    if not losses:
        raise ValueError("the loss is not finite at the first step, before any learning: check data and dtypes")
    return LearningRates(list(rates[: len(losses)]), losses, smoothed, rates[int(np.argmin(smoothed))] / BELOW)


def _schedule(rates: Sequence[float]) -> optax.Schedule:
    first, factor = rates[0], rates[1] / rates[0]
    return lambda step: first * jnp.power(factor, jnp.asarray(step, jnp.float32))


def _remark(found: LearningRates, rates: Sequence[float]) -> str:
    """Returns a remark if the smallest loss is at an end of the sweep, and so may not be a minimum."""
    smallest = int(np.argmin(found.smoothed))
    if smallest == len(rates) - 1:
        return " (the loss still fell at the highest rate)"
    return " (the loss never fell: look at the data first)" if smallest == 0 else ""
