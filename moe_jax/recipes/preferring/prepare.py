"""Validates a run on preferences (data, sizes, existing checkpoints) before any weights are loaded."""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flax import nnx
from tqdm import tqdm

from moe_jax.adapters.add import LoraSummary, planned_lora
from moe_jax.checkpoint.hf_load import check_form, find_config, read_config
from moe_jax.checkpoint.stored import weights_fingerprint
from moe_jax.checkpoint.tokenizer import load_tokenizer
from moe_jax.checkpoint.training import finished_steps
from moe_jax.config import ModelConfig, config_to_dict
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.layout import mesh_of
from moe_jax.preferences.batches import PreferenceBatches, preference_batches
from moe_jax.preferences.documents import Preferences, open_preferences
from moe_jax.recipes.preferring.settings import PreferSettings
from moe_jax.recipes.run.best import told_held_out
from moe_jax.recipes.run.export import check_destination
from moe_jax.recipes.run.identity import check_model, entries_of
from moe_jax.recipes.run.settings_file import noted_steps
from moe_jax.train.data.tokenization import tokenizer_fingerprint
from moe_jax.train.starting_weights import MODEL, values_of

RESUME_MUST_MATCH = (
    "plain_text",
    "seq_len",
    "max_length",
    "batch_size",
    "gradient_accumulation",
    "learning_rate",
    "min_learning_rate_ratio",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "seed",
    "dtype",
    "param_dtype",
)
"""Settings that may not change between the start of a run and its resumption: the run would be another."""


@dataclass(frozen=True)
class PlannedPreferences:
    """A run whose data and sizes fit together.

    Attributes:
      settings: the settings, with `epochs` turned into `steps`.
      tokenizer, config: of the model.
      data, eval_data: the preferences; `eval_data` is None without a measurement.
      lora: what the run's adapters will train; None for a run of all parameters.
      identity: what may not change between the start of the run and its resumption.
      first_batch: the number of examples in the first batch.
    """

    settings: PreferSettings
    tokenizer: Any
    config: ModelConfig
    data: Preferences
    eval_data: Preferences | None
    lora: LoraSummary | None
    identity: dict[str, Any]
    first_batch: int

    def batches(self, data: Preferences, *, in_order: bool = False, reference: Any = None) -> PreferenceBatches:
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
        return (
            f"{trained}{len(self.data):,} {kind}, loss {settings.preference.loss} with beta {settings.preference.scale:g}\n"
            f"{held_out}steps {steps_done + 1} to {settings.steps}, {settings.batch_size} packed rows of {settings.seq_len} "
            f"tokens a step, {self.first_batch} {kind} in the first: about {epochs:.2g} epochs"
        )


def plan_preferences(settings: PreferSettings, model: Decoder | None, tokenizer: Any) -> PlannedPreferences:
    """Checks everything that can be checked without weights, and writes nothing; arguments and errors as in `prefer`."""
    check_destination(settings)
    if model is not None and (mesh := mesh_of(nnx.state(model))) is not None and mesh.size > 1:
        raise ValueError(f"a run on preferences uses one device, and the model lies on {mesh.size}; load it without a mesh")
    if model is None:
        # A misspelt model is named as such, before its tokenizer is looked for.
        find_config(settings.model)
        check_form(settings.model, settings.weights)
    tokenizer = load_tokenizer(settings.tokenizer or settings.model) if tokenizer is None else tokenizer
    of_pairs = settings.preference.of_pairs
    data, eval_data = (
        None if path is None else open_preferences(path, of_pairs=of_pairs, plain=settings.plain_text)
        for path in (settings.data, settings.eval_data)
    )
    assert data is not None
    if eval_data is not None and eval_data.fingerprint == data.fingerprint:
        raise ValueError(f"eval_data={settings.eval_data!r} has the same contents as data, and must not be trained on")
    config = read_config(settings.model, mtp=False) if model is None else model.config
    check_model(settings, config, tokenizer, model)
    lora = None if settings.lora is None else planned_lora(config, settings.lora).summary
    identity = entries_of(settings, RESUME_MUST_MATCH)
    identity |= json.loads(json.dumps({"preference": asdict(settings.preference)}))
    identity |= {"config": config_to_dict(config), "data": data.fingerprint, "tokenizer": tokenizer_fingerprint(tokenizer)}
    identity[MODEL] = weights_fingerprint(settings.model) if model is None else values_of(model)
    plan = PlannedPreferences(settings, tokenizer, config, data, eval_data, lora, identity, 0)
    # Made now, so that messages that the chat template refuses are named before minutes of loading.
    batches = plan.batches(data)
    try:
        count = int((next(batches)["example"] >= 0).sum())
        return replace(plan, first_batch=count, settings=_with_steps(settings, batches))
    finally:
        batches.close()


def _with_steps(settings: PreferSettings, batches: PreferenceBatches) -> PreferSettings:
    """Returns the settings with `epochs` turned into `steps`, given batches that begin; a resumed run keeps its number."""
    if settings.epochs is None:
        return settings
    output = Path(settings.output).expanduser()
    steps = noted_steps(output, settings.epochs) if finished_steps(output / "checkpoints") else None
    if steps is None:
        examples = len(batches.preferences)
        with tqdm(total=examples, desc="counting steps", unit=" examples", delay=2, leave=False, disable=None) as progress:
            number = 1
            while batches.position < examples:
                progress.update(batches.position - progress.n)
                next(batches)
                number += 1
        # The last batch of an epoch has examples of the next one too.
        steps = max(1, math.ceil(settings.epochs * examples * number / batches.position - 1e-9))
    return replace(settings, steps=steps, epochs=None)
