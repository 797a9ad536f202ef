"""Validates a fine-tuning run (data, devices, sizes, existing checkpoints) before any weights are loaded."""

import json
import logging
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from moe_jax.adapters.add import LoraSummary, planned_lora
from moe_jax.checkpoint.companions import tokenizer_files
from moe_jax.checkpoint.hf_load import check_form, find_config, read_config
from moe_jax.checkpoint.stored import weights_fingerprint
from moe_jax.checkpoint.tokenizer import load_tokenizer
from moe_jax.checkpoint.training import finished_steps
from moe_jax.config import ModelConfig, config_to_dict
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder
from moe_jax.models.layers_in_pipe import layers_in_pipe
from moe_jax.parallel.choices import MESH_AXES, UNIFORM, MeshShape
from moe_jax.parallel.collectives.hops import default_hops
from moe_jax.parallel.expert import ExpertParallel
from moe_jax.parallel.expert.placement import balanced_order
from moe_jax.parallel.layout import mesh_of
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.pipeline.chunks import pipe_of_model
from moe_jax.parallel.zero1 import optimizer_mesh, optimizer_shardings
from moe_jax.recipes.finetuning.data import HeldOut, held_out_batches, open_data, run_batches, try_first_batch, with_survey
from moe_jax.recipes.finetuning.samples import sampler_of
from moe_jax.recipes.finetuning.settings import FinetuneSettings, lora_problems, pipe_problems
from moe_jax.recipes.run.export import check_destination
from moe_jax.recipes.run.identity import check_model, entries_of, same_run
from moe_jax.recipes.run.loop import Begun, begin
from moe_jax.runtime.processes import is_first_process, require_shared, unlike_the_first
from moe_jax.train.data import Batches, Documents, tokenizer_fingerprint
from moe_jax.train.data.chat_templates import with_chat_template
from moe_jax.train.data.survey import Survey
from moe_jax.train.master_weights import initial_low_halves
from moe_jax.train.objective import (
    LossFunction,
    check_loss_function,
    check_mtp_loss_coef,
    name_of,
    refuse_further_predictors,
)
from moe_jax.train.pipelined import check_branches
from moe_jax.train.rebalance import Places, num_groups
from moe_jax.train.starting_weights import MODEL, values_of

_logger = logging.getLogger(__name__)

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
class PlannedRun:
    """A run whose data, devices and sizes fit together.

    Attributes:
      settings: the settings, with `epochs` turned into `steps`.
      tokenizer: the tokenizer, with the chat template of the settings.
      expert_devices: the number of devices that the experts are dealt out to.
      held_out: text that is not trained on.
      identity: what may not change between the start of the run and its resumption.
      survey: measures of the data, in the first process of a run that begins; else None.
      lora: what is trained; None if that is all parameters.
    """

    settings: FinetuneSettings
    tokenizer: Any
    config: ModelConfig
    parallelism: Parallelism | None
    expert_devices: int
    documents: Documents
    batches: Batches
    held_out: HeldOut
    identity: dict[str, Any]
    survey: Survey | None
    lora: LoraSummary | None


@dataclass(frozen=True)
class PreparedRun(PlannedRun):
    """A run that can start, or continue.

    Attributes:
      begun: the newest checkpoint. `batches` are at the first batch after it.
      places: where the experts are, if they move between the `expert_devices`.
    """

    begun: Begun
    places: Places | None


class SavedRun(NamedTuple):
    """The newest checkpoint in an output folder: its step and the run's identity; 0 and {} without one."""

    steps_done: int
    identity: dict[str, Any]


def prepare_run(
    settings: FinetuneSettings, model: Decoder | None, tokenizer: Any, until_end: ExitStack, loss: LossFunction | None = None
) -> PreparedRun:
    """Returns the run that `finetune` was asked for; arguments and errors as there.

    Nothing has been written when it raises, except in a folder that holds a run. Otherwise the folder for checkpoints exists,
    and `until_end` holds its lock for this run.
    """
    output = Path(settings.output).expanduser()
    plan = plan_run(settings, model, tokenizer)
    settings, config = plan.settings, plan.config
    if loss is not None:
        _check_user_loss(loss, settings, config, plan.parallelism)
    identity = plan.identity | {"loss": None if loss is None else name_of(loss)}
    identity |= {MODEL: weights_fingerprint(settings.model) if model is None else values_of(model)}
    if jax.process_count() > 1:
        _check_same_everywhere(asdict(settings) | identity | {"held-out data": plan.held_out.fingerprint})
        require_shared(output)
    begun = begin(settings, identity, plan.held_out.fingerprint, model, until_end)
    places = Places.at_first(len(config.routed_layers), _num_experts(config)) if settings.rebalance_every else None
    if begun.step:
        plan.batches.set_state(begun.position["data"])
        places = Places.from_json(begun.position["places"]) if begun.position.get("places") else places
        if places is not None and plan.parallelism is not None and plan.parallelism.pipelined:
            raise ValueError(
                f"the experts of the run in {output} have changed places, and in a pipe they cannot move back at the end: take "
                "a mesh without pipe"
            )
    return PreparedRun(**vars(plan), begun=begun, places=places)


def plan_run(settings: FinetuneSettings, model: Decoder | None, tokenizer: Any) -> PlannedRun:
    """Checks everything that can be checked without weights, and writes nothing; arguments and errors as in `finetune`."""
    output = Path(settings.output).expanduser()
    check_destination(settings)
    if settings.tokenizer is not None and tokenizer is None:
        tokenizer_files(settings.tokenizer, None)
    parallelism = _parallelism(settings, model)
    tokenizer = _tokenizer(settings, model, tokenizer)
    documents, held_out_documents = open_data(settings)
    config = _config(settings, model)
    check_model(settings, config, tokenizer, model)
    _warn_of_far_positions(config, settings.seq_len)
    expert_devices = _check_experts(settings, parallelism, config)
    lora = _planned_lora(settings, config, parallelism)
    _check_optimizer(settings, parallelism, config)
    if parallelism is not None:
        layers_in_pipe(config, parallelism.pipe)
        if (
            parallelism.context_parallel
            and (reason := config.mixer_refusal("attention over devices (mesh.context)", has_sinks=False)) is not None
        ):
            raise ValueError(f"FinetuneSettings: {reason}")
    saved = saved_run(output)
    # A run that began when texts had no BOS token continues without it, or its data would be other data.
    begin_texts = not saved.identity or "begin_texts" in saved.identity
    settings, found = with_survey(settings, documents, tokenizer, begin_texts, resumed=saved.steps_done > 0)
    stream = run_batches(documents, tokenizer, settings, settings.batch_size, parallelism, begin_texts)
    # Batches are made now, so that conversations that the chat template refuses are named before minutes of loading.
    held_out = held_out_batches(held_out_documents, tokenizer, settings, parallelism, begin_texts)
    if not saved.steps_done:
        try_first_batch(stream)
    sampler_of(settings, documents, tokenizer)
    identity = _identity(settings, config, documents, tokenizer, model, begin_texts)
    if saved.identity:
        # Starting weights are compared when they are read.
        same_run(saved.identity | {MODEL: ""}, identity | {MODEL: ""}, output)
    return PlannedRun(
        settings=settings,
        tokenizer=tokenizer,
        config=config,
        parallelism=parallelism,
        expert_devices=expert_devices,
        documents=documents,
        batches=stream,
        held_out=held_out,
        identity=identity,
        survey=found,
        lora=lora,
    )


def saved_run(output: Path) -> SavedRun:
    """Returns the newest checkpoint's step and identity.

    A checkpoint that cannot be read counts as none here; `TrainingCheckpoints` refuses it.
    """
    try:
        step = finished_steps(output / "checkpoints")[-1]
        position = json.loads((output / "checkpoints" / str(step) / "position" / "metadata").read_text())
        return SavedRun(step, position["identity"])
    except (IndexError, OSError, ValueError, KeyError):
        return SavedRun(0, {})


def _check_user_loss(
    loss: LossFunction, settings: FinetuneSettings, config: ModelConfig, parallelism: Parallelism | None = None
) -> None:
    """Refuses a user's loss beside coefficients of the built-in one, rebalancing, a pipe, and for further-token modules."""
    check_loss_function(loss)
    coefficients = {name: getattr(settings, name) for name in ("aux_loss_coef", "sequence_loss_coef", "z_loss_coef")}
    if given := [f"{name}={value}" for name, value in coefficients.items() if value]:
        raise ValueError(
            f"`loss` replaces the built-in loss, which alone has the factors {', '.join(given)}: add their terms to `loss`"
        )
    refuse_further_predictors(config)
    if settings.overlap_micro_batches:
        raise ValueError(
            "overlap_micro_batches=True needs the built-in loss: `loss` runs the layers itself, one micro-batch at a time; "
            "leave the setting out"
        )
    if parallelism is not None and parallelism.pipelined:
        raise ValueError(
            f"a pipe needs the built-in loss, and the mesh has pipe={parallelism.pipe.ranks}: `loss` runs all layers itself; "
            "take a mesh without pipe"
        )
    if settings.rebalance_every:
        raise ValueError(f"rebalance_every={settings.rebalance_every} needs the load of experts, which `loss` does not report")


def _tokenizer(settings: FinetuneSettings, model: Decoder | None, tokenizer: Any) -> Any:
    """Returns the tokenizer that was passed, or else loads it, with the chat template of the settings."""
    if model is None:
        # A misspelt model is named as such, before its tokenizer is looked for and before its weights are downloaded.
        find_config(settings.model)
    tokenizer = load_tokenizer(settings.tokenizer or settings.model) if tokenizer is None else tokenizer
    return tokenizer if settings.chat_template is None else with_chat_template(tokenizer, settings.chat_template)


def _config(settings: FinetuneSettings, model: Decoder | None) -> ModelConfig:
    """Returns the model's config.

    Raises:
      ValueError: dtypes that cannot be trained, or a form of weights that this model cannot have. Or further-token modules
        that would not be trained.
    """
    if model is not None:
        jax.eval_shape(initial_low_halves, nnx.state(model, nnx.Param))
    else:
        check_form(settings.model, settings.weights)
    config = read_config(settings.model, mtp=settings.mtp) if model is None else model.config
    check_mtp_loss_coef(config, settings.mtp_loss_coef)
    return config


def _identity(
    settings: FinetuneSettings,
    config: ModelConfig,
    documents: Documents,
    tokenizer: Any,
    model: Decoder | None,
    begin_texts: bool,
) -> dict[str, Any]:
    """Returns what must be equal for a run to continue. The starting weights and the loss are added by `prepare_run`."""
    identity = entries_of(settings, RESUME_MUST_MATCH)
    identity |= {"config": config_to_dict(config), "data": documents.fingerprint, "tokenizer": tokenizer_fingerprint(tokenizer)}
    return identity | _dtypes_of(model) | ({"begin_texts": True} if begin_texts else {})


def _parallelism(settings: FinetuneSettings, model: Decoder | None) -> Parallelism | None:
    """Returns how training is spread over devices, the model's devices if a model was passed; None for one device.

    Raises:
      ValueError: the settings name another mesh than the model's, or do not fit its pipe. Or the mesh lacks devices of some
        process, which would be a run for each process in the same folder. Or the mesh does not divide a micro-batch's rows, or
        a sequence.
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
    chunks = _pipe_chunks(settings, model, mesh)
    processes = 1 if mesh is None else len({device.process_index for device in mesh.devices.flat})
    if processes < jax.process_count():
        raise ValueError(
            f"there are {jax.process_count()} processes, and the model lies on devices of {processes}; load it onto a mesh of "
            f"all {jax.device_count()} devices"
        )
    if mesh is None:
        return None
    experts = ExpertParallel(
        capacity_factor=settings.capacity_factor,
        shadow_experts=settings.shadow_experts,
        tokens_in_fp8=settings.tokens_in_fp8,
    )
    hops = settings.hops or default_hops(mesh)
    parallelism = Parallelism(
        mesh,
        experts,
        hops=hops,
        shard_optimizer=settings.shard_optimizer,
        overlap_micro_batches=settings.overlap_micro_batches,
        pipe_chunks=chunks,
        pipe_schedule=settings.pipe_schedule,
    )
    if settings.pipe_schedule not in UNIFORM:
        check_branches(parallelism)
    parallelism.check_batch(settings.batch_size // settings.gradient_accumulation)
    ways = mesh.shape.get("context", 1)
    if ways > 1 and settings.seq_len % (2 * ways):
        raise ValueError(f"seq_len={settings.seq_len} must be a multiple of 2 * mesh.context = {2 * ways}")
    return parallelism


def _pipe_chunks(settings: FinetuneSettings, model: Decoder | None, mesh: Mesh | None) -> int:
    """Returns the chunks of each rank of the mesh's pipe: those in which the model lies, if a model was passed.

    Raises:
      ValueError: the settings name other chunks than the model's, or do not fit a pipe. Or the model has a pipe and no chunks.
    """
    if model is None:
        return settings.pipe_chunks
    pipe = pipe_of_model(nnx.state(model, nnx.Param), mesh)
    if problems := pipe_problems(settings, pipe.ranks):
        raise ValueError("FinetuneSettings: " + "; ".join(problems))
    if settings.pipe_chunks not in (1, pipe.chunks):
        raise ValueError(
            f"settings.pipe_chunks={settings.pipe_chunks}, but the model lies in {pipe.chunks} chunks a rank; load it so, or "
            "leave settings.pipe_chunks out"
        )
    return pipe.chunks


def _planned_lora(settings: FinetuneSettings, config: ModelConfig, parallelism: Parallelism | None) -> LoraSummary | None:
    """Returns what the run's adapters will train; None for a run of all parameters.

    Raises:
      ValueError: adapters do not train on the mesh, or the config's model cannot have them.
    """
    if settings.lora is None:
        return None
    mesh = {} if parallelism is None else dict(parallelism.mesh.shape)
    if problems := lora_problems(settings.lora, mesh, settings.shard_optimizer):
        raise ValueError("FinetuneSettings: " + "; ".join(problems))
    return planned_lora(config, settings.lora).summary


def _warn_of_far_positions(config: ModelConfig, seq_len: int) -> None:
    """Warns that long documents reach positions beyond the config's. No error: training may be meant to extend a model."""
    known = config.known_positions
    if seq_len > known and is_first_process():
        _logger.warning(
            "seq_len=%d is more than the %d positions of the model (max_position_embeddings): documents of more than %d tokens "
            "are trained at positions that it has not seen; --seq-len %d cuts them there",
            seq_len, known, known, known,
        )  # fmt: skip


def _check_experts(settings: FinetuneSettings, parallelism: Parallelism | None, config: ModelConfig) -> int:
    """Returns the number of devices that the experts are dealt out to; refuses settings that do not fit this number."""
    exchange = None if parallelism is None else parallelism.expert_parallel
    for name in ("shadow_experts", "tokens_in_fp8", "rebalance_every"):
        if getattr(settings, name) and exchange is None:
            raise ValueError(f"{name}={getattr(settings, name)} needs experts on several devices: a mesh.expert of 2 or more")
    num_experts = _num_experts(config)
    devices = 1 if parallelism is None or exchange is None else parallelism.mesh.shape[exchange.axis_name]
    if num_experts % devices:
        raise ValueError(f"{num_experts} experts cannot be divided among mesh.expert={devices} devices; take a divisor")
    if settings.shadow_experts > num_experts:
        raise ValueError(f"shadow_experts={settings.shadow_experts} must be at most the {num_experts} experts of a layer")
    if settings.rebalance_every:
        if not num_experts:
            raise ValueError(f"rebalance_every={settings.rebalance_every} needs a model with experts")
        # Refuses groups of experts that these devices would part.
        balanced_order(np.ones(num_experts), devices, num_groups(config))
    return devices


def _check_optimizer(settings: FinetuneSettings, parallelism: Parallelism | None, config: ModelConfig) -> None:
    """Refuses `shard_optimizer` where nothing can be split over `data`."""
    if not settings.shard_optimizer:
        return
    mesh = optimizer_mesh(parallelism)
    if mesh is None:
        raise ValueError(
            "shard_optimizer=True needs several devices along data: a mesh.data of 2 or more. Over the other axes the "
            "optimizer's state is split without it"
        )
    optimizer_shardings(nnx.eval_shape(lambda: nnx.state(from_config(config, rngs=nnx.Rngs(0)), nnx.Param)), mesh)


def _num_experts(config: ModelConfig) -> int:
    return config.experts.num_experts if config.experts else 0


def _dtypes_of(model: Decoder | None) -> dict[str, str]:
    """Returns the dtypes of a model that was passed, which hold in place of the settings'."""
    if model is None:
        return {}
    return {"dtype": model.dtype.name, "param_dtype": jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype.name}


def _check_same_everywhere(run: dict[str, Any]) -> None:
    """Refuses hosts with different settings, given by mistake, or with different data under the same name."""
    unlike = {name: unlike_the_first(json.dumps(value, sort_keys=True, default=str)) for name, value in run.items()}
    wrong = [f"{name} of processes {numbers}" for name, numbers in unlike.items() if numbers]
    if wrong:
        raise ValueError(f"not the same as in process 0: {', '.join(wrong)}")
