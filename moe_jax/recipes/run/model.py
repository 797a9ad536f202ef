"""The model of a run and its devices: checked before weights are read, then read, laid out and prepared for training."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from moe_jax.adapters.add import LoraSummary, add_lora, planned_lora
from moe_jax.adapters.settings import LoraSettings
from moe_jax.adapters.token_rows import extend_vocabulary
from moe_jax.checkpoint.companions import tokenizer_files
from moe_jax.checkpoint.hf_load import check_form, find_config, from_pretrained, read_config
from moe_jax.checkpoint.tokenizer import load_tokenizer, with_tokens
from moe_jax.config import ModelConfig
from moe_jax.models.auto import from_config
from moe_jax.models.decoder import Decoder, fp8_refusal
from moe_jax.models.layers_in_pipe import layers_in_pipe
from moe_jax.parallel.choices import MESH_AXES, UNIFORM, MeshShape
from moe_jax.parallel.collectives.hops import default_hops
from moe_jax.parallel.layout import mesh_of
from moe_jax.parallel.mesh import make_mesh
from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.pipeline.chunks import pipe_of_model
from moe_jax.parallel.zero1 import optimizer_mesh, optimizer_shardings
from moe_jax.recipes.run.folder import check_destination
from moe_jax.recipes.run.settings import RunSettings, lora_problems
from moe_jax.train.compiled_step import TrainStep
from moe_jax.train.master_weights import initial_low_halves
from moe_jax.train.objective import LossFunction, Objective
from moe_jax.train.optimizer import make_optimizer, warmup_cosine
from moe_jax.train.pipelined import check_branches, schedule_of
from moe_jax.train.state import TrainState, init_state
from moe_jax.train.step import make_train_step


@dataclass(frozen=True)
class PlannedModel:
    """The model of a run, before its weights are read.

    Attributes:
      tokenizer: the model's own, or the one passed by the caller; extended by the settings' `add_tokens`.
      parallelism: how training is spread over devices; None for one device.
      expert_devices: the number of devices that share the experts.
      lora: the trained adapters; None if all parameters are trained.
    """

    tokenizer: Any
    config: ModelConfig
    parallelism: Parallelism | None
    expert_devices: int
    lora: LoraSummary | None

    @property
    def devices(self) -> int:
        """The number of devices of the run."""
        return 1 if self.parallelism is None else self.parallelism.mesh.size


def plan_model(settings: RunSettings, model: Decoder | None, tokenizer: Any, *, mtp: bool = False) -> PlannedModel:
    """Checks everything about a run's model that can be checked without weights, and writes nothing.

    Args:
      model, tokenizer: passed by the caller instead of the settings'.
      mtp: as in `from_pretrained`.

    Raises:
      FileNotFoundError: there is no such model or tokenizer.
      ValueError: the model, the tokenizer and the devices do not match.
    """
    check_destination(settings.output, adapter=settings.lora is not None)
    if settings.tokenizer is not None and tokenizer is None:
        tokenizer_files(settings.tokenizer, None)
    parallelism = _parallelism(settings, model)
    if model is None:
        # Reports a misspelt model before its tokenizer is looked up and before its weights are downloaded.
        find_config(settings.model)
        check_form(settings.model, settings.weights)
    else:
        jax.eval_shape(initial_low_halves, nnx.state(model, nnx.Param))
    tokenizer = load_tokenizer(settings.tokenizer or settings.model) if tokenizer is None else tokenizer
    config = read_config(settings.model, mtp=mtp) if model is None else model.config
    _check_model(settings, config, tokenizer, model)
    if settings.add_tokens:
        tokenizer = with_tokens(tokenizer, settings.add_tokens)
        config = replace(config, vocab_size=max(config.vocab_size, len(tokenizer)))
    expert_devices = check_experts(settings, parallelism, config)
    lora = settings.lora_of(tokenizer)
    summary = _planned_lora(settings, lora, config, parallelism)
    if settings.shard_optimizer:
        check_optimizer(parallelism, config, lora)
    if parallelism is not None:
        layers_in_pipe(config, parallelism.pipe)
        if (
            parallelism.context_parallel
            and (reason := config.mixer_refusal("attention over devices (mesh.context)", has_sinks=False)) is not None
        ):
            raise ValueError(f"{type(settings).__name__}: {reason}")
    return PlannedModel(tokenizer, config, parallelism, expert_devices, summary)


def load_model(settings: RunSettings, planned: PlannedModel, model: Decoder | None, *, mtp: bool = False) -> Decoder:
    """Reads the run's model, or uses the one that was passed; adds tokens and adapters, and sets its precision."""
    if model is None:
        options: dict[str, Any] = dict(dtype=jnp.dtype(settings.dtype), param_dtype=jnp.dtype(settings.param_dtype))
        if planned.parallelism is not None:
            options |= dict(mesh=planned.parallelism.mesh, pipe_chunks=planned.parallelism.pipe_chunks)
        model = from_pretrained(settings.model, **options, weights=settings.weights, mtp=mtp)
    new = planned.tokenizer.convert_tokens_to_ids(list(settings.add_tokens))
    extend_vocabulary(model, planned.config.vocab_size, at_mean=new)
    if settings.lora is not None:
        add_lora(model, settings.lora_of(planned.tokenizer), rngs=nnx.Rngs(settings.seed))
    model.set_precision(settings.precision, settings.fp8_dense)
    return model


@dataclass
class Training:
    """A run's model on its devices, and the compiled function that trains it."""

    graph: nnx.GraphDef
    state: TrainState
    step: TrainStep

    def restore(self, state: TrainState) -> None:
        """Continues with a state of a checkpoint."""
        self.state = state

    def model(self) -> Decoder:
        """Returns the model with the state's parameters."""
        return nnx.merge(self.graph, self.state.params, self.state.fixed)


def make_training(
    settings: RunSettings,
    parallelism: Parallelism | None,
    model: Decoder,
    loss: Objective | LossFunction,
    schedule: optax.Schedule | None = None,
    **options: Any,
) -> Training:
    """Returns a model before its first step, with the optimizer and the step of the settings.

    Args:
      schedule: the learning rates. Default: the settings'.
      options: further arguments of `make_train_step`.
    """
    optimizer, schedule = optimizer_of(settings, schedule)
    graph, state = nnx.graphdef(model), init_state(model, optimizer, parallelism)
    train_step = make_train_step(
        graph,
        optimizer,
        loss,
        schedule=schedule,
        gradient_accumulation=settings.gradient_accumulation,
        remat="offload" if settings.offload else settings.remat,
        parallelism=parallelism,
        **options,
    )
    return Training(graph, state, train_step)


def optimizer_of(
    settings: RunSettings, schedule: optax.Schedule | None = None
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Returns the optimizer of the settings, and its learning rates: `schedule`, or by default the settings'."""
    if schedule is None:
        assert settings.learning_rate is not None
        schedule = warmup_cosine(
            settings.learning_rate,
            steps=settings.steps,
            warmup_steps=settings.warmup_steps,
            min_ratio=settings.min_learning_rate_ratio,
        )
    optimizer = make_optimizer(
        schedule,
        name=settings.optimizer,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        moment_dtype=settings.moment_dtype,
    )
    return optimizer, schedule


def _parallelism(settings: RunSettings, model: Decoder | None) -> Parallelism | None:
    """Returns how training is spread over devices, the model's devices if a model was passed; None for one device.

    Raises:
      ValueError: the settings name another mesh than the model's, or do not fit its pipe. Or the mesh excludes devices of some
        process, so that each process would be a separate run in the same folder. Or the mesh does not divide a micro-batch's
        rows, or a sequence.
    """
    if model is None:
        alone = settings.mesh.size == 1 and jax.process_count() == 1
        mesh = None if alone else make_mesh(**asdict(settings.mesh))
    else:
        mesh = mesh_of(nnx.state(model, nnx.Param))
        lies_on = MeshShape() if mesh is None else MeshShape(**{axis: mesh.shape.get(axis, 1) for axis in MESH_AXES})
        if settings.mesh not in (MeshShape(), lies_on):
            raise ValueError(
                f"settings.mesh={settings.mesh}, but the model is on {lies_on}; load it there, or leave settings.mesh out"
            )
    chunks = _pipe_chunks(settings, model, mesh)
    processes = 1 if mesh is None else len({device.process_index for device in mesh.devices.flat})
    if processes < jax.process_count():
        raise ValueError(
            f"there are {jax.process_count()} processes, but the model is on devices of {processes}; load it onto a mesh of "
            f"all {jax.device_count()} devices"
        )
    if mesh is None:
        return None
    parallelism = Parallelism(
        mesh,
        settings.expert_parallel,
        hops=settings.hops or default_hops(mesh),
        shard_optimizer=settings.shard_optimizer,
        **settings.order_of_passes | {"pipe_chunks": chunks},
    )
    if parallelism.pipe_schedule not in UNIFORM:
        check_branches(parallelism)
    if parallelism.pipelined:
        # Again, for the hops and the mesh, which the settings may leave out.
        schedule_of(parallelism, settings.gradient_accumulation)
    parallelism.check_batch(settings.rows)
    ways = mesh.shape.get("context", 1)
    if ways > 1 and settings.seq_len % (2 * ways):
        raise ValueError(f"seq_len={settings.seq_len} must be a multiple of 2 * mesh.context = {2 * ways}")
    return parallelism


def _pipe_chunks(settings: RunSettings, model: Decoder | None, mesh: Mesh | None) -> int:
    """Returns the number of chunks of each rank of the mesh's pipe: the passed model's, if any.

    Raises:
      ValueError: the settings' chunks differ from the model's, or do not fit a pipe. Or the model has a pipe and no chunks.
    """
    asked = settings.order_of_passes.get("pipe_chunks", 1)
    if model is None:
        return asked
    pipe = pipe_of_model(nnx.state(model, nnx.Param), mesh)
    if problems := settings.pipe_problems(pipe.ranks):
        raise ValueError(f"{type(settings).__name__}: {'; '.join(problems)}")
    if asked not in (1, pipe.chunks):
        raise ValueError(
            f"settings.pipe_chunks={asked}, but the model is split into {pipe.chunks} chunks a rank; load it so, or leave "
            "settings.pipe_chunks out"
        )
    return pipe.chunks


def _planned_lora(
    settings: RunSettings, lora: LoraSettings | None, config: ModelConfig, parallelism: Parallelism | None
) -> LoraSummary | None:
    """Returns a summary of the run's adapters; None if all parameters are trained.

    Raises:
      ValueError: adapters do not train on the mesh, or the config's model cannot have them.
    """
    if lora is None:
        return None
    mesh = {} if parallelism is None else dict(parallelism.mesh.shape)
    if problems := lora_problems(lora, mesh, settings.precision):
        raise ValueError(f"{type(settings).__name__}: {'; '.join(problems)}")
    return planned_lora(config, lora).summary


def check_experts(settings: RunSettings, parallelism: Parallelism | None, config: ModelConfig) -> int:
    """Returns the number of devices that share the experts; refuses settings that contradict this number."""
    exchange = None if parallelism is None else parallelism.expert_parallel
    for name in settings.OF_EXPERT_DEVICES:
        if getattr(settings, name) and exchange is None:
            raise ValueError(f"{name}={getattr(settings, name)} needs experts on several devices: a mesh.expert of 2 or more")
    num_experts = config.experts.num_experts if config.experts else 0
    devices = 1 if parallelism is None or exchange is None else parallelism.mesh.shape[exchange.axis_name]
    if num_experts % devices:
        raise ValueError(f"{num_experts} experts cannot be divided among mesh.expert={devices} devices; use a divisor")
    if settings.shadow_experts > num_experts:
        raise ValueError(f"shadow_experts={settings.shadow_experts} must be at most the {num_experts} experts of a layer")
    return devices


def check_optimizer(parallelism: Parallelism | None, config: ModelConfig, lora: LoraSettings | None = None) -> None:
    """Refuses `shard_optimizer` if nothing that is trained can be split over `data`."""
    mesh = optimizer_mesh(parallelism)
    if mesh is None:
        raise ValueError(
            "shard_optimizer=True needs several devices along data: a mesh.data of 2 or more. Over the other axes the "
            "optimizer's state is split without it"
        )

    def trained() -> nnx.State:
        model = from_config(config, rngs=nnx.Rngs(0))
        if lora is not None:
            add_lora(model, lora, rngs=nnx.Rngs(0))
        return nnx.state(model, nnx.Param)

    optimizer_shardings(nnx.eval_shape(trained), mesh)


def _check_model(settings: RunSettings, config: ModelConfig, tokenizer: Any, model: Decoder | None) -> None:
    """Refuses a model or a tokenizer that the run cannot have.

    Args:
      model: the model that was passed, whose dtype overrides the settings'.

    Raises:
      ValueError: the model already has adapters, or does not support FP8. Or it has no embedding for some of the tokenizer's
        tokens: the loss would be NaN at the first document with one.
    """
    if model is not None and jax.tree.leaves(nnx.state(model, nnx.LoRAParam)):
        raise ValueError(
            "the model has adapters already, and a checkpoint of the run would lack the other weights: pass the model "
            "without adapters, and the settings' lora"
        )
    if settings.precision != "bf16":
        dtype = "bfloat16" if model is None else model.dtype
        if (reason := fp8_refusal(config, dtype, settings.fp8_dense)) is not None:
            raise ValueError(f"precision={settings.precision!r}: {reason}; use precision 'bf16'")
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, and the model's vocabulary {config.vocab_size}; use the model's "
            "own tokenizer"
        )
