"""The training step whose cost is predicted: model, mesh and batch, with the training step's own checks."""

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp

from moe_jax.config import ExpertsSpec, HeadsSpec, ModelConfig, Stage
from moe_jax.cost.parameters import BYTES, ELEMENT, FP8_ROW_ELEMENT, Parameter, abstract_mesh, dealt_out, parameters, shapes
from moe_jax.layers.moe import EXPERT_CHUNK_TOKENS
from moe_jax.layers.passes import Remat
from moe_jax.models.decoder import fp8_refusal
from moe_jax.models.execution import Execution
from moe_jax.models.layers_in_pipe import layers_in_pipe
from moe_jax.models.precision import PrecisionName
from moe_jax.models.remat import KeptPart
from moe_jax.parallel.choices import UNIFORM, Hops, MeshShape, OptimizerName, PipeSchedule
from moe_jax.parallel.expert.settings import ExchangePlan, ExpertParallel, plan_exchange
from moe_jax.parallel.layout import data_axis, part_shape
from moe_jax.parallel.pipeline.chunks import PipeShape, layers_of_chunk, stacked_shape
from moe_jax.parallel.pipeline.executor import sources
from moe_jax.parallel.pipeline.limits import divides_backward, ranks_problem, schedule_by_name, schedule_problem, split_axes
from moe_jax.parallel.pipeline.schedules import Schedule
from moe_jax.parallel.pipeline.table import SlotKind, lockstep_table, undivided
from moe_jax.parallel.sequence.attention import Method
from moe_jax.parallel.sequence.ring import devices_per_ring_step

Dtype = Literal["bfloat16", "float32"]


class PlannedAdapters(NamedTuple):
    """LoRA adapters trained in float32 on frozen weights."""

    parameters: int
    moved_elements: float
    """Elements of rows that all adapters read and write in the forward pass of one token."""
    options: str
    """The options of `moe-jax finetune` that train them."""
    weights: str = "whole"
    """The form of the frozen weights, as in `moe-jax finetune --weights`."""
    on_experts: bool = True
    """Experts have adapters."""
    factors: tuple[tuple[tuple, tuple[int, ...]], ...] = ()
    """The path and the shape of each factor, as a mesh splits them; () if all are whole on every device."""


class Ticks(NamedTuple):
    """Cost facts of a pipeline schedule that is executed from a table in lockstep ticks (`parallel.pipeline.executor`)."""

    schedule: Schedule
    number: int
    hops: int
    """Transfers between different ranks after each tick."""
    pairs: float
    """Share of the forward passes that overlap with a backward pass."""
    slots: Mapping[SlotKind, int]
    copies: float
    """Layers that a rank receives from another rank for a step, relative to its own layers."""


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step of `config` on `mesh`: `rows` sequences of `sequence_length` tokens over all devices.

    Multi-token prediction (MTP) modules are trained with the model; `config.without_mtp()` has none.

    With a pipe (`mesh.pipe`), the layers of the last stage are split over its ranks, and each rank has all rows. Other work is
    split over the ranks too: other layers by rows, embedding and loss by tokens.

    Attributes:
      rows: sequences of the whole batch, over all devices and micro-batches.
      remat: True recomputes each layer from its input in the backward pass. "offload" also keeps that input in host memory.
      num_kept, keep: with `remat=True`, the last layers keep all their residuals instead, and the others keep these parts of
        them, as in `models.execution.Execution`.
      param_dtype: dtype of the parameters and their gradients; master parameters are float32 in either case.
      optimizer: as in `moe-jax finetune`.
      moment_dtype: dtype of the optimizer's moments.
      keys_per_token: mean number of keys that a token attends to (packed documents shorten it); None: half a row.
      expert_load_imbalance: choices computed by the busiest device of the axis `expert`, over the mean of all devices.
      context_method: how attention is computed over the mesh axis `context`.
      hops: as in `parallel.Parallelism`; "copies" needs one process that has all GPUs.
      capacity_factor, tokens_in_fp8: as in `parallel.ExpertParallel`.
      shard_optimizer: as in `parallel.Parallelism`.
      gradient_accumulation: micro-batches of the step.
      pipe_chunks: chunks of layers on each rank of a pipe.
      pipe_schedule: as in `parallel.Parallelism`.
      overlap_micro_batches: as in `parallel.Parallelism`; the passes of a pipe always overlap.
      precision: precision of the experts' matmuls, as in `moe-jax finetune --precision`.
      adapters: train these and freeze the parameters, which then have no gradients, moments or masters. None: train all
        parameters.

    Raises:
      ValueError: the mesh does not divide the rows, the experts or the sequence, or a field has an invalid value. One error
        lists all problems.
    """

    config: ModelConfig
    mesh: MeshShape
    rows: int
    sequence_length: int
    remat: Remat = True
    num_kept: int = 0
    keep: tuple[KeptPart, ...] = ()
    param_dtype: Dtype = "bfloat16"
    optimizer: OptimizerName = "adamw"
    moment_dtype: Dtype = "float32"
    keys_per_token: float | None = None
    expert_load_imbalance: float = 1.0
    context_method: Method = "ring"
    hops: Hops = "nccl"
    capacity_factor: float = ExpertParallel.capacity_factor
    tokens_in_fp8: bool = False
    shard_optimizer: bool = False
    gradient_accumulation: int = 1
    pipe_chunks: int = 1
    pipe_schedule: PipeSchedule = "uniform"
    overlap_micro_batches: bool | None = None
    precision: PrecisionName = "bf16"
    adapters: PlannedAdapters | None = None

    def __post_init__(self):
        problems = _problems(self)
        if problems:
            raise ValueError("; ".join(problems))

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens of one micro-batch that a device computes in one layer. With a pipeline, in one layer of the pipeline."""
        return self.rows * self.sequence_length // (self.gradient_accumulation * (self.mesh.size // self.mesh.pipe))

    @property
    def keys(self) -> float:
        """Mean number of keys that a token attends to, in layers without a sliding window."""
        return self.sequence_length / 2 if self.keys_per_token is None else self.keys_per_token

    @property
    def accumulates(self) -> bool:
        """True if micro-batch gradients are accumulated in float32: with pipelining, or several micro-batches."""
        return self.mesh.pipe > 1 or self.gradient_accumulation > 1

    @property
    def joins_passes(self) -> bool:
        """True if one micro-batch's forward pass overlaps another's backward pass, as in a pipeline."""
        if self.mesh.pipe > 1 or self.gradient_accumulation == 1 or self.adapters is not None:
            return self.mesh.pipe > 1
        by_default = self.mesh.expert > 1 and self.remat is not False
        return by_default if self.overlap_micro_batches is None else self.overlap_micro_batches

    @property
    def joined_stage(self) -> int:
        """Index of the stage whose passes overlap; without a pipeline, the first of the longest stages."""
        lengths = [stage.num_layers for stage in self.config.stages]
        return dealt_out(self.config).stage if self.mesh.pipe > 1 else lengths.index(max(lengths))

    @property
    def layers_of_chunk(self) -> int:
        """Layers per pipeline chunk, including padding; without a pipeline, all layers of `joined_stage`."""
        return layers_of_chunk(dealt_out(self.config).num_layers, self.mesh.pipe, self.pipe_chunks)

    @functools.cached_property
    def slots(self) -> int:
        """Number of chunk inputs kept at the same time; 2 for overlapping micro-batches without a pipeline."""
        return min((self.pipe_chunks + 1) * self.mesh.pipe, self.pipe_chunks * self.gradient_accumulation)

    @property
    def offloads_slots(self) -> bool:
        """True if the kept chunk inputs of a pipeline are offloaded to host memory."""
        return self.mesh.pipe > 1 and self.remat == "offload"

    @property
    def ticks(self) -> Ticks | None:
        """The ticks of a table-driven pipeline schedule; None for uniform ticks."""
        if self.pipe_schedule in UNIFORM:
            return None
        divides = divides_backward(asdict(self.mesh), self.expert_parallel, frozen=self.adapters is not None)
        return _ticks(self.pipe_schedule, self.mesh.pipe, self.pipe_chunks, self.gradient_accumulation, divides)

    @functools.cached_property
    def outside_pipe(self) -> "PlannedStep":
        """The step of one micro-batch for layers outside the pipeline, whose rows `pipe` splits as `fsdp` does."""
        mesh = replace(self.mesh, pipe=1, fsdp=self.mesh.pipe * self.mesh.fsdp)
        rows = self.rows // self.gradient_accumulation
        return replace(self, mesh=mesh, rows=rows, gradient_accumulation=1, pipe_chunks=1)

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of decoder layers, then one stage per MTP module."""
        return self.config.all_stages

    @property
    def num_layers(self) -> int:
        """Number of layers, MTP modules included."""
        return sum(stage.num_layers for stage in self.stages)

    def kept_layers(self, number: int) -> int:
        """Returns how many layers of stage `number` keep all their residuals."""
        stage = self.stages[number]
        if not self.remat:
            return stage.num_layers
        return Execution(True, self.num_kept).of_stage(self.config, number).num_kept * len(stage.body)

    def is_module(self, stage: Stage) -> bool:
        """Returns True if the stage is an MTP module."""
        return stage.first_layer >= self.config.num_hidden_layers

    @property
    def attended(self) -> tuple[float, ...]:
        """Mean number of keys that a token attends to, for each layer and each MTP module."""
        keys = self.keys
        per_layer = tuple(min(keys, window or keys) for window in self.config.layer_windows)
        return per_layer + (keys,) * len(self.config.mtp_stages)

    @functools.cached_property
    def experts(self) -> ExpertsSpec:
        """The experts of each sparse layer. Only for models with sparse layers."""
        assert self.config.experts is not None
        return self.config.experts

    @functools.cached_property
    def mixer(self) -> HeadsSpec:
        """The attention of each layer."""
        return self.config.mixer

    @property
    def expert_parallel(self) -> ExpertParallel:
        """The settings of the exchange of tokens, as in training."""
        return ExpertParallel(capacity_factor=self.capacity_factor).over(self.mesh.expert, self.hops)

    @functools.cached_property
    def exchange(self) -> ExchangePlan | None:
        """The plan of expert dispatch and combine, as in training; None without expert parallelism."""
        if self.mesh.expert == 1 or not self.config.routed_layers:
            return None
        k, own_experts = self.experts.num_experts_per_tok, self.experts.num_experts // self.mesh.expert
        return plan_exchange(self.tokens, k, self.mesh.expert, own_experts, self.expert_parallel)

    @property
    def received(self) -> int:
        """Token slots that a device has after dispatch, filled or not."""
        return self.tokens if self.exchange is None else self.exchange.received(self.tokens)

    @property
    def token_bytes(self) -> float:
        """Bytes per element of a dispatched token, which is also kept for the backward pass."""
        return FP8_ROW_ELEMENT if self.tokens_in_fp8 else ELEMENT

    @property
    def room(self) -> int:
        """Capacity in rows (token-expert pairs) of a device's expert buffers, per layer and micro-batch."""
        if self.exchange is None:
            return self.tokens * self.experts.num_experts_per_tok
        return self.mesh.expert * self.exchange.first.pairs

    @property
    def computed_at_once(self) -> int:
        """Rows that the experts compute in one call: `room`, or a chunk of it on one device with many tokens (`layers.moe`)."""
        in_chunks = self.exchange is None and self.tokens > 2 * EXPERT_CHUNK_TOKENS
        return EXPERT_CHUNK_TOKENS * self.experts.num_experts_per_tok if in_chunks else self.room

    @property
    def busiest(self) -> float:
        """Rows (token-expert pairs) computed by the busiest device, per layer and micro-batch."""
        imbalance = min(self.expert_load_imbalance, self.mesh.expert)
        return imbalance * self.tokens * self.experts.num_experts_per_tok

    @property
    def ring_step(self) -> int:
        """Number of other devices whose keys a device receives in one step of ring attention."""
        size = ELEMENT * self.tokens * self.mixer.key_value_elements
        return min(self.mesh.context - 1, devices_per_ring_step(size, self.hops))

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The model's parameter arrays on the mesh."""
        frozen = None if self.adapters is None else self.adapters.weights
        options = dict(shard_optimizer=self.shard_optimizer, in_fp8=self.precision != "bf16", frozen=frozen)
        return parameters(self.config, self.mesh, self.pipe_chunks, **options)

    @functools.cached_property
    def updated(self) -> list[tuple[tuple, tuple[int, ...], int]]:
        """The path and shape of each trained array, and the number of its elements that a device updates."""
        if self.adapters is None:
            whole = dict(shapes(self.config))
            return [(p.path, whole[p.path], p.updated_size) for p in self.parameters]
        pipe = PipeShape(self.mesh.pipe, self.pipe_chunks)
        return _updated_factors(self.config, self.adapters, self.mesh, pipe, self.shard_optimizer)

    @property
    def trained(self) -> int:
        """Elements of trained arrays that a device stores."""
        if self.adapters is None:
            return sum(p.own_size for p in self.parameters)
        pipe = PipeShape(self.mesh.pipe, self.pipe_chunks)
        return sum(size for *_, size in _updated_factors(self.config, self.adapters, self.mesh, pipe, shard_optimizer=False))

    @functools.cached_property
    def parameters_of_stages(self) -> tuple[list[Parameter], ...]:
        """The parameter arrays of each stage's layers."""
        return tuple([p for p in self.parameters if p.path[:2] == ("stages", number)] for number, _ in enumerate(self.stages))


@functools.cache
def _updated_factors(
    config: ModelConfig, adapters: PlannedAdapters, mesh: MeshShape, pipe: PipeShape, shard_optimizer: bool
) -> list[tuple[tuple, tuple[int, ...], int]]:
    """Returns `PlannedStep.updated` of adapters, which count as one vector without their factors."""
    on, found = abstract_mesh(mesh), []
    for path, whole_shape in adapters.factors or ((("norm",), (adapters.parameters,)),):
        shape = stacked_shape(path, whole_shape, dealt_out(config), pipe)
        is_split = shard_optimizer and data_axis(path, shape, on) is not None
        found.append((path, shape, math.prod(part_shape(path, shape, on)) // (mesh.data if is_split else 1)))
    return found


@functools.cache
def _ticks(name: PipeSchedule, ranks: int, chunks: int, micro_batches: int, divides: bool) -> Ticks:
    schedule = schedule_by_name(name, ranks, chunks, micro_batches)
    schedule = schedule if divides else undivided(schedule)
    table = lockstep_table(schedule)
    passes = [slot for slots in schedule.ranks for slot in slots if any(part.kind == "F" for part in slot)]
    pairs = sum(len(slot) == 2 for slot in passes) / len(passes)
    hops = sum(distance != 0 for distance in (*table.forward_hops, *table.backward_hops))
    places = sources(schedule)
    moved = sum(stored_on != tuple(range(ranks)) for _, stored_on in places)
    return Ticks(schedule, table.spans[-1].ends, hops, pairs, table.sizes, moved / (1 + max(chunk for chunk, _ in places)))


def _problems(step: PlannedStep) -> list[str]:
    """Returns the problems of a step, each as one clause."""
    counts = {"rows": step.rows, "sequence_length": step.sequence_length}
    counts |= {f"mesh.{name}": size for name, size in asdict(step.mesh).items()}
    counts |= {"gradient_accumulation": step.gradient_accumulation, "pipe_chunks": step.pipe_chunks}
    problems = [
        f"{name}={value!r} must be an integer of at least 1"
        for name, value in counts.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < 1
    ]
    for name, value, choices in (
        ("param_dtype", step.param_dtype, BYTES),
        ("optimizer", step.optimizer, get_args(OptimizerName)),
        ("moment_dtype", step.moment_dtype, BYTES),
        ("context_method", step.context_method, get_args(Method)),
        ("hops", step.hops, get_args(Hops)),
        ("precision", step.precision, get_args(PrecisionName)),
    ):
        if value not in choices:
            problems.append(f"{name}={value!r} must be one of {', '.join(choices)}")
    if not isinstance(step.remat, bool) and step.remat != "offload":
        problems.append(f"remat={step.remat!r} must be True, False or 'offload'")
    if isinstance(step.num_kept, bool) or not isinstance(step.num_kept, int) or step.num_kept < 0:
        problems.append(f"num_kept={step.num_kept!r} must be an integer of at least 0")
    else:
        kept = {"num_kept": step.num_kept, "keep": step.keep}
        if step.remat is not True or step.mesh.pipe > 1:
            problems += [f"{name}={kept[name]} needs remat=True, and a mesh without pipe" for name in kept if kept[name]]
    if step.keys_per_token is not None and not 0 < step.keys_per_token <= step.sequence_length:
        problems.append(f"keys_per_token={step.keys_per_token!r} must be above 0, and at most sequence_length")
    if not 1 <= step.expert_load_imbalance < math.inf:
        problems.append(f"expert_load_imbalance={step.expert_load_imbalance!r} must be a number of at least 1")
    if not 0 < step.capacity_factor < math.inf:
        problems.append(f"capacity_factor={step.capacity_factor!r} must be a number above 0")
    if (reason := step.config.mixer_refusal("the cost model")) is not None:
        problems.append(reason)
    return problems or [*_problems_of_mesh(step), *_problems_of_pipe(step)]


def _problems_of_mesh(step: PlannedStep) -> list[str]:
    problems, config, mesh = [], step.config, step.mesh
    if step.precision != "bf16":
        if step.pipe_schedule != "uniform":
            problems.append(f"precision={step.precision!r} needs pipe_schedule='uniform'; got {step.pipe_schedule!r}")
        reason = fp8_refusal(config, jnp.bfloat16)
        problems += [f"precision={step.precision!r}: {reason}; use 'bf16'"] if reason is not None else []
    elif step.tokens_in_fp8:
        problems.append("tokens_in_fp8=True needs precision='fp8' or 'fp8_kept'; got 'bf16'")
    if step.adapters is not None and step.adapters.weights != "whole" and mesh.pipe > 1:
        problems.append(f"weights={step.adapters.weights!r} needs a mesh without pipe; got mesh.pipe={mesh.pipe}")
    ways = mesh.size // mesh.pipe // mesh.context
    rows = step.rows // step.gradient_accumulation
    if step.rows % step.gradient_accumulation:
        problems.append(f"{step.rows} rows must be a multiple of gradient_accumulation={step.gradient_accumulation}")
    elif rows % ways:
        of = f"{rows} rows" if step.gradient_accumulation == 1 else f"a micro-batch of {rows} rows"
        problems.append(f"{of} cannot be divided among data x fsdp x expert = {ways} devices")
    split = 2 * mesh.context if mesh.context > 1 else 1
    if step.sequence_length % split:
        problems.append(f"sequence_length={step.sequence_length} must be a multiple of 2 * mesh.context = {split}")
    experts = config.experts.num_experts if config.experts else 0
    if experts % mesh.expert:
        problems.append(f"{experts} experts cannot be divided among mesh.expert={mesh.expert} devices; use a divisor")
    heads = step.mixer.heads, step.mixer.kv_heads
    if step.context_method == "ulysses" and any(number % mesh.context for number in heads):
        problems.append(f"ulysses needs mesh.context={mesh.context} to divide {heads[0]} heads and {heads[1]} key heads")
    return problems


def _problems_of_pipe(step: PlannedStep) -> list[str]:
    """Returns the problems of the pipe and its schedule, which `train.pipelined` would raise in training."""
    ranks, chunks, name, axes = step.mesh.pipe, step.pipe_chunks, step.pipe_schedule, asdict(step.mesh)
    if ranks == 1:
        alone = f"pipe_chunks={chunks} needs a mesh.pipe of at least 2: one rank computes its layers in one chunk"
        return [alone] if chunks > 1 else list(filter(None, [ranks_problem(name, 1, 1)]))
    problems = []
    try:
        layers_in_pipe(step.config, PipeShape(ranks, chunks))
    except ValueError as error:
        problems.append(str(error))
    if problem := schedule_problem(
        name, axes, chunks, step.gradient_accumulation, step.expert_parallel, frozen=step.adapters is not None
    ):
        problems.append(problem)
    elif name not in UNIFORM:
        if step.remat == "offload":
            problems.append(f"remat='offload' needs pipe_schedule='uniform': slots of {name!r} stay in the GPU's memory")
        if step.hops == "copies" and split_axes(axes):
            problems.append(f"pipe_schedule={name!r} needs hops='nccl' where fsdp, expert or context have several devices")
        if step.mesh.context > 1 and step.context_method == "ring":
            problems.append(f"pipe_schedule={name!r} needs context_method='all_gather' or 'ulysses'")
    rows = step.rows // step.gradient_accumulation // (step.mesh.size // ranks // step.mesh.context)
    if len(step.stages) > 1 and rows % ranks:
        problems.append(
            f"a micro-batch has {rows} rows on a rank of the pipe, not a multiple of mesh.pipe={ranks}: layers of another kind "
            "than the pipe's are computed by rows over its ranks"
        )
    elif step.tokens % ranks:
        problems.append(f"the {step.tokens} tokens of a micro-batch must be a multiple of mesh.pipe={ranks}")
    return problems
