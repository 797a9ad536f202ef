"""The loop of a run on preferences: settings in, a trained model or adapter and a log out. An interrupted run continues."""

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from tqdm import tqdm

from moe_jax.adapters.add import add_lora
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.checkpoint.training import TrainingCheckpoints
from moe_jax.cost.flops import training_flops_per_token
from moe_jax.models.decoder import Decoder
from moe_jax.preferences.batches import PreferenceBatches
from moe_jax.preferences.objective import Preference
from moe_jax.recipes.finetuning.best import Best, best_of, counts, told_early, told_stop
from moe_jax.recipes.finetuning.finite import check_eval_loss
from moe_jax.recipes.finetuning.identity import check_steps, same_run
from moe_jax.recipes.finetuning.lock import output_lock
from moe_jax.recipes.finetuning.lora import base_of
from moe_jax.recipes.finetuning.run_log import RunLog
from moe_jax.recipes.finetuning.settings_file import write_settings
from moe_jax.recipes.preferring.evaluation import make_preference_evaluation
from moe_jax.recipes.preferring.prepare import PlannedPreferences, plan_preferences
from moe_jax.recipes.preferring.reference_file import table_of_reference
from moe_jax.recipes.preferring.settings import PreferSettings
from moe_jax.train.batch import put_batch
from moe_jax.train.metrics import read_records, record_of_step
from moe_jax.train.optimizer import make_optimizer, warmup_cosine
from moe_jax.train.run_checkpoints import freed
from moe_jax.train.state import TrainState, init_state
from moe_jax.train.step import make_train_step


@dataclass(frozen=True)
class PreferResult:
    """The result of a run on preferences.

    Attributes:
      model: the trained model; with its adapters, if the run trained some.
      step: the last step done.
      metrics: the records of all steps of the run, including the steps before it was resumed.
      finished: all steps are done, or `settings.early_stop` ended the run.
      stopped_early: `settings.early_stop` ended the run.
      model_step: the step that the model's weights are of: with `settings.keep_best` and a finished run, the best.
    """

    model: Decoder
    step: int
    metrics: list[dict[str, Any]]
    finished: bool
    stopped_early: bool = False
    model_step: int = 0


class Begun(NamedTuple):
    """The place where a run begins: its folder is new, or holds checkpoints."""

    step: int
    position: dict[str, Any]
    """Place in the data at the checkpoint of this step; empty without one."""
    extra: dict[str, Any]
    """The entries of a position that no step changes."""
    best: Best

    def is_over(self, settings: PreferSettings) -> bool:
        """Tells if no step is left."""
        return self.step >= settings.steps or self.best.ends(settings.early_stop)


def prefer(
    settings: PreferSettings,
    *,
    model: Decoder | None = None,
    tokenizer: Any = None,
    stop_after: int | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> PreferResult:
    """Trains a model on preferences. If `settings.output` holds checkpoints of the same run, continues from the newest.

    SIGTERM makes the run save and return, the first Ctrl-C save and raise KeyboardInterrupt.

    Args:
      settings: the run.
      model: start from this model instead of reading `settings.model`. Its arrays are consumed. It has no adapters.
      tokenizer: use this one instead of reading `settings.tokenizer`.
      stop_after: save and return after this step, as if interrupted.
      on_step: called after each step with its record, the line of metrics.jsonl.

    Raises:
      ValueError: settings that contradict each other, bad data, or a folder that holds another run. No weights have been read
        and nothing has been written then.
      FileNotFoundError: there is no such data, tokenizer or model.
      BlockingIOError: another run is under way in the output folder.
      FloatingPointError: the loss is not finite.
    """
    if settings.dry_run:
        raise ValueError("settings.dry_run=True: call moe_jax.recipes.preferring.dry_run.dry_run, which trains nothing")
    plan = plan_preferences(settings, model, tokenizer)
    asked, settings = settings, plan.settings
    output = Path(settings.output).expanduser()
    with output_lock(output):
        checkpoints = TrainingCheckpoints(output / "checkpoints", keep=settings.keep_checkpoints, remove_unfinished=True)
        steps_done, identity, position = checkpoints.latest_step() or 0, plan.identity, {}
        if steps_done:
            position = checkpoints.position(steps_done)
            identity = same_run(position["identity"], identity, output)
            check_steps(output, steps_done, settings.steps)
        extra = {"identity": identity} | base_of(settings, model)
        fingerprint = None if plan.eval_data is None else plan.eval_data.fingerprint
        begun = Begun(steps_done, position, extra, best_of(position, settings, fingerprint, checkpoints.steps()))
        if not begun.is_over(settings):
            tqdm.write(plan.announcement(steps_done))
            write_settings(asked, command="prefer", steps=settings.steps)
        elif steps_done < settings.steps:
            tqdm.write(told_early(steps_done))
        return _train(plan, model, checkpoints, begun, stop_after, on_step)


def _train(
    plan: PlannedPreferences,
    model: Decoder | None,
    checkpoints: TrainingCheckpoints,
    begun: Begun,
    stop_after: int | None,
    on_step: Callable[[dict[str, Any]], None] | None,
) -> PreferResult:
    """Trains from the run's last step, or from the first, to the run's end."""
    settings, (step, position, extra, best) = plan.settings, begun
    model = _loaded(settings, model)
    tables = [
        table_of_reference(plan, data, model, name) for name, data in (("data", plan.data), ("eval_data", plan.eval_data))
    ]
    batches = plan.batches(plan.data, reference=tables[0])
    schedule = warmup_cosine(
        float(settings.learning_rate or 0),
        steps=settings.steps,
        warmup_steps=settings.warmup_steps,
        min_ratio=settings.min_learning_rate_ratio,
    )
    optimizer = make_optimizer(schedule, weight_decay=settings.weight_decay, max_grad_norm=settings.max_grad_norm)
    graph, state, objective = nnx.graphdef(model), init_state(model, optimizer), Preference(settings.preference)
    options: dict[str, Any] = dict(gradient_accumulation=settings.gradient_accumulation, remat=settings.remat)
    train_step = make_train_step(graph, optimizer, objective, schedule=schedule, **options)
    if step:
        state = _restored(partial(checkpoints.restore, step), state)
        batches.set_state(position["data"])
    evaluate = None
    if plan.eval_data is not None:
        held_out = _held_out(plan.batches(plan.eval_data, reference=tables[1]), settings.eval_batches, state)
        evaluate = make_preference_evaluation(graph, objective, held_out)
    last = settings.steps if stop_after is None else min(stop_after, settings.steps)
    last = step if begun.is_over(settings) else last
    checkpoints.kept_step = best.step if settings.keep_best else None
    # Nothing is sent by a run that has no step left.
    log = RunLog(settings, first_step=step + 1, send_to=() if step >= last else settings.log_to, on_step=on_step)
    checkpoints.listen()
    if step < last:
        log.tell_compiling()
    try:
        while step < last:
            began = time.perf_counter()
            batch = next(batches)
            state, metrics = train_step(state, put_batch(batch, state.params))
            step += 1
            host = jax.device_get(metrics)
            record = record_of_step(step, host, plan.config, time.perf_counter() - began, _flops_per_token(plan))
            record["num_examples"] = int((batch["example"] >= 0).sum())
            if not (math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])):
                raise FloatingPointError(
                    f"step {step}: loss {record['loss']}, gradient norm {record['grad_norm']} is not finite; training "
                    "stopped, the last checkpoint is unharmed"
                )
            if evaluate is not None and (step % settings.eval_every == 0 or step == last):
                record |= evaluate(state)
                check_eval_loss(record)
                best = best.after(step, record["eval_loss"]) if counts(settings, step) else best
            log.write(record, {}, last)
            if checkpoints.told_to_stop(step) or best.ends(settings.early_stop):
                last = step
            is_best = settings.keep_best and best.step == step
            if is_best:
                checkpoints.kept_step = step
            if step % settings.checkpoint_every == 0 or step == last or is_best:
                checkpoints.save(step, state.without_frozen, {"data": batches.get_state(), **extra, **best.entry()})
        early, model_step = step < settings.steps and best.ends(settings.early_stop), step
        finished = step >= settings.steps or early
        if finished and settings.keep_best and best.step and best.step != step:
            model_step = best.step
            state = _restored(partial(checkpoints.restore, model_step), state)
    finally:
        batches.close()
        log.close()
        checkpoints.close()
    if batches.skipped:
        why = "their prompts leave no room for an answer, or both answers are equal"
        tqdm.write(f"{len(batches.skipped):,} examples were left out: {why}")
    if checkpoints.stopped_by == signal.SIGINT and not finished:
        raise KeyboardInterrupt(told_stop("interrupted", step))
    trained = nnx.merge(graph, state.params, state.fixed)
    records = read_records(Path(settings.output).expanduser() / "metrics.jsonl")
    return PreferResult(trained, step, records, finished, early, model_step)


def _loaded(settings: PreferSettings, model: Decoder | None) -> Decoder:
    """Returns the model on its device, with adapters if the run trains some."""
    if model is None:
        param_dtype = jnp.dtype(settings.param_dtype)
        dtype = jnp.dtype(settings.dtype)
        model = from_pretrained(settings.model, dtype=dtype, param_dtype=param_dtype, mtp=False, weights=settings.weights)
    model.set_precision(settings.precision, settings.fp8_dense)
    if settings.lora is not None:
        add_lora(model, settings.lora, rngs=nnx.Rngs(settings.seed))
    return model


def _restored(restore: Callable[[TrainState], TrainState], state: TrainState) -> TrainState:
    """Returns the state of a checkpoint, which lacks frozen weights; deletes all other arrays of `state`."""
    return replace(restore(freed(state.without_frozen)), frozen=state.frozen)


def _held_out(batches: PreferenceBatches, number: int, state: TrainState) -> list[dict[str, jax.Array]]:
    try:
        return [put_batch(next(batches), state.params) for _ in range(number)]
    finally:
        batches.close()


def _flops_per_token(plan: PlannedPreferences) -> float:
    """Returns the FLOPs of a token in a step: forward passes, and backward passes, of which adapters need half."""
    preference, adapted = plan.settings.preference, plan.settings.lora is not None
    passes = 2 if adapted else 3
    if adapted and preference.needs_reference:
        passes += 1
    if not preference.of_pairs:
        # Mismatched answers, of the reference too.
        passes += 2 if adapted else 1
    return passes / 3 * training_flops_per_token(plan.config, plan.settings.seq_len)
