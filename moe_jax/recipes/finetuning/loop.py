"""The fine-tuning loop: settings in, a trained model and its log out. An interrupted run continues where it stopped."""

import json
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from moe_jax.adapters.add import add_lora
from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.config import ModelConfig
from moe_jax.cost.flops import training_flops_per_token
from moe_jax.models.decoder import Decoder
from moe_jax.models.layers_in_pipe import layers_in_pipe
from moe_jax.parallel.pipeline.chunks import PipeShape
from moe_jax.recipes.finetuning.announcement import announcement
from moe_jax.recipes.finetuning.best import Best, counts, told_early, told_stop
from moe_jax.recipes.finetuning.finite import check_eval_loss, check_finite
from moe_jax.recipes.finetuning.prepare import PlannedRun, PreparedRun, prepare_run
from moe_jax.recipes.finetuning.run_log import RunLog
from moe_jax.recipes.finetuning.samples import is_sampled, record_of_samples, sampler_of
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.recipes.finetuning.settings_file import write_settings
from moe_jax.runtime.processes import barrier, is_first_process, texts_of_all
from moe_jax.train.batch import Batch, put_batch
from moe_jax.train.evaluate import make_evaluation
from moe_jax.train.loss import LossWeights
from moe_jax.train.metrics import of_layers, read_records, record_of_step
from moe_jax.train.objective import LossFunction, NextToken
from moe_jax.train.optimizer import make_optimizer, warmup_cosine
from moe_jax.train.rebalance import Places, move_experts
from moe_jax.train.run_checkpoints import PIPE, freed, restored
from moe_jax.train.state import TrainState, init_state
from moe_jax.train.step import make_train_step


@dataclass(frozen=True)
class FinetuneResult:
    """The result of a run.

    Attributes:
      model: the trained model; with `settings.lora`, its adapters beside the weights that it began with.
      step: the last step done.
      metrics: the records of all steps of the run, including the steps before it was resumed.
      finished: all of `settings.steps` are done, or `settings.early_stop` ended the run.
      stopped_early: `settings.early_stop` ended the run.
      model_step: the step that the model's weights are of: with `settings.keep_best` and a finished run, the best.
    """

    model: Decoder
    step: int
    metrics: list[dict[str, Any]]
    finished: bool = True
    stopped_early: bool = False
    model_step: int = 0


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
        (`train.master_weights`). If they lie on a mesh of `make_mesh`, training is spread over it. The model's dtypes and mesh
        count; a `settings.mesh` of several devices must be the same.
      tokenizer: use this one instead of reading `settings.tokenizer`.
      stop_after: save and return after this step, as if interrupted.
      loss: loss(model, batch) -> (a scalar, a dict of scalar metrics), minimised in place of `train.loss`, as in
        `make_train_step`. Its metrics stand in metrics.jsonl. A run continues only with a loss of the same name.
      on_step: called in the first process after each step with its record, the line of metrics.jsonl.

    Raises:
      ValueError: settings that contradict each other, bad data, or a folder that holds another run. No weights have been read
        and nothing has been written then. The exception is a conversation behind the first batch that the chat template
        refuses: in a job of one process the steps before it are saved.
      TypeError: a `loss` that cannot be called as loss(model, batch).
      FileNotFoundError: there is no such data, tokenizer or model.
      BlockingIOError: another run is under way in the output folder.
      FloatingPointError: the loss of training or of held-out text is not finite. For training the message names the step
        and the documents of its batch.
    """
    if settings.find_learning_rate:
        raise ValueError("settings.find_learning_rate=True: call moe_jax.recipes.find_learning_rate(settings)")
    if settings.dry_run:
        raise ValueError("settings.dry_run=True: call moe_jax.recipes.dry_run(settings), which trains nothing")
    with ExitStack() as until_end:
        run = prepare_run(settings, model, tokenizer, until_end, loss)
        _announce(settings, run)
        return _train(run, model, stop_after, loss, on_step)


class Training(NamedTuple):
    """A run's model on its devices, and the compiled functions that train and measure it."""

    graph: nnx.GraphDef
    state: TrainState
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[TrainState, Sequence[Batch]], float] | None
    """None without held-out text."""


def _train(
    run: PreparedRun,
    model: Decoder | None,
    stop_after: int | None,
    loss: LossFunction | None,
    on_step: Callable[[dict[str, Any]], None] | None,
) -> FinetuneResult:
    """Trains from the run's last step, or from the first, to the run's end."""
    settings, checkpoints, places = run.settings, run.checkpoints, run.places
    training = load_training(run, model, loss)
    state = training.state
    if run.steps_done:
        state, _ = _state_of(run, run.steps_done, state)
    held_out = [put_batch(batch, state.params, run.parallelism) for batch in run.held_out.batches]
    flops_per_token = training_flops_per_token(run.config, settings.seq_len, frozen=settings.lora is not None)
    step, last = run.steps_done, settings.steps if stop_after is None else min(stop_after, settings.steps)
    best, last = run.best, step if run.is_over else last
    checkpoints.kept_step = best.step if settings.keep_best else None
    sampler = sampler_of(settings, run.documents, run.tokenizer)
    # Nothing is sent by a run that has no step left.
    log = RunLog(
        settings,
        first_step=run.steps_done + 1,
        send_to=() if step >= last else settings.log_to,
        samples=bool(settings.sample_prompts),
        on_step=on_step,
    )
    checkpoints.listen()
    if step < last:
        log.tell_compiling()
    try:
        while step < last:
            began = time.perf_counter()
            batch = _next_batch(run, step, state, places, best)
            log.tell_skipped(run.batches.skipped)
            state, metrics = training.step(state, put_batch(batch, state.params, run.parallelism))
            step += 1
            host = jax.device_get(metrics)
            seconds = time.perf_counter() - began
            if places is not None:
                places = places.after_step(host["expert_load"])
                host["expert_load"] = places.by_number(host["expert_load"])
            record = record_of_step(step, host, run.config, seconds, flops_per_token)
            check_finite(record, host["total_loss"], batch, run.documents)
            if training.evaluate is not None and (step % settings.eval_every == 0 or step == last):
                record["eval_loss"] = training.evaluate(state, held_out)
                check_eval_loss(record)
                best = best.after(step, record["eval_loss"]) if counts(settings, step) else best
            log.write(record, of_layers(host, run.config.routed_layers), last)
            moves = settings.rebalance_every and step % settings.rebalance_every == 0 and step < settings.steps
            if places is not None and moves:
                state, places = places.rebalance(state, run.config, run.expert_devices)
            if checkpoints.told_to_stop(step) or best.ends(settings.early_stop):
                last = step
            is_best = settings.keep_best and best.step == step
            if is_best:
                checkpoints.kept_step = step
            if step % settings.checkpoint_every == 0 or step == last or is_best:
                checkpoints.save(step, state.without_frozen, _position(run, places, best))
            # Behind the save: what fails here costs no step.
            if sampler is not None and is_sampled(settings, step):
                texts = sampler(nnx.merge(training.graph, state.params, state.fixed))
                log.write_samples(record_of_samples(step, sampler.prompts, texts))
        early, model_step = step < settings.steps and best.ends(settings.early_stop), step
        finished = step >= settings.steps or early
        if finished and settings.keep_best and best.step:
            model_step = best.step
            state, places = _state_of(run, model_step, state) if model_step != step else (state, places)
    finally:
        run.batches.close()
        log.close()
        checkpoints.close()
    barrier("metrics written")
    if checkpoints.stopped_by == signal.SIGINT and not finished:
        raise KeyboardInterrupt(told_stop("interrupted", step))
    parts = state.params, state.expert_bias
    parts = parts if places is None else move_experts(parts, run.config, places.back)
    trained = nnx.merge(training.graph, *parts, state.frozen)
    records = read_records(Path(settings.output).expanduser() / "metrics.jsonl")
    return FinetuneResult(trained, step, records, finished, early, model_step)


def load_training(
    run: PlannedRun, model: Decoder | None, loss: LossFunction | None = None, schedule: optax.Schedule | None = None
) -> Training:
    """Reads the model, or takes the one that was passed, before its first step; makes the functions of the run.

    Args:
      schedule: the learning rates. Default: those of the settings.
    """
    settings, parallelism = run.settings, run.parallelism
    if model is None:
        model = from_pretrained(
            settings.model,
            dtype=jnp.dtype(settings.dtype),
            param_dtype=jnp.dtype(settings.param_dtype),
            mesh=None if parallelism is None else parallelism.mesh,
            pipe_chunks=1 if parallelism is None else parallelism.pipe_chunks,
            mtp=settings.mtp,
            weights=settings.weights,
        )
    if settings.lora is not None:
        add_lora(model, settings.lora, rngs=nnx.Rngs(settings.seed))
    model.set_precision(settings.precision, settings.fp8_dense)
    schedule = schedule or _schedule(settings)
    optimizer = make_optimizer(
        schedule,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        moment_dtype=settings.moment_dtype,
    )
    graph, state = nnx.graphdef(model), init_state(model, optimizer, parallelism)
    train_step = make_train_step(
        graph,
        optimizer,
        _next_token(settings, run.config) if loss is None else loss,
        schedule=schedule,
        gradient_accumulation=settings.gradient_accumulation,
        remat="offload" if settings.offload else settings.remat,
        force_balanced_routing=settings.force_balanced_routing,
        parallelism=parallelism,
    )
    evaluate = make_evaluation(graph, parallelism=parallelism) if run.held_out.batches else None
    return Training(graph, state, train_step, evaluate)


def _schedule(settings: FinetuneSettings) -> optax.Schedule:
    assert settings.learning_rate is not None
    return warmup_cosine(
        settings.learning_rate,
        steps=settings.steps,
        warmup_steps=settings.warmup_steps,
        min_ratio=settings.min_learning_rate_ratio,
    )


def _next_token(settings: FinetuneSettings, config: ModelConfig) -> NextToken:
    """Returns the built-in loss; the config gives the coefficients that the settings leave open."""
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


def _state_of(run: PreparedRun, step: int, state: TrainState) -> tuple[TrainState, Places | None]:
    """Returns the state of a checkpoint and its places of experts, laid out as `state`, whose arrays are deleted."""
    position = run.checkpoints.position(step)
    pipe = PipeShape() if run.parallelism is None else run.parallelism.pipe
    like = freed(state.without_frozen)
    read = restored(partial(run.checkpoints.restore, step), like, layers_in_pipe(run.config, pipe), position, pipe)
    places = Places.from_json(position["places"]) if position.get("places") else None
    return replace(read, frozen=state.frozen), places


def _announce(asked: FinetuneSettings, run: PreparedRun) -> None:
    """Prints what is ahead and writes settings.json; if no step is left, only says so of a run that stopped early."""
    if run.is_over and run.steps_done < run.settings.steps and is_first_process():
        tqdm.write(told_early(run.steps_done))
    elif not run.is_over and is_first_process():
        tqdm.write(announcement(run, run.steps_done))
        template = None if asked.chat_template is None else run.tokenizer.chat_template
        write_settings(asked, command="finetune", steps=run.settings.steps, chat_template=template)


def _next_batch(run: PreparedRun, step: int, state: TrainState, places: Places | None, best: Best) -> dict[str, np.ndarray]:
    """Returns the batch of the step after `step`. If data ends the run, the steps so far are saved first.

    With several processes nothing can be saved then: the others wait within the next step.
    """
    try:
        return next(run.batches)
    except (ValueError, OSError) as error:
        if step == run.steps_done or jax.process_count() > 1:
            raise
        run.checkpoints.save(step, state.without_frozen, _position(run, places, best))
        raise ValueError(f"{error}; the run is saved at step {step}") from error


def _position(run: PreparedRun, places: Places | None, best: Best) -> dict[str, Any]:
    """Returns the position that a checkpoint holds.

    These are the data streams of all processes, the identity, places of experts, the pipe, the base and the best loss.
    """
    data: dict[str, Any] = {}
    for text in texts_of_all(json.dumps(run.batches.get_state())):
        data |= json.loads(text)
    pipe = {} if run.parallelism is None else {PIPE: run.parallelism.pipe._asdict()}
    return {"data": data, "identity": run.identity, "places": places and places.to_json(), **pipe, **run.base, **best.entry()}
