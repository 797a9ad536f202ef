"""Validates a run on preferences (data, devices, sizes, existing checkpoints) before any weights are loaded."""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from moe_jax.models.decoder import Decoder
from moe_jax.preferences.batches import PreferenceBatches, preference_batches
from moe_jax.preferences.documents import Preferences, open_preferences
from moe_jax.recipes.preferring.settings import PreferSettings
from moe_jax.recipes.run.best import told_held_out
from moe_jax.recipes.run.folder import noted_steps
from moe_jax.recipes.run.identity import identity_of, saved_run
from moe_jax.recipes.run.model import PlannedModel, plan_model


@dataclass(frozen=True)
class PlannedPreferences(PlannedModel):
    """A run whose data, devices and sizes fit together.

    Attributes:
      settings: the settings, with `epochs` turned into `steps`.
      data, eval_data: the preferences; `eval_data` is None without a measurement.
      identity: what may not change between the start of the run and its resumption, but the starting weights.
      first_batch: the number of examples in the first batch.
    """

    settings: PreferSettings
    data: Preferences
    eval_data: Preferences | None
    identity: dict[str, Any]
    first_batch: int

    def batches(self, data: Preferences, *, in_order: bool = False, reference: np.ndarray | None = None) -> PreferenceBatches:
        """Returns batches of the training data, or of other data, a micro-batch's rows each."""
        settings = self.settings
        rows = settings.batch_size if data is self.data else settings.batch_size // settings.gradient_accumulation
        return preference_batches(
            data,
            self.tokenizer,
            seq_len=settings.seq_len,
            batch_size=rows,
            max_length=settings.max_length,
            seed=None if in_order else settings.seed,
            reference=reference,
        )

    def announcement(self, steps_done: int) -> str:
        """Returns a few lines: what adapters train, the data, the steps and the epochs."""
        settings, kind = self.settings, "pairs" if self.data.of_pairs else "answers"
        epochs = settings.steps * self.first_batch / len(self.data)
        trained = "" if self.lora is None else f"{self.lora}\n"
        held_out = ""
        if self.eval_data is not None:
            rows = settings.batch_size // settings.gradient_accumulation
            held_out = f"{told_held_out(settings, len(self.eval_data), kind, rows)}\n"
        devices = "" if self.devices == 1 else f" on {self.devices} devices"
        return (
            f"{trained}{len(self.data):,} {kind}, loss {settings.preference.loss} with beta {settings.preference.scale:g}\n"
            f"{held_out}steps {steps_done + 1} to {settings.steps}, {settings.batch_size} packed rows of {settings.seq_len} "
            f"tokens a step{devices}, {self.first_batch} {kind} in the first: about {epochs:.2g} epochs"
        )


def plan_preferences(settings: PreferSettings, model: Decoder | None, tokenizer: Any) -> PlannedPreferences:
    """Checks everything that can be checked without weights, and writes nothing; arguments and errors as in `prefer`."""
    planned, preference = plan_model(settings, model, tokenizer), settings.preference
    data, eval_data = (
        None if path is None else open_preferences(path, of_pairs=preference.of_pairs, plain=settings.plain_text)
        for path in (settings.data, settings.eval_data)
    )
    assert data is not None
    if eval_data is not None and eval_data.fingerprint == data.fingerprint:
        raise ValueError(f"eval_data={settings.eval_data!r} has the same contents as data, and must not be trained on")
    identity = identity_of(settings, planned.config, planned.tokenizer, data.fingerprint)
    identity |= json.loads(json.dumps({"preference": asdict(preference)}))
    of_data: dict[str, Any] = dict(data=data, eval_data=eval_data, identity=identity)
    plan = PlannedPreferences(**vars(planned), settings=settings, first_batch=0, **of_data)
    # Made now, so that messages that the chat template refuses are named before minutes of loading.
    batches = plan.batches(data)
    try:
        count = int((next(batches)["example"] >= 0).sum())
        if settings.epochs is not None:
            steps = noted_steps(Path(settings.output).expanduser(), settings.epochs) if saved_run(settings.output)[0] else None
            steps = _counted_steps(batches, settings.epochs) if steps is None else steps
            plan = replace(plan, settings=replace(settings, steps=steps, epochs=None))
        return replace(plan, first_batch=count)
    finally:
        batches.close()


def _counted_steps(batches: PreferenceBatches, epochs: float) -> int:
    """Returns the number of steps in `epochs` passes through the data, given batches that begin."""
    examples, number = len(batches.preferences), 1
    with tqdm(total=examples, desc="counting steps", unit=" examples", delay=2, leave=False, disable=None) as progress:
        while batches.position < examples:
            progress.update(batches.position - progress.n)
            next(batches)
            number += 1
    # The last batch of an epoch has examples of the next one too.
    return max(1, math.ceil(epochs * examples * number / batches.position - 1e-9))
