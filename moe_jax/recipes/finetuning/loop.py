"""The fine-tuning loop: settings in, a trained model and its log out; interrupted anywhere, it goes on where it was."""

import json
import math
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from moe_jax.checkpoint.hf_load import from_pretrained
from moe_jax.cost.flops import training_flops_per_token
from moe_jax.models.decoder import Decoder
from moe_jax.recipes.finetuning.announcement import announcement
from moe_jax.recipes.finetuning.prepare import Run, prepare_run
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.recipes.finetuning.settings_file import write_settings
from moe_jax.runtime.processes import barrier, is_first_process, texts_of_all
from moe_jax.train.data import Documents
from moe_jax.train.evaluate import make_evaluation
from moe_jax.train.metrics import Clock, MetricsWriter, of_layers, one_line, read_records, record_of_step
from moe_jax.train.objective import OwnLoss
from moe_jax.train.optimizer import make_optimizer, warmup_cosine
from moe_jax.train.rebalance import Places, move_experts
from moe_jax.train.step import TrainState, init_state, make_train_step, put_batch


@dataclass(frozen=True)
class FinetuneResult:
    """The trained model, the last step done, the metrics of every step of the run, resumed parts included, and if it ended."""

    model: Decoder
    step: int
    metrics: list[dict[str, Any]]
    finished: bool = True


def finetune(
    settings: FinetuneSettings,
    *,
    model: Decoder | None = None,
    tokenizer: Any = None,
    stop_after: int | None = None,
    loss: OwnLoss | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> FinetuneResult:
    """Trains; if `settings.output` holds checkpoints of the same run, goes on from the newest, bit for bit.

    Of that run `settings.steps` may be changed: each step from there on has the learning rate that a run of so many steps would
    have had there.

    On GPUs XLA chooses kernels by their time in each process, and sums round as they do: bit for bit there with
    XLA_FLAGS=--xla_gpu_deterministic_ops=true.

    All processes of a job (`parallel.initialize_processes`) call this together, with an output folder that they share. Each
    computes its devices' part of the same batches; the first one writes logs. SIGTERM to any has them save and return.
    One process alone does so too, and at the first Ctrl-C it saves and raises KeyboardInterrupt.

    Args:
      settings: the run.
      model: start from this model instead of reading `settings.model`. Its arrays are consumed. Parameters of f32, or of bf16
        (`train.master_weights`); where they lie on a mesh of `make_mesh`, training is spread over it. Its dtypes and its mesh
        count; a `settings.mesh` of several devices must be the same.
      tokenizer: use this one instead of reading `settings.tokenizer`.
      stop_after: save and return after this step, as if interrupted.
      loss: what to minimise in place of `train.loss`, as in `make_train_step`; its metrics stand in metrics.jsonl. A run
        goes on with a loss of the same name alone.
      on_step: called in the first process after each step with its record, the line of metrics.jsonl.

    Raises:
      ValueError: settings that make no sense, bad data, or a folder that holds another run; no weights have been read and
        nothing has been written then, unless what the chat template refuses is a conversation behind the first batch: the
        steps before it are saved then, in a job of one process.
      FileNotFoundError: there is no such data, tokenizer or model.
      BlockingIOError: another run is under way in the output folder.
      FloatingPointError: the loss is not finite, and the message names the step and the documents of its batch; or that of the
        held-out text is not.
    """
    if settings.dry_run:
        raise ValueError("settings.dry_run=True: call moe_jax.recipes.dry_run(settings), which trains nothing")
    with ExitStack() as until_end:
        run = prepare_run(settings, model, tokenizer, until_end, loss)
        _announce(settings, run)
        return _train(run, run.settings, model, stop_after, loss, on_step)


def _train(
    run: Run,
    settings: FinetuneSettings,
    model: Decoder | None,
    stop_after: int | None,
    loss: OwnLoss | None,
    on_step: Callable[[dict[str, Any]], None] | None,
) -> FinetuneResult:
    """The run from its last step, or from the first, to its end."""
    config, parallelism, checkpoints, places = run.config, run.parallelism, run.checkpoints, run.places
    if model is None:
        model = from_pretrained(
            settings.model,
            dtype=jnp.dtype(settings.dtype),
            param_dtype=jnp.dtype(settings.param_dtype),
            mesh=None if parallelism is None else parallelism.mesh,
            mtp=settings.mtp_loss_coef > 0,
        )
    schedule = warmup_cosine(
        settings.learning_rate,
        steps=settings.steps,
        warmup_steps=min(100, settings.steps // 10) if settings.warmup_steps is None else settings.warmup_steps,
        min_ratio=settings.min_learning_rate_ratio,
    )
    optimizer = make_optimizer(
        schedule,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        moment_dtype=settings.moment_dtype,
    )
    graph, state = nnx.graphdef(model), init_state(model, optimizer)
    train_step = _train_step(graph, optimizer, schedule, settings, run, loss)
    if run.steps_done:
        state = checkpoints.restore(run.steps_done, _freed(state))
    evaluate = make_evaluation(graph, parallelism=parallelism)
    held_out = [put_batch(batch, state.params, parallelism) for batch in run.held_out]
    flops_per_token = training_flops_per_token(config, settings.seq_len)

    output, first = Path(settings.output).expanduser(), is_first_process()
    writer = MetricsWriter(output, resumed_step=run.steps_done, tensorboard=settings.tensorboard) if first else None
    progress = tqdm(total=settings.steps, initial=run.steps_done, desc="training", unit="step", disable=None if first else True)
    step, last = run.steps_done, settings.steps if stop_after is None else min(stop_after, settings.steps)
    told, clock = 0, Clock()
    checkpoints.listen()
    try:
        while step < last:
            began = time.perf_counter()
            batch = _next_batch(run, step, state, places)
            told = _tell_skipped(run.batches.skipped, told)
            state, metrics = train_step(state, put_batch(batch, state.params, parallelism))
            step += 1
            host = jax.device_get(metrics)
            seconds = time.perf_counter() - began
            if places is not None:
                places = places.after_step(host["expert_load"])
                host["expert_load"] = places.by_number(host["expert_load"])
            record = record_of_step(step, host, config, seconds, flops_per_token)
            if not (math.isfinite(float(host["total_loss"])) and math.isfinite(record["grad_norm"])):
                raise FloatingPointError(_describe_failure(record, batch, run.documents))
            if held_out and (step % settings.eval_every == 0 or step == last):
                record["eval_loss"] = evaluate(state, held_out)
                _check_eval_loss(record)
            if writer is not None:
                writer.write(record, of_layers(host, config.routed_layers))
                progress.update()
                said = one_line(record, compiled=step == run.steps_done + 1)
                if progress.disable:
                    print(f"step {step}: {said}{clock.left(step, last)}", flush=True)
                else:
                    progress.set_postfix_str(said)
                if on_step is not None:
                    on_step(record)
            moves = settings.rebalance_every and step % settings.rebalance_every == 0 and step < settings.steps
            if places is not None and moves:
                state, places = places.rebalance(state, config, run.expert_devices)
            if checkpoints.told_to_stop(step):
                last = step
            if step % settings.checkpoint_every == 0 or step == last:
                checkpoints.save(step, state, _position(run, places))
    finally:
        progress.close()
        run.batches.close()
        if writer is not None:
            writer.close()
        checkpoints.close()
    barrier("metrics written")
    if checkpoints.stopped_by == signal.SIGINT and step < settings.steps:
        tqdm.write(f"interrupted after step {step} and saved; the same command goes on from there")
        raise KeyboardInterrupt(f"saved at step {step}")
    parts = state.params, state.expert_bias
    trained = nnx.merge(graph, *(parts if places is None else move_experts(parts, config, places.back)))
    return FinetuneResult(trained, step, read_records(output / "metrics.jsonl"), finished=step >= settings.steps)


def _train_step(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    settings: FinetuneSettings,
    run: Run,
    loss: OwnLoss | None,
) -> Callable:
    """`make_train_step` with the factors of losses that the config says where the settings do not."""
    aux_loss_coef, sequence_loss_coef = settings.aux_loss_coef or 0.0, settings.sequence_loss_coef or 0.0
    if settings.aux_loss_coef is None and loss is None:
        aux_loss_coef = run.config.experts.aux_loss_coef if run.config.experts else 0.0
    if settings.sequence_loss_coef is None and loss is None:
        sequence_loss_coef = run.config.experts.sequence_loss_coef if run.config.experts else 0.0
    return make_train_step(
        graph,
        optimizer,
        schedule=schedule,
        aux_loss_coef=aux_loss_coef,
        sequence_loss_coef=sequence_loss_coef,
        z_loss_coef=settings.z_loss_coef,
        expert_bias_update_rate=settings.expert_bias_update_rate,
        mtp_loss_coef=settings.mtp_loss_coef,
        gradient_accumulation=settings.gradient_accumulation,
        remat="offload" if settings.offload else settings.remat,
        force_balanced_routing=settings.force_balanced_routing,
        parallelism=run.parallelism,
        loss=loss,
    )


def _freed(state: TrainState) -> TrainState:
    """The state's shapes and shardings alone, its memory given back: a restored state of a large model needs the room."""
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    jax.tree.map(lambda x: x.delete(), state)
    return template


def _announce(asked: FinetuneSettings, run: Run) -> None:
    """Says what is ahead, and notes it in the output folder; nothing where no step is left."""
    if run.steps_done < run.settings.steps and is_first_process():
        tqdm.write(announcement(run, run.steps_done))
        template = None if asked.chat_template is None else run.tokenizer.chat_template
        write_settings(asked, steps=run.settings.steps, chat_template=template)


def _describe_failure(record: dict[str, Any], batch: dict[str, np.ndarray], documents: Documents) -> str:
    """The step and where its documents lie, so that bad data can be looked at."""
    sources = np.unique(batch["document"][batch["segment_ids"] > 0])
    places = "\n  ".join(documents.where(int(index)) for index in sources)
    whose = "The rows" if jax.process_count() == 1 else f"Process {jax.process_index()}'s rows"
    return (
        f"step {record['step']}: loss {record['loss']}, gradient norm {record['grad_norm']} is not finite; training stopped, "
        f"the last checkpoint is unharmed. {whose} of the batch hold pieces of:\n  {places}"
    )


def _check_eval_loss(record: dict[str, Any]) -> None:
    if not math.isfinite(record["eval_loss"]):
        raise FloatingPointError(
            f"step {record['step']}: the held-out loss {record['eval_loss']} is not finite; training stopped, the last "
            "checkpoint is unharmed"
        )


def _next_batch(run: Run, step: int, state: TrainState, places: Places | None) -> dict[str, np.ndarray]:
    """The batch of the step after `step`. If data ends the run, the steps so far are saved first.

    Of several processes the others wait within the next step, so nothing can be saved then.
    """
    try:
        return next(run.batches)
    except (ValueError, OSError) as error:
        if step == run.steps_done or jax.process_count() > 1:
            raise
        run.checkpoints.save(step, state, _position(run, places))
        raise ValueError(f"{error}; the run is saved at step {step}") from error


def _tell_skipped(skipped: dict[int, str], told: int) -> int:
    """Says how many documents are left out, the first time and whenever their number has doubled; returns the number told."""
    if len(skipped) < max(1, 2 * told):
        return told
    tqdm.write(f"skipped so far: {len(skipped)} conversation(s) that the chat template refuses; {list(skipped.values())[-1]}")
    return len(skipped)


def _position(run: Run, places: Places | None) -> dict[str, Any]:
    """Where the run stands: its data's streams, those of other processes too, and its experts."""
    data: dict[str, Any] = {}
    for text in texts_of_all(json.dumps(run.batches.get_state())):
        data |= json.loads(text)
    return {"data": data, "identity": run.identity, "places": places and places.to_json()}
