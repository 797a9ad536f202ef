"""A run on preferences: settings in, a trained model or adapter and a log out. An interrupted run continues."""

import hashlib
import json
import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from moe_jax.cost.flops import training_flops_per_token
from moe_jax.models.decoder import Decoder
from moe_jax.preferences.batches import PreferenceBatches, preference_batches
from moe_jax.preferences.documents import Preferences, open_preferences
from moe_jax.preferences.objective import Preference, reference_table
from moe_jax.recipes.preferring.settings import PreferSettings
from moe_jax.recipes.run.best import told_held_out
from moe_jax.recipes.run.folder import noted_steps
from moe_jax.recipes.run.identity import FP8_DENSE, PRECISION, identity_of, saved_run, with_weights
from moe_jax.recipes.run.loop import Begun, RunResult, Task, announce, begin, run
from moe_jax.recipes.run.model import PlannedModel, load_model, make_training, plan_model
from moe_jax.runtime.files import write_text
from moe_jax.runtime.processes import barrier, is_first_process, texts_of_all
from moe_jax.train.on_devices import on_devices
from moe_jax.train.starting_weights import MODEL

REFERENCE = "reference_{}.npy"
"""Name of the file for "data" or "eval_data". A second file with the ending .of records its inputs."""

READ = ("plain_text", "seq_len", "max_length", "dtype", "param_dtype", PRECISION, FP8_DENSE, "preference", "config")
"""Entries of a run's identity that affect the log-probabilities, besides the model, its tokenizer and the data."""

MEASURED = "loss", "reward_margin", "reward_accuracy"

PreferResult = RunResult


@dataclass(frozen=True)
class PlannedPreferences(PlannedModel):
    """A run whose data, devices and sizes fit together.

    Attributes:
      settings: the settings, with `epochs` turned into `steps`.
      data, eval_data: the preferences; `eval_data` is None without a measurement.
      identity: the facts that may not change between the start of the run and its resumption, except the starting weights.
      first_batch: the number of examples in the first batch.
    """

    settings: PreferSettings
    data: Preferences
    eval_data: Preferences | None
    identity: dict[str, Any]
    first_batch: int

    def batches(self, data: Preferences, *, in_order: bool = False, reference: np.ndarray | None = None) -> PreferenceBatches:
        """Returns batches of the training data, or of other data with a micro-batch's rows each."""
        settings = self.settings
        rows = settings.batch_size if data is self.data else settings.rows
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
        """Returns a few lines: the trained adapters, the data, the steps and the epochs."""
        settings, kind = self.settings, "pairs" if self.data.of_pairs else "answers"
        epochs = settings.steps * self.first_batch / len(self.data)
        trained = "" if self.lora is None else f"{self.lora}\n"
        held_out = "" if self.eval_data is None else f"{told_held_out(settings, len(self.eval_data), kind)}\n"
        devices = "" if self.devices == 1 else f" on {self.devices} devices"
        return (
            f"{trained}{len(self.data):,} {kind}, loss {settings.preference.loss} with beta {settings.preference.scale:g}\n"
            f"{held_out}steps {steps_done + 1} to {settings.steps}, {settings.batch_size} packed rows of {settings.seq_len} "
            f"tokens a step{devices}, {self.first_batch} {kind} in the first: about {epochs:.2g} epochs"
        )


def prefer(
    settings: PreferSettings,
    *,
    model: Decoder | None = None,
    tokenizer: Any = None,
    stop_after: int | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> RunResult:
    """Trains a model on preferences. If `settings.output` holds checkpoints of the same run, continues from the newest.

    On SIGTERM the run saves and returns; on the first Ctrl-C it saves and raises KeyboardInterrupt. All processes of a job call
    this together, as with `finetune`.

    Args:
      settings: the run.
      model: start from this model instead of reading `settings.model`. Its arrays are consumed. It must have no adapters. If
        its parameters are on a mesh of `make_mesh`, training is spread over it.
      tokenizer: use this one instead of reading `settings.tokenizer`.
      stop_after: save and return after this step, as if interrupted.
      on_step: called in the first process after each step with its record, the line of metrics.jsonl.

    Raises:
      ValueError: settings that contradict each other, bad data, or a folder that holds another run. No weights have been read
        and nothing has been written then.
      FileNotFoundError: there is no such data, tokenizer or model.
      BlockingIOError: another run is using the output folder.
      FloatingPointError: the loss is not finite.
    """
    if settings.dry_run:
        raise ValueError("settings.dry_run=True: call moe_jax.recipes.dry_run(settings), which trains nothing")
    plan = plan_preferences(settings, model, tokenizer)
    with ExitStack() as until_end:
        identity = with_weights(plan.identity, model, settings.model)
        held_out = None if plan.eval_data is None else plan.eval_data.fingerprint
        begun = begin(plan.settings, identity, held_out, model, until_end)
        lines = plan.announcement(begun.step)
        announce(settings, plan.settings.steps, begun, lines, command="prefer", tokenizer=plan.tokenizer)
        task = _Preferences(plan, begun, model, identity)
        result = run(task, plan.settings, begun, stop_after=stop_after, on_step=on_step)
    if (skipped := task.batches.skipped) and is_first_process():
        why = "their prompts leave no room for an answer, or both answers are equal"
        tqdm.write(f"{len(skipped):,} examples were left out: {why}")
    return result


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
    # Built now, so that messages that the chat template refuses are reported before minutes of loading.
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
    """Returns the number of steps in `epochs` passes through the data; `batches` are at their beginning."""
    examples, number = len(batches.preferences), 1
    with tqdm(total=examples, desc="counting steps", unit=" examples", delay=2, leave=False, disable=None) as progress:
        while batches.position < examples:
            progress.update(batches.position - progress.n)
            next(batches)
            number += 1
    # The last batch of an epoch also has examples of the next one.
    return max(1, math.ceil(epochs * examples * number / batches.position - 1e-9))


class _Preferences(Task):
    """The task of a run on preferences."""

    def __init__(self, plan: PlannedPreferences, begun: Begun, model: Decoder | None, identity: dict[str, Any]):
        settings = plan.settings
        model = load_model(settings, plan, model)
        reference, of_held_out = (
            None if data is None else table_of_reference(plan, data, model, name, identity)
            for name, data in (("data", plan.data), ("eval_data", plan.eval_data))
        )
        self.plan, self.batches = plan, plan.batches(plan.data, reference=reference)
        self.objective, self.flops_per_token = Preference(settings.preference), _flops_per_token(plan)
        super().__init__(plan, begun, make_training(settings, plan.parallelism, model, self.objective))
        if begun.step:
            self.batches.set_state(begun.position["data"])
        self.held_out: list[dict[str, jax.Array]] = []
        if plan.eval_data is not None:
            held_out = plan.batches(plan.eval_data, reference=of_held_out)
            self.held_out = [self.put(next(held_out)) for _ in range(settings.eval_batches)]
            held_out.close()
        options = None if plan.parallelism is None else plan.parallelism.compiler_options
        of_batch = on_devices(self.objective, self.training.graph, parallelism=plan.parallelism)
        self.evaluate = jax.jit(of_batch, compiler_options=options)

    def record(
        self, step: int, metrics: dict[str, Any], batch: dict[str, np.ndarray], seconds: float
    ) -> tuple[dict[str, Any], dict[str, list]]:
        record, layers = super().record(step, metrics, batch, seconds)
        return record | {"num_examples": int((batch["example"] >= 0).sum())}, layers

    def places_of(self, batch: dict[str, np.ndarray]) -> str:
        examples = np.unique(batch["example"][batch["example"] >= 0])
        return "The batch holds:\n  " + "\n  ".join(self.plan.data.where(int(index)) for index in examples)

    def measure(self) -> dict[str, float]:
        """Returns means of loss, margin and accuracy, as "eval_loss" and so on. Batches are weighted by their examples."""
        total, sums = 0.0, dict.fromkeys(MEASURED, 0.0)
        for batch in self.held_out:
            prepared = self.objective.prepare(batch, jnp.ones(()))
            value, parts = jax.device_get(self.evaluate(self.state.params, self.state.fixed, prepared))
            found, examples = self.objective.metrics(value, parts, jnp.ones(())), float(prepared["num_examples"])
            total += examples
            sums = {name: sums[name] + examples * float(found[name]) for name in MEASURED if name in found}
        return {f"eval_{name}": summed / total for name, summed in sums.items()} if self.held_out else {}


def table_of_reference(
    plan: PlannedPreferences, data: Preferences, model: Decoder, name: str, identity: dict[str, Any]
) -> np.ndarray | None:
    """Returns the log-probabilities of the model that the run began with, kept in a file of the run's folder.

    A file that was computed from other data or another model is recomputed. None if the loss needs no table.

    Args:
      name: "data" or "eval_data".
      identity: the run's, with the starting weights.
    """
    settings = plan.settings
    if settings.lora is not None or not settings.preference.needs_reference:
        return None
    file = Path(settings.output).expanduser() / REFERENCE.format(name)
    note = file.with_suffix(".of")
    # The contents of the data may change between the parts of a run, and the table with them.
    read = {name: identity[name] for name in (*READ, "tokenizer", MODEL)} | {"contents": data.fingerprint}
    computed_of = hashlib.blake2b(json.dumps(read, sort_keys=True).encode(), digest_size=16).hexdigest()
    is_there = file.exists() and note.exists() and note.read_text() == computed_of
    # The first process decides for all: either all compute the table or none does.
    if texts_of_all(str(is_there))[0] == "False":
        with tqdm(total=len(data), desc="log-probabilities of the reference", unit="example") as progress:
            table = reference_table(
                model,
                plan.batches(data, in_order=True),
                lambda done, _: progress.update(done - progress.n),
                parallelism=plan.parallelism,
            )
        if is_first_process():
            unfinished = file.with_name(f".{file.name}.incomplete.npy")
            np.save(unfinished, table)
            # A table without its note is ignored. Removing the note first ensures that it never describes another table.
            note.unlink(missing_ok=True)
            os.replace(unfinished, file)
            write_text(note, computed_of)
        barrier("reference written")
    return np.load(file)


def _flops_per_token(plan: PlannedPreferences) -> float:
    """Returns the FLOPs of a token in a step: forward passes, and backward passes (half of them for adapters)."""
    preference, adapted = plan.settings.preference, plan.settings.lora is not None
    passes = 2 if adapted else 3
    if adapted and preference.needs_reference:
        passes += 1
    if not preference.of_pairs:
        # Mismatched answers, also of the reference.
        passes += 2 if adapted else 1
    return passes / 3 * training_flops_per_token(plan.config, plan.settings.seq_len)
