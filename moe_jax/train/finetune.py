"""The fine-tuning loop: settings in, a trained model and its log out; interrupted anywhere, it goes on where it was."""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from moe_jax.checkpoint.hf_load import from_pretrained, read_config
from moe_jax.checkpoint.training import TrainingCheckpoints, finished_steps
from moe_jax.config import ModelConfig, config_to_dict
from moe_jax.flops import training_flops_per_token
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.expert import ExpertParallel
from moe_jax.parallel.expert.placement import balanced_order
from moe_jax.parallel.hops import default_hops
from moe_jax.parallel.layout import mesh_of
from moe_jax.parallel.mesh import MESH_AXES, MeshShape, make_mesh
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.processes import barrier, is_first_process, require_shared, texts_of_all, unlike_the_first
from moe_jax.train.data import Batches, Documents, batches, load_tokenizer, open_documents, tokenizer_fingerprint
from moe_jax.train.evaluate import make_evaluation
from moe_jax.train.master_weights import initial_low_halves
from moe_jax.train.metrics import MetricsWriter, max_mean_load, min_mean_load, of_layers, read_records
from moe_jax.train.optimizer import make_optimizer, warmup_cosine
from moe_jax.train.rebalance import Places, move_experts, num_groups
from moe_jax.train.settings import FinetuneSettings
from moe_jax.train.step import TrainState, check_mtp_loss_coef, init_state, make_train_step, put_batch

RESUME_MUST_MATCH = (
    "seq_len",
    "batch_size",
    "gradient_accumulation",
    "learning_rate",
    "min_learning_rate_ratio",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "aux_loss_coef",
    "sequence_loss_coef",
    "z_loss_coef",
    "expert_bias_update_rate",
    "mtp_loss_coef",
    "force_balanced_routing",
    "seed",
    "dtype",
    "param_dtype",
    "moment_dtype",
)
"""Settings that may not change between the start of a run and its resumption: the run would be another."""


@dataclass(frozen=True)
class FinetuneResult:
    """The trained model, the last step done, and the metrics of every step of the run, resumed parts included."""

    model: Decoder
    step: int
    metrics: list[dict[str, Any]]


def finetune(
    settings: FinetuneSettings, *, model: Decoder | None = None, tokenizer: Any = None, stop_after: int | None = None
) -> FinetuneResult:
    """Trains; if `settings.output` holds checkpoints of the same run, goes on from the newest, bit for bit.

    Of that run `settings.steps` may be changed: each step from there on has the learning rate that a run of so many steps would
    have had there.

    On GPUs XLA chooses kernels by their time in each process, and sums round as they do: bit for bit there with
    XLA_FLAGS=--xla_gpu_deterministic_ops=true.

    All processes of a job (`parallel.initialize_processes`) call this together, with an output folder that they share. Each
    computes its devices' part of the same batches; the first one writes logs. SIGTERM to any has them save and return.
    One process alone does so too.

    Args:
      settings: the run.
      model: start from this model instead of reading `settings.model`. Its arrays are consumed. Parameters of f32, or of bf16
        (`train.master_weights`); where they lie on a mesh of `make_mesh`, training is spread over it. Its dtypes and its mesh
        count; a `settings.mesh` of several devices must be the same.
      tokenizer: use this one instead of reading `settings.tokenizer`.
      stop_after: save and return after this step, as if interrupted.

    Raises:
      ValueError: settings that make no sense, bad data, or a folder that holds another run; no weights have been read and
        nothing has been written then, unless what the chat template refuses is a conversation behind the first batch.
      FileNotFoundError: there is no such data, tokenizer or model.
      FloatingPointError: the loss is not finite, and the message names the step and the documents of its batch; or that of the
        held-out text is not.
    """
    output = Path(settings.output).expanduser()
    parallelism = _parallelism(settings, model)
    tokenizer = load_tokenizer(settings.tokenizer or settings.model) if tokenizer is None else tokenizer
    documents = open_documents(settings.data, settings.data_format)
    held_out = None if settings.eval_data is None else open_documents(settings.eval_data, settings.data_format)
    if model is not None:
        # Refuses dtypes that cannot be trained.
        jax.eval_shape(initial_low_halves, nnx.state(model, nnx.Param))
    config = read_config(settings.model, mtp=settings.mtp_loss_coef > 0) if model is None else model.config
    check_mtp_loss_coef(config, settings.mtp_loss_coef)
    _check_vocabulary(config, tokenizer)
    expert_devices = _check_experts(settings, parallelism, config)
    stream = batches(
        documents,
        tokenizer,
        seq_len=settings.seq_len,
        batch_size=settings.batch_size,
        seed=settings.seed,
        rows=None if parallelism is None else parallelism.own_rows(settings.batch_size),
    )
    # What the chat template refuses in the held-out text and in the first batch is said before minutes of loading.
    held_out_batches = [] if held_out is None else _first_batches(held_out, tokenizer, settings, parallelism)
    if not finished_steps(output / "checkpoints"):
        begin = stream.get_state()
        next(stream)
        stream.set_state(begin)
    identity = {name: getattr(settings, name) for name in RESUME_MUST_MATCH}
    identity |= {"config": config_to_dict(config), "data": documents.fingerprint, "tokenizer": tokenizer_fingerprint(tokenizer)}
    identity |= _own_dtypes(model)
    if jax.process_count() > 1:
        eval_fingerprint = None if held_out is None else held_out.fingerprint
        _check_same_everywhere(asdict(settings) | identity | {"held-out data": eval_fingerprint})
        require_shared(output)
    checkpoints = TrainingCheckpoints(output / "checkpoints", keep=settings.keep_checkpoints, remove_unfinished=True)
    start = checkpoints.latest_step() or 0
    places = Places.at_first(len(config.routed_layers), _num_experts(config)) if settings.rebalance_every else None
    if start:
        position = checkpoints.position(start)
        _check_same_run(position["identity"], identity, output)
        if settings.steps < start:
            raise ValueError(
                f"{output} holds {start} steps of this run: steps={settings.steps} would end before; take {start} or more"
            )
        stream.set_state(position["data"])
        places = Places.from_json(position["places"]) if position.get("places") else places

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
    aux_loss_coef = settings.aux_loss_coef
    if aux_loss_coef is None:
        aux_loss_coef = getattr(config, "router_aux_loss_coef", 0.0)
    sequence_loss_coef = settings.sequence_loss_coef
    if sequence_loss_coef is None:
        sequence_loss_coef = getattr(config, "aux_loss_alpha", 0.0) if getattr(config, "seq_aux", False) else 0.0
    graph, state = nnx.graphdef(model), init_state(model, optimizer)
    step_function = make_train_step(
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
        parallelism=parallelism,
    )
    if settings.force_balanced_routing and is_first_process():
        tqdm.write("FORCED BALANCED ROUTING: the router is ignored. For benchmarks only; do not use the resulting model.")
    if start:
        state = checkpoints.restore(start, _freed(state))
    evaluate = make_evaluation(graph, parallelism=parallelism)
    eval_batches = [put_batch(batch, state.params, parallelism) for batch in held_out_batches]
    writer = MetricsWriter(output, resumed_step=start, tensorboard=settings.tensorboard) if is_first_process() else None
    flops_per_token = training_flops_per_token(config, settings.seq_len)

    last = settings.steps if stop_after is None else min(stop_after, settings.steps)
    step = start
    quiet = None if is_first_process() else True
    progress = tqdm(total=settings.steps, initial=start, desc="training", unit="step", disable=quiet)
    if is_first_process() and start < settings.steps:
        tokens, devices = (
            f"{settings.batch_size} x {settings.seq_len} tokens",
            1 if parallelism is None else parallelism.mesh.size,
        )
        tqdm.write(f"{len(documents)} documents, {tokens} a step on {devices} device(s), steps {start + 1} to {settings.steps}")
    checkpoints.listen()
    try:
        while step < last:
            began = time.perf_counter()
            batch = next(stream)
            state, metrics = step_function(state, put_batch(batch, state.params, parallelism))
            step += 1
            host = jax.device_get(metrics)
            seconds = time.perf_counter() - began
            if places is not None:
                places = places.after_step(host["expert_load"])
                host["expert_load"] = places.by_number(host["expert_load"])
            record = {
                "step": step,
                "loss": float(host["loss"]),
                "aux_loss": float(host["aux_loss"]),
                "sequence_loss": float(host["sequence_loss"]),
                "z_loss": float(host["z_loss"]),
                "grad_norm": float(host["grad_norm"]),
                "learning_rate": float(host["learning_rate"]),
                "tokens_per_second": float(host["num_tokens"]) / seconds,
                "model_tflops": float(host["num_tokens"]) * flops_per_token / seconds / 1e12,
                "max_mean_expert_load": max_mean_load(host["expert_load"]),
                "min_mean_expert_load": min_mean_load(host["expert_load"]),
                "num_dropped": int(host["num_dropped"]),
            }
            if config.routed_layers:
                for name in ("router_entropy", "num_rounds", "num_shadows"):
                    record[name] = float(host[name].mean())
            if "expert_bias_range" in host:
                smallest, largest = host["expert_bias_range"].T
                record["max_expert_bias_range"] = float((largest - smallest).max())
            if config.mtp_stages:
                record["mtp_loss"] = float(host["mtp_loss"])
            if not (math.isfinite(float(host["total_loss"])) and math.isfinite(record["grad_norm"])):
                raise FloatingPointError(_describe_failure(record, batch, documents))
            if eval_batches and (step % settings.eval_every == 0 or step == last):
                record["eval_loss"] = evaluate(state, eval_batches)
                _check_eval_loss(record)
            if writer is not None:
                writer.write(record, of_layers(host, config.routed_layers))
                progress.update()
                if progress.disable:
                    print(f"step {step}: {_one_line(record)}", flush=True)
                else:
                    progress.set_postfix_str(_one_line(record))
            moves = settings.rebalance_every and step % settings.rebalance_every == 0 and step < settings.steps
            if places is not None and moves:
                state, places = places.rebalance(state, config, expert_devices)
            if checkpoints.told_to_stop(step):
                last = step
            if step % settings.checkpoint_every == 0 or step == last:
                position = {"data": _position_of_all(stream), "identity": identity}
                checkpoints.save(step, state, position | {"places": places and places.to_json()})
    finally:
        progress.close()
        stream.close()
        if writer is not None:
            writer.close()
        checkpoints.close()
    barrier("metrics written")
    parts = state.params, state.expert_bias
    trained = nnx.merge(graph, *(parts if places is None else move_experts(parts, config, places.back)))
    return FinetuneResult(trained, step, read_records(output / "metrics.jsonl"))


def _parallelism(settings: FinetuneSettings, model: Decoder | None) -> Parallelism | None:
    """The devices that training is spread over, those of the model if there is one, and how; None for one device.

    Raises:
      ValueError: the settings name another mesh than the model's; they are not all devices of all processes, and so would be
        a run for each process in the same folder; or the rows of a micro-batch cannot be dealt out to them, or a sequence not
        be split.
    """
    if model is None:
        alone = settings.mesh.size == 1 and jax.process_count() == 1
        mesh = None if alone else make_mesh(**asdict(settings.mesh))
    else:
        mesh = mesh_of(nnx.state(model, nnx.Param))
        lies_on = MeshShape() if mesh is None else MeshShape(**{axis: mesh.shape.get(axis, 1) for axis in MESH_AXES})
        if settings.mesh not in (MeshShape(), lies_on):
            raise ValueError(
                f"settings.mesh={settings.mesh}, but the model lies on {lies_on}; load it there, or leave settings.mesh out"
            )
    processes = 1 if mesh is None else len({device.process_index for device in mesh.devices.flat})
    if processes < jax.process_count():
        raise ValueError(
            f"there are {jax.process_count()} processes, and the model lies on devices of {processes}; load it onto a mesh of "
            f"all {jax.device_count()} devices"
        )
    if mesh is None:
        return None
    experts = ExpertParallel(capacity_factor=settings.capacity_factor, shadow_experts=settings.shadow_experts)
    parallelism = Parallelism(mesh, experts, hops=settings.hops or default_hops(mesh))
    parallelism.check_batch(settings.batch_size // settings.gradient_accumulation)
    ways = mesh.shape.get("context", 1)
    if ways > 1 and settings.seq_len % (2 * ways):
        raise ValueError(f"seq_len={settings.seq_len} must be a multiple of 2 * mesh.context = {2 * ways}")
    return parallelism


def _own_dtypes(model: Decoder | None) -> dict[str, str]:
    """What a model that was passed computes in and is held in: the settings do not say it then."""
    if model is None:
        return {}
    return {"dtype": model.dtype.name, "param_dtype": jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype.name}


def _check_experts(settings: FinetuneSettings, parallelism: Parallelism | None, config: ModelConfig) -> int:
    """Returns how many devices the experts are dealt out to."""
    exchange = None if parallelism is None else parallelism.expert_parallel
    for name in ("shadow_experts", "rebalance_every"):
        if getattr(settings, name) and exchange is None:
            raise ValueError(f"{name}={getattr(settings, name)} needs experts on several devices: a mesh.expert of 2 or more")
    num_experts = _num_experts(config)
    devices = 1 if parallelism is None or exchange is None else parallelism.mesh.shape[exchange.axis_name]
    if num_experts % devices:
        raise ValueError(f"{num_experts} experts cannot be dealt out to mesh.expert={devices} devices; take a divisor")
    if settings.shadow_experts > num_experts:
        raise ValueError(f"shadow_experts={settings.shadow_experts} must be at most the {num_experts} experts of a layer")
    if settings.rebalance_every:
        if not num_experts:
            raise ValueError(f"rebalance_every={settings.rebalance_every} needs a model with experts")
        # Refuses groups of experts that these devices would part.
        balanced_order(np.ones(num_experts), devices, num_groups(config))
    return devices


def _check_vocabulary(config: ModelConfig, tokenizer: Any) -> None:
    """Tokens without an embedding would be NaN, and the loss with them, at the first document that has one."""
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, and the model's vocabulary {config.vocab_size}; take the model's "
            "own tokenizer"
        )


def _num_experts(config: ModelConfig) -> int:
    return getattr(config, "num_experts", 0) if config.routed_layers else 0


def _check_same_everywhere(run: dict[str, Any]) -> None:
    """Hosts may have been given other settings by mistake, or have other data under the same name."""
    unlike = {name: unlike_the_first(json.dumps(value, sort_keys=True, default=str)) for name, value in run.items()}
    wrong = [f"{name} of processes {numbers}" for name, numbers in unlike.items() if numbers]
    if wrong:
        raise ValueError(f"not the same as in process 0: {', '.join(wrong)}")


def _first_batches(
    documents: Documents, tokenizer: Any, settings: FinetuneSettings, parallelism: Parallelism | None
) -> list[dict[str, np.ndarray]]:
    """Batches of held-out text, a micro-batch's rows each."""
    rows = settings.batch_size // settings.gradient_accumulation
    own = None if parallelism is None else parallelism.own_rows(rows)
    stream = batches(documents, tokenizer, seq_len=settings.seq_len, batch_size=rows, seed=settings.seed, rows=own)
    try:
        return [next(stream) for _ in range(settings.eval_batches)]
    finally:
        stream.close()


def _position_of_all(stream: Batches) -> dict[str, Any]:
    """Where the data's streams are, those of other processes too."""
    position: dict[str, Any] = {}
    for text in texts_of_all(json.dumps(stream.get_state())):
        position |= json.loads(text)
    return position


def _one_line(record: dict[str, Any]) -> str:
    """The step's metrics for the console."""
    shadows = f", {record['num_shadows']:.1f} shadows a layer" if record.get("num_shadows") else ""
    held_out = f", eval loss {record['eval_loss']:.4f}" if "eval_loss" in record else ""
    return (
        f"loss {record['loss']:.4f}{held_out}, aux {record['aux_loss']:.3f}, grad norm {record['grad_norm']:.3f}, "
        f"lr {record['learning_rate']:.2e}, {record['tokens_per_second']:.0f} tokens/s, "
        f"{record['model_tflops']:.3g} TFLOP/s, max/mean load {record['max_mean_expert_load']:.2f}{shadows}"
    )


def _freed(state: TrainState) -> TrainState:
    """The state's shapes and shardings alone, its memory given back: a restored state of a large model needs the room."""
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    jax.tree.map(lambda x: x.delete(), state)
    return template


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


def _check_same_run(saved: dict[str, Any], current: dict[str, Any], output: Path) -> None:
    # Through JSON, as it was saved: tuples are lists there.
    different = [
        f"{name}: checkpoint {saved.get(name)!r}, now {value!r}" for name, value in current.items() if saved.get(name) != value
    ]
    if different:
        raise ValueError(f"{output} holds another run; choose another output folder. Different: " + "; ".join(different))
