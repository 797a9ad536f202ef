"""A run on preferences: settings in, a trained model or adapter and a log out. An interrupted run continues."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from moe_jax.cost.flops import training_flops_per_token
from moe_jax.models.decoder import Decoder
from moe_jax.preferences.batches import PreferenceBatches
from moe_jax.preferences.objective import Preference
from moe_jax.recipes.preferring.evaluation import make_preference_evaluation
from moe_jax.recipes.preferring.prepare import PlannedPreferences, plan_preferences
from moe_jax.recipes.preferring.reference_file import table_of_reference
from moe_jax.recipes.preferring.settings import PreferSettings
from moe_jax.recipes.run.loop import Begun, RunResult, announce, begin, learning_rates, load_model, run
from moe_jax.recipes.run.run_log import RunLog
from moe_jax.train.batch import put_batch
from moe_jax.train.metrics import record_of_step
from moe_jax.train.optimizer import make_optimizer
from moe_jax.train.run_checkpoints import freed
from moe_jax.train.state import TrainState, init_state
from moe_jax.train.step import make_train_step

PreferResult = RunResult


def prefer(
    settings: PreferSettings,
    *,
    model: Decoder | None = None,
    tokenizer: Any = None,
    stop_after: int | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> RunResult:
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
    with ExitStack() as until_end:
        held_out = None if plan.eval_data is None else plan.eval_data.fingerprint
        begun = begin(plan.settings, plan.identity, held_out, model, until_end)
        announce(settings, plan.settings.steps, begun, plan.announcement(begun.step), command="prefer")
        task = _Preferences(plan, begun, model)
        result = run(task, plan.settings, begun, stop_after=stop_after, on_step=on_step)
    if skipped := task.batches.skipped:
        why = "their prompts leave no room for an answer, or both answers are equal"
        tqdm.write(f"{len(skipped):,} examples were left out: {why}")
    return result


class _Preferences:
    """The task of a run on preferences: `recipes.run.loop.Task`."""

    skipped: Mapping[int, str] = {}

    def __init__(self, plan: PlannedPreferences, begun: Begun, model: Decoder | None):
        settings = plan.settings
        model = load_model(settings, model, mtp=False)
        self.plan, self.checkpoints = plan, begun.checkpoints
        reference, of_held_out = (
            table_of_reference(plan, data, model, name) for name, data in (("data", plan.data), ("eval_data", plan.eval_data))
        )
        self.batches = plan.batches(plan.data, reference=reference)
        schedule = learning_rates(settings)
        optimizer = make_optimizer(schedule, weight_decay=settings.weight_decay, max_grad_norm=settings.max_grad_norm)
        objective, micro_batches = Preference(settings.preference), settings.gradient_accumulation
        self.graph, self.state = nnx.graphdef(model), init_state(model, optimizer)
        self.train = make_train_step(
            self.graph, optimizer, objective, schedule=schedule, gradient_accumulation=micro_batches, remat=settings.remat
        )
        if begun.step:
            self.restore(begun.step)
            self.batches.set_state(begun.position["data"])
        self.evaluate = None
        if plan.eval_data is not None:
            held_out = plan.batches(plan.eval_data, reference=of_held_out)
            batches = _held_out(held_out, settings.eval_batches, self.state)
            self.evaluate = make_preference_evaluation(self.graph, objective, batches)

    def next_batch(self) -> dict[str, np.ndarray]:
        return next(self.batches)

    def step(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        self.state, metrics = self.train(self.state, put_batch(batch, self.state.params))
        return metrics

    def record(
        self, step: int, metrics: dict[str, Any], batch: dict[str, np.ndarray], seconds: float
    ) -> tuple[dict[str, Any], dict[str, list]]:
        record = record_of_step(step, metrics, self.plan.config, seconds, _flops_per_token(self.plan))
        return record | {"num_examples": int((batch["example"] >= 0).sum())}, {}

    def places_of(self, batch: dict[str, np.ndarray]) -> str:
        examples = np.unique(batch["example"][batch["example"] >= 0])
        return "The batch holds:\n  " + "\n  ".join(self.plan.data.where(int(index)) for index in examples)

    def measure(self) -> dict[str, float]:
        return {} if self.evaluate is None else self.evaluate(self.state)

    def end_step(self, step: int) -> None:
        pass

    def position(self) -> dict[str, Any]:
        return {"data": self.batches.get_state()}

    def sample(self, step: int, log: RunLog) -> None:
        pass

    def restore(self, step: int) -> None:
        """Reads a checkpoint, which lacks frozen weights; all other arrays of the state are deleted."""
        frozen = self.state.frozen
        self.state = replace(self.checkpoints.restore(step, freed(self.state.without_frozen)), frozen=frozen)

    def model(self) -> Decoder:
        return nnx.merge(self.graph, self.state.params, self.state.fixed)

    def close(self) -> None:
        self.batches.close()


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
