"""A run of reinforcement learning: settings in, a trained model or adapter and a log out. An interrupted run continues."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from moe_jax.checkpoint.training import finished_steps
from moe_jax.cost.flops import training_flops_per_token
from moe_jax.models.decoder import Decoder
from moe_jax.recipes.grpo.prepare import PlannedGrpo, plan_grpo
from moe_jax.recipes.grpo.records import metrics_of, record_of_samples
from moe_jax.recipes.grpo.rollouts import Rollout, Rollouts
from moe_jax.recipes.grpo.settings import GrpoSettings
from moe_jax.recipes.run.identity import with_weights
from moe_jax.recipes.run.loop import Begun, RunResult, Task, announce, begin, run
from moe_jax.recipes.run.model import load_model, optimizer_of
from moe_jax.recipes.run.run_log import SAMPLES
from moe_jax.reinforcement.journal import Journal
from moe_jax.reinforcement.policy import Policy
from moe_jax.reinforcement.prompts import prompt_at
from moe_jax.train.metrics import append_record, of_layers

EQUAL_STEPS = 5
"""After this number of steps without any spread of rewards, a line suggests changes."""


def grpo(
    settings: GrpoSettings,
    *,
    rewards: Sequence[Callable[..., Any] | str] = (),
    environment: Callable[[], Any] | None = None,
    model: Decoder | None = None,
    tokenizer: Any = None,
    stop_after: int | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> RunResult:
    """Trains a model by rewards of its own answers. If `settings.output` holds checkpoints of the same run, continues.

    A killed run continues with equal samples, rewards and weights, and never asks again for a reward that it has. On GPUs
    equal weights need `settings.exact` and XLA_FLAGS=--xla_gpu_deterministic_ops=true.

    On SIGTERM the run saves and returns; on the first Ctrl-C it saves and raises KeyboardInterrupt.

    Args:
      settings: the run.
      rewards: functions, called in this thread, in addition to `settings.reward`.
      environment: makes the environment of a sample, such as its class, instead of `settings.environment`.
      model: start from this model instead of reading `settings.model`. Its arrays are consumed. It must have no adapters.
      tokenizer: use this one instead of reading `settings.tokenizer`.
      stop_after: save and return after this step, as if interrupted.
      on_step: called after each step with its record, the line of metrics.jsonl.

    Raises:
      ValueError: settings that contradict each other, bad data, no reward, or a folder that holds another run. No weights have
        been read and nothing has been written then.
      RuntimeError: a reward function raised or was ended; the message names it, the prompt and the answer. The same command
        continues without asking for the rewards that were complete.
      FileNotFoundError: there is no such data, tokenizer or model.
      BlockingIOError: another run is using the output folder.
      FloatingPointError: the loss is not finite.
    """
    if settings.dry_run:
        raise ValueError("settings.dry_run=True: call moe_jax.recipes.dry_run(settings), which trains nothing")
    plan = plan_grpo(settings, rewards, model, tokenizer, environment)
    with ExitStack() as until_end:
        until_end.callback(plan.scorer.close)
        identity = with_weights(plan.identity, model, settings.model)
        held_out = None if plan.eval_prompts is None else plan.eval_prompts.fingerprint
        begun = begin(plan.settings, identity, held_out, model, until_end)
        lines = plan.announcement(begun.step)
        announce(settings, plan.settings.steps, begun, lines, command="grpo", tokenizer=plan.tokenizer)
        task = _Rewarded(plan, begun, model, identity)
        return run(task, plan.settings, begun, stop_after=stop_after, on_step=on_step, samples=True)


class _Rewarded(Task):
    """The task of a run of reinforcement learning."""

    def __init__(self, plan: PlannedGrpo, begun: Begun, model: Decoder | None, identity: dict[str, Any]):
        settings, output = plan.settings, Path(plan.settings.output).expanduser()
        optimizer, self.schedule = optimizer_of(settings)
        policy = Policy(
            load_model(settings, plan, model),
            optimizer,
            settings.policy,
            tokenizer=plan.tokenizer,
            limits=plan.limits,
            seq_len=settings.seq_len,
            rows=settings.batch_size,
            on_mismatch=settings.on_mismatch,
        )
        # A folder for each identity: groups of a run with other settings are never read.
        name = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest()
        self.plan, self.journal, self.samples_file = plan, Journal(output / "journal" / name), output / SAMPLES
        self.batches = Rollouts(plan, policy, self.journal, begun.step)
        # Drawing costs about a forward pass of each token, a third of its training.
        self.flops_per_token = 4 / 3 * training_flops_per_token(plan.config, settings.seq_len, frozen=settings.lora is not None)
        self.rollout, self.equal_steps = Rollout([], 0, 0.0, 0.0), 0
        super().__init__(plan, begun, policy)
        if begun.step:
            self.batches.set_state(begun.position["data"])

    def step(self, batch: Rollout) -> dict[str, Any]:
        self.rollout = batch
        return self.training.update(batch.groups)

    def record(
        self, step: int, metrics: dict[str, Any], batch: Rollout, seconds: float
    ) -> tuple[dict[str, Any], dict[str, list]]:
        found = metrics_of(batch.groups, self.plan.scorer.names, self.plan.settings.policy)
        speed = found["num_tokens"] / seconds
        scalars = {name: float(value) for name, value in metrics.items() if getattr(value, "ndim", 0) == 0}
        record = {"step": step, **scalars, **found, "groups_dropped": batch.dropped}
        record |= {"learning_rate": float(self.schedule(step - 1)), "tokens_per_second": speed}
        record |= {"model_tflops": speed * self.flops_per_token / 1e12, "step_time": seconds}
        record |= {"time/rollout": batch.drawing, "time/rewards": batch.scoring}
        self._tell_equal(record)
        return record, of_layers(metrics, self.config.routed_layers)

    def choices(self) -> dict[str, Any]:
        """Returns nothing: updates recompute every layer."""
        return {}

    def keep_choices(self, position: Mapping[str, Any]) -> None:
        """Does nothing, because there are no choices."""

    def places_of(self, batch: Rollout) -> str:
        return "The batch holds answers to:\n  " + "\n  ".join(f"{group.row['prompt']!r:.100}" for group in batch.groups)

    def measure(self) -> dict[str, float]:
        """Returns "eval_reward", each function's mean, and the mean length, of answers to held-out prompts."""
        settings, prompts = self.plan.settings, self.plan.eval_prompts
        if prompts is None:
            return {}
        number = min(len(prompts), settings.eval_batches * settings.prompts)
        # Negative keys: held-out prompts draw other random numbers, and the journal keeps both kinds.
        rows = [(-1 - i, prompt_at(prompts, i, None)) for i in range(number)]
        groups, *_ = self.batches.scored(self.batches.step, rows)
        found = metrics_of(groups, self.plan.scorer.names, settings.policy)
        return {f"eval_{name}": value for name, value in found.items() if name.endswith(("reward", "/mean", "mean_length"))}

    def end_step(self, step: int) -> None:
        """Writes the samples, and removes the journal of steps before the oldest checkpoint."""
        settings = self.plan.settings
        append_record(self.samples_file, record_of_samples(step, self.rollout.groups, self.plan.scorer.names, settings.policy))
        if kept := finished_steps(self.samples_file.parent / "checkpoints"):
            self.journal.drop(before=kept[0] + 1)

    def model(self) -> Decoder:
        return self.training.model

    def _tell_equal(self, record: dict[str, Any]) -> None:
        self.equal_steps = self.equal_steps + 1 if record["frac_reward_zero_std"] == 1 else 0
        if self.equal_steps == EQUAL_STEPS:
            tqdm.write(
                f"for {EQUAL_STEPS} steps all answers to a prompt have had equal rewards, so nothing was learned: give prompts "
                "that the model solves sometimes, a reward with parts, or more samples"
            )
