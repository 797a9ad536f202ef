"""The loop of every run: steps from its newest checkpoint to its end, with measurements, checkpoints and a log."""

import json
import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from tqdm import tqdm

from moe_jax.checkpoint.training import TrainingCheckpoints
from moe_jax.models.decoder import Decoder
from moe_jax.models.layers_in_pipe import layers_in_pipe
from moe_jax.parallel.pipeline.chunks import PipeShape
from moe_jax.recipes.run.best import Best, best_of, counts, told_early, told_stop
from moe_jax.recipes.run.folder import output_lock, write_settings
from moe_jax.recipes.run.identity import same_run
from moe_jax.recipes.run.model import PlannedModel
from moe_jax.recipes.run.run_log import RunLog
from moe_jax.recipes.run.settings import RunSettings
from moe_jax.runtime.processes import barrier, is_first_process, require_shared, texts_of_all, unlike_the_first
from moe_jax.train.batch import Batch, put_batch
from moe_jax.train.metrics import of_layers, read_records, record_of_step
from moe_jax.train.model_of_run import BASE
from moe_jax.train.run_checkpoints import PIPE, freed, restored
from moe_jax.train.state import TrainState

REMAT = "remat"
"""Name of the entry of a checkpoint's position with the number of layers that keep their residuals."""


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
      model: the trained model; with `settings.lora`, the starting weights with trained adapters.
      step: the last step done.
      metrics: the records of all steps of the run, including the steps before it was resumed.
      finished: all of `settings.steps` are done, or `settings.early_stop` ended the run.
      stopped_early: `settings.early_stop` ended the run.
      model_step: the step of the model's weights: the best step if `settings.keep_best` and the run is finished.
    """

    model: Decoder
    step: int
    metrics: list[dict[str, Any]]
    finished: bool = True
    stopped_early: bool = False
    model_step: int = 0


@dataclass(frozen=True)
class Begun:
    """A run's beginning: at step 0 in a new folder, or at a checkpoint.

    Attributes:
      step: the newest checkpoint's step; 0 without one.
      position: the position of that checkpoint; empty without one.
      fixed: entries of every position that no step changes: the identity, and the base of adapters.
      best: the best held-out loss up to the checkpoint.
      is_over: no step is left: all are done, or the run stopped early.
    """

    checkpoints: TrainingCheckpoints
    step: int
    position: dict[str, Any]
    fixed: dict[str, Any]
    best: Best
    is_over: bool


def begin(
    settings: RunSettings, identity: dict[str, Any], held_out: str | None, model: Decoder | None, until_end: ExitStack
) -> Begun:
    """Locks the run's folder until `until_end` closes, and compares its checkpoints with the run.

    Args:
      identity: the facts that may not change between the start of the run and its resumption.
      held_out: the fingerprint of the held-out data.

    Raises:
      ValueError: the folder holds another run, or has more steps than `settings.steps`.
      BlockingIOError: another run is using the folder.
    """
    output = Path(settings.output).expanduser()
    if jax.process_count() > 1:
        _check_same_everywhere(asdict(settings) | identity | {"held-out data": held_out})
        require_shared(output)
    until_end.enter_context(output_lock(output))
    checkpoints = TrainingCheckpoints(output / "checkpoints", keep=settings.keep_checkpoints, remove_unfinished=True)
    step, position = checkpoints.latest_step() or 0, {}
    if step:
        position = checkpoints.position(step)
        identity = same_run(position["identity"], identity, output)
        if settings.steps < step:
            raise ValueError(
                f"{output} holds {step} steps of this run: steps={settings.steps} would end before; use {step} or more"
            )
    best = best_of(position, settings, held_out, checkpoints.steps())
    fixed: dict[str, Any] = {"identity": identity}
    if settings.lora is not None:
        folder = Path(settings.model).expanduser()
        named = str(folder.resolve()) if folder.is_dir() else settings.model
        fixed[BASE] = named if model is None else None
    return Begun(checkpoints, step, position, fixed, best, step >= settings.steps or best.ends(settings.early_stop))


def announce(
    asked: RunSettings,
    steps: int,
    begun: Begun,
    lines: str,
    *,
    command: Literal["finetune", "prefer", "grpo"],
    tokenizer: Any,
    chat_template: str | None = None,
) -> None:
    """Prints the announcement and writes settings.json; if no step is left, only reports a run that stopped early."""
    if not is_first_process():
        return
    if not begun.is_over:
        tqdm.write(lines)
        write_settings(asked, command=command, steps=steps, tokenizer=tokenizer, chat_template=chat_template)
    elif begun.step < steps:
        tqdm.write(told_early(begun.step))


class Task(ABC):
    """A run's training state, and the operations that the loop calls. A subclass adds the data and the loss.

    Attributes:
      batches: an iterator with `get_state` and `close`; a batch is what the task's methods expect.
      training: holds the `state`, and continues with another one by `restore`.
      flops_per_token: FLOPs per token of a step, for the log.
    """

    batches: Any
    training: Any
    flops_per_token: float

    def __init__(self, planned: PlannedModel, begun: Begun, training: Any):
        self.config, self.parallelism = planned.config, planned.parallelism
        self.checkpoints, self.training = begun.checkpoints, training
        if begun.step:
            self.keep_choices(begun.position)
            self.restore(begun.step)

    @property
    def state(self) -> TrainState:
        """The state of training."""
        return self.training.state

    @property
    def skipped(self) -> Mapping[int, str]:
        """The documents that were left out so far, with reasons."""
        return {}

    def put(self, batch: dict[str, np.ndarray]) -> Batch:
        """Puts a batch on the run's devices."""
        return put_batch(batch, self.state.params, self.parallelism)

    def step(self, batch: Any) -> dict[str, Any]:
        """Trains on a batch, and returns the step's metrics."""
        placed = self.put(batch)
        if (told := self.training.step.prepare(self.state, placed)) and is_first_process():
            tqdm.write(told)
        self.training.state, metrics = self.training.step(self.state, placed)
        return metrics

    def record(self, step: int, metrics: dict[str, Any], batch: Any, seconds: float) -> tuple[dict[str, Any], dict[str, list]]:
        """Returns the line of metrics.jsonl, and lists over the layers."""
        record = record_of_step(step, metrics, self.config, seconds, self.flops_per_token)
        return record, of_layers(metrics, self.config.routed_layers)

    @abstractmethod
    def places_of(self, batch: Any) -> str:
        """Returns a sentence that names the documents of a batch, for the error of a loss that is not finite."""

    @abstractmethod
    def measure(self) -> dict[str, float]:
        """Returns "eval_loss" and other measurements on held-out data; empty without such data."""

    def end_step(self, step: int) -> None:
        """Changes the state after a step was logged and before it is saved; by default does nothing."""
        return

    def position(self) -> dict[str, Any]:
        """Returns the entries of a checkpoint's position that change from step to step, for the data of all processes."""
        data: dict[str, Any] = {}
        for text in texts_of_all(json.dumps(self.batches.get_state())):
            data |= json.loads(text)
        pipe = {} if self.parallelism is None else {PIPE: self.parallelism.pipe._asdict()}
        return {"data": data} | self.choices() | pipe

    def choices(self) -> dict[str, Any]:
        """Returns choices of the run's first step that change the last bits; a checkpoint's position stores them."""
        return {REMAT: self.training.step.remat}

    def keep_choices(self, position: Mapping[str, Any]) -> None:
        """Repeats the choices that a checkpoint's position stores."""
        # Older runs did not store it, and recomputed all layers by default.
        kept = position.get(REMAT, True)
        if self.training.step.remat == "auto" and kept != "auto":
            self.training.step.set_remat(kept)

    def sample(self, step: int, log: RunLog) -> None:
        """Writes samples of a step; an error here loses no step. By default there are none."""
        return

    def restore(self, step: int) -> dict[str, Any]:
        """Restores the state of a checkpoint in the current layout, and returns its position. The old arrays are deleted."""
        pipe, frozen = PipeShape() if self.parallelism is None else self.parallelism.pipe, self.state.frozen
        position, read = self.checkpoints.position(step), partial(self.checkpoints.restore, step)
        like = freed(self.state.without_frozen)
        found = restored(read, like, layers_in_pipe(self.config, pipe), position, pipe)
        self.training.restore(replace(found, frozen=frozen))
        return position

    def model(self) -> Decoder:
        """Returns the trained model."""
        return self.training.model()


def run(
    task: Task,
    settings: RunSettings,
    begun: Begun,
    *,
    stop_after: int | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    samples: bool = False,
) -> RunResult:
    """Trains from the run's last completed step, or from the first, to the run's end.

    Args:
      stop_after: save and return after this step, as if interrupted.
      on_step: called in the first process after each step with its record.
      samples: True if the run writes samples of text.

    Raises:
      FloatingPointError: the loss of training or of held-out data is not finite.
      KeyboardInterrupt: Ctrl-C; the run is saved.
    """
    checkpoints, step, best = begun.checkpoints, begun.step, begun.best
    last = settings.steps if stop_after is None else min(stop_after, settings.steps)
    last = step if begun.is_over else last
    checkpoints.kept_step = best.step if settings.keep_best else None
    # A run without steps left sends nothing.
    send_to = () if step >= last else settings.log_to
    log = RunLog(settings, first_step=step + 1, send_to=send_to, samples=samples, on_step=on_step)

    def save() -> None:
        checkpoints.save(step, task.state.without_frozen, {**begun.fixed, **task.position(), **best.entry()})

    checkpoints.listen()
    if step < last:
        log.tell_compiling()
    try:
        while step < last:
            began = time.perf_counter()
            try:
                batch = next(task.batches)
            except (ValueError, OSError) as error:
                # With several processes nothing can be saved: the others already wait in the next step.
                if step == begun.step or jax.process_count() > 1:
                    raise
                save()
                raise ValueError(f"{error}; the run is saved at step {step}") from error
            log.tell_skipped(task.skipped)
            metrics = task.step(batch)
            step += 1
            host = jax.device_get(metrics)
            record, layers = task.record(step, host, batch, time.perf_counter() - began)
            if not (math.isfinite(float(host["total_loss"])) and math.isfinite(record["grad_norm"])):
                raise FloatingPointError(
                    f"step {step}: loss {record['loss']}, gradient norm {record['grad_norm']} is not finite; training stopped, "
                    f"the last checkpoint is unharmed. {task.places_of(batch)}"
                )
            if step % settings.eval_every == 0 or step == last:
                record |= task.measure()
            if "eval_loss" in record:
                _check_eval_loss(record)
                best = best.after(step, record["eval_loss"]) if counts(settings, step) else best
            log.write(record, layers, last)
            task.end_step(step)
            if checkpoints.told_to_stop(step) or best.ends(settings.early_stop):
                last = step
            is_best = settings.keep_best and best.step == step
            if is_best:
                checkpoints.kept_step = step
            if step % settings.checkpoint_every == 0 or step == last or is_best:
                save()
            task.sample(step, log)
        early, model_step = step < settings.steps and best.ends(settings.early_stop), step
        finished = step >= settings.steps or early
        if finished and settings.keep_best and best.step:
            model_step = best.step
            if model_step != step:
                task.restore(model_step)
    finally:
        task.batches.close()
        log.close()
        checkpoints.close()
    barrier("metrics written")
    if checkpoints.stopped_by == signal.SIGINT and not finished:
        raise KeyboardInterrupt(told_stop("interrupted", step))
    records = read_records(Path(settings.output).expanduser() / "metrics.jsonl")
    return RunResult(task.model(), step, records, finished, early, model_step)


def _check_same_everywhere(run: dict[str, Any]) -> None:
    """Refuses hosts with different settings, given by mistake, or with different data under the same name."""
    unlike = {name: unlike_the_first(json.dumps(value, sort_keys=True, default=str)) for name, value in run.items()}
    wrong = [f"{name} of processes {numbers}" for name, numbers in unlike.items() if numbers]
    if wrong:
        raise ValueError(f"not the same as in process 0: {', '.join(wrong)}")


def _check_eval_loss(record: dict[str, Any]) -> None:
    if not math.isfinite(record["eval_loss"]):
        raise FloatingPointError(
            f"step {record['step']}: the held-out loss {record['eval_loss']} is not finite; training stopped, the last "
            "checkpoint is unharmed"
        )
