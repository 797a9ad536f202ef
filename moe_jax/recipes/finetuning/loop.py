"""Fine-tuning: settings in, a trained model and its log out. An interrupted run continues where it stopped."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from moe_jax.config import ModelConfig
from moe_jax.cost.flops import training_flops_per_token
from moe_jax.models.decoder import Decoder
from moe_jax.recipes.finetuning.announcement import announcement
from moe_jax.recipes.finetuning.prepare import PlannedRun, prepare_run
from moe_jax.recipes.finetuning.samples import record_of_samples, sampler_of
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.recipes.run.loop import Begun, RunResult, Task, announce, run
from moe_jax.recipes.run.model import Training, load_model, make_training
from moe_jax.recipes.run.run_log import RunLog
from moe_jax.train.evaluate import make_evaluation
from moe_jax.train.loss import LossWeights
from moe_jax.train.objective import LossFunction, NextToken
from moe_jax.train.rebalance import Places, move_experts

FinetuneResult = RunResult


def finetune(
    settings: FinetuneSettings,
    *,
    model: Decoder | None = None,
    tokenizer: Any = None,
    stop_after: int | None = None,
    loss: LossFunction | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> FinetuneResult:
    """Trains a model. If `settings.output` holds checkpoints of the same run, continues from the newest, bit for bit.

    `settings.steps` may be changed when a run continues. The learning rates are recomputed for the new number of steps.

    On GPUs XLA chooses kernels by their time in each process, and the chosen kernel decides how sums round. For equal bits
    there, set XLA_FLAGS=--xla_gpu_deterministic_ops=true.

    All processes of a job (`parallel.initialize_processes`) call this together, with an output folder that they share. Each
    computes its devices' part of the same batches; the first one writes logs. SIGTERM to any process makes all of them save and
    return. A single process does so too. At the first Ctrl-C it saves and raises KeyboardInterrupt.

    Args:
      settings: the run.
      model: start from this model instead of reading `settings.model`. Its arrays are consumed. Parameters are f32 or bf16
        (`train.master_weights`). If they are on a mesh of `make_mesh`, training is spread over it. The model's dtypes and mesh
        override the settings'; a `settings.mesh` of several devices must be equal.
      tokenizer: use this one instead of reading `settings.tokenizer`.
      stop_after: save and return after this step, as if interrupted.
      loss: loss(model, batch) -> (a scalar, a dict of scalar metrics), minimised instead of `train.loss`, as in
        `make_train_step`. metrics.jsonl gets its metrics. A run continues only with a loss of the same name.
      on_step: called in the first process after each step with its record, the line of metrics.jsonl.

    Raises:
      ValueError: settings that contradict each other, bad data, or a folder that holds another run. No weights have been read
        and nothing has been written then. The exception is a conversation after the first batch that the chat template refuses.
        A job of one process saves the steps before it.
      TypeError: a `loss` that cannot be called as loss(model, batch).
      FileNotFoundError: there is no such data, tokenizer or model.
      BlockingIOError: another run is using the output folder.
      FloatingPointError: the loss of training or of held-out text is not finite. For training the message names the step
        and the documents of its batch.
    """
    if settings.find_learning_rate:
        raise ValueError("settings.find_learning_rate=True: call moe_jax.recipes.find_learning_rate(settings)")
    if settings.dry_run:
        raise ValueError("settings.dry_run=True: call moe_jax.recipes.dry_run(settings), which trains nothing")
    with ExitStack() as until_end:
        planned, begun = prepare_run(settings, model, tokenizer, until_end, loss)
        template = None if settings.chat_template is None else planned.tokenizer.chat_template
        lines = announcement(planned, begun.step)
        options: dict[str, Any] = dict(command="finetune", tokenizer=planned.tokenizer, chat_template=template)
        announce(settings, planned.settings.steps, begun, lines, **options)
        task = _Texts(planned, begun, load_training(planned, model, loss))
        options = dict(stop_after=stop_after, on_step=on_step, samples=bool(settings.sample_prompts))
        return run(task, planned.settings, begun, **options)


class _Texts(Task):
    """The task of a run on texts."""

    def __init__(self, planned: PlannedRun, begun: Begun, training: Training):
        settings = planned.settings
        self.planned, self.batches = planned, planned.batches
        self.places = self._places_at({})
        super().__init__(planned, begun, training)
        self.held_out = [self.put(batch) for batch in planned.held_out]
        self.evaluate = make_evaluation(training.graph, parallelism=planned.parallelism) if self.held_out else None
        self.flops_per_token = training_flops_per_token(planned.config, settings.seq_len, frozen=settings.lora is not None)
        self.sampler = sampler_of(settings, planned.documents, planned.tokenizer)

    @property
    def skipped(self) -> Mapping[int, str]:
        return self.batches.skipped

    def record(
        self, step: int, metrics: dict[str, Any], batch: dict[str, np.ndarray], seconds: float
    ) -> tuple[dict[str, Any], dict[str, list]]:
        if self.places is not None:
            self.places = self.places.after_step(metrics["expert_load"])
            metrics["expert_load"] = self.places.by_number(metrics["expert_load"])
        return super().record(step, metrics, batch, seconds)

    def places_of(self, batch: dict[str, np.ndarray]) -> str:
        sources = np.unique(batch["document"][batch["segment_ids"] > 0])
        places = "\n  ".join(self.planned.documents.where(int(index)) for index in sources)
        whose = "The rows" if jax.process_count() == 1 else f"Process {jax.process_index()}'s rows"
        return f"{whose} of the batch hold pieces of:\n  {places}"

    def measure(self) -> dict[str, float]:
        return {} if self.evaluate is None else {"eval_loss": self.evaluate(self.state, self.held_out)}

    def end_step(self, step: int) -> None:
        planned, every = self.planned, self.planned.settings.rebalance_every
        if self.places is not None and every and step % every == 0 and step < planned.settings.steps:
            self.training.state, self.places = self.places.rebalance(self.state, planned.config, planned.expert_devices)

    def position(self) -> dict[str, Any]:
        return super().position() | {"places": self.places and self.places.to_json()}

    def sample(self, step: int, log: RunLog) -> None:
        settings = self.planned.settings
        if self.sampler is not None and (step % settings.sample_every == 0 or step == settings.steps):
            log.write_samples(record_of_samples(step, self.sampler.prompts, self.sampler(self.training.model())))

    def restore(self, step: int) -> dict[str, Any]:
        position = super().restore(step)
        self.places = self._places_at(position)
        return position

    def model(self) -> Decoder:
        if self.places is None:
            return super().model()
        parts = move_experts((self.state.params, self.state.expert_bias), self.config, self.places.back)
        return nnx.merge(self.training.graph, *parts, self.state.frozen)

    def _places_at(self, position: dict[str, Any]) -> Places | None:
        """Returns the places of the experts at a checkpoint's position; None if they never move."""
        config = self.planned.config
        if position.get("places"):
            return Places.from_json(position["places"])
        if not self.planned.settings.rebalance_every or config.experts is None:
            return None
        return Places.at_first(len(config.routed_layers), config.experts.num_experts)


def load_training(
    run: PlannedRun, model: Decoder | None, loss: LossFunction | None = None, schedule: optax.Schedule | None = None
) -> Training:
    """Reads the model, or uses the one that was passed, and builds the run's training step.

    Args:
      schedule: the learning rates. Default: the settings'.
    """
    settings = run.settings
    model = load_model(settings, run, model, mtp=settings.mtp)
    objective = _next_token(settings, run.config) if loss is None else loss
    options = dict(force_balanced_routing=settings.force_balanced_routing)
    return make_training(settings, run.parallelism, model, objective, schedule, **options)


def _next_token(settings: FinetuneSettings, config: ModelConfig) -> NextToken:
    """Returns the built-in loss; coefficients that the settings leave open come from the config."""
    aux_loss_coef, sequence_loss_coef = settings.aux_loss_coef, settings.sequence_loss_coef
    if aux_loss_coef is None:
        aux_loss_coef = config.experts.aux_loss_coef if config.experts else 0.0
    if sequence_loss_coef is None:
        sequence_loss_coef = config.experts.sequence_loss_coef if config.experts else 0.0
    weights = LossWeights(
        aux_loss_coef=aux_loss_coef,
        sequence_loss_coef=sequence_loss_coef,
        z_loss_coef=settings.z_loss_coef,
        mtp_loss_coef=settings.mtp_loss_coef,
    )
    return NextToken(weights, 0.0 if settings.lora else settings.expert_bias_update_rate)
