"""The training step whose cost is predicted: model, mesh and batch, checked as the training step would check them."""

import functools
import math
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import jax
from flax import nnx
from jax.sharding import AbstractMesh

from moe_jax.config import ExpertsSpec, ModelConfig, Stage
from moe_jax.layers.moe import EXPERT_CHUNK_TOKENS
from moe_jax.layers.passes import Remat
from moe_jax.models.auto import from_config
from moe_jax.parallel.choices import MESH_AXES, Hops, MeshShape
from moe_jax.parallel.expert.settings import Capacity, ExpertParallel, devices_of_step, first_capacity
from moe_jax.parallel.layout import data_axis, gathered_axes, parameter_path, parameter_spec
from moe_jax.parallel.sequence.attention import Method
from moe_jax.parallel.sequence.ring import devices_per_ring_step

Dtype = Literal["bfloat16", "float32"]
BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step of `config` on `mesh`: `rows` sequences of `sequence_length` tokens over all devices.

    Multi-token prediction (MTP) modules are trained with the model; `config.without_mtp()` has none.

    Attributes:
      rows: sequences of the whole batch, over all devices.
      remat: True recomputes each layer from its input in the backward pass. "offload" also keeps that input in host memory.
      param_dtype: dtype of the parameters and their gradients; master parameters are float32 in either case.
      moment_dtype: dtype of AdamW's two moments.
      keys_per_token: mean number of keys that a token attends to (packed documents shorten it); None: half a row.
      expert_load_imbalance: choices computed by the busiest device of the axis `expert`, over the mean of all devices.
      context_method: how attention is computed over the mesh axis `context`.
      hops: as in `parallel.Parallelism`; "copies" needs one process that has all GPUs.
      capacity_factor: as in `parallel.ExpertParallel`.
      shard_optimizer: as in `parallel.Parallelism`.

    Raises:
      ValueError: the mesh does not divide the rows, the experts or the sequence, or a field has an invalid value. One error
        lists all problems.
    """

    config: ModelConfig
    mesh: MeshShape
    rows: int
    sequence_length: int
    remat: Remat = True
    param_dtype: Dtype = "bfloat16"
    moment_dtype: Dtype = "float32"
    keys_per_token: float | None = None
    expert_load_imbalance: float = 1.0
    context_method: Method = "ring"
    hops: Hops = "nccl"
    capacity_factor: float = ExpertParallel.capacity_factor
    shard_optimizer: bool = False

    def __post_init__(self):
        problems = _problems(self)
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def tokens(self) -> int:
        """Tokens of one device."""
        return self.rows * self.sequence_length // self.mesh.size

    @property
    def imbalance(self) -> float:
        """`expert_load_imbalance`, at most the number of devices of the axis `expert`."""
        return min(self.expert_load_imbalance, self.mesh.expert)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the model's layers, followed by one stage for each MTP module."""
        return (*self.config.stages, *self.config.mtp_stages)

    def is_module(self, stage: Stage) -> bool:
        """Returns True if the stage is an MTP module."""
        return stage.first_layer >= self.config.num_hidden_layers

    @property
    def attended(self) -> tuple[float, ...]:
        """Mean number of keys that a token attends to, for each layer and each MTP module."""
        keys = self.sequence_length / 2 if self.keys_per_token is None else self.keys_per_token
        per_layer = tuple(min(keys, window or keys) for window in self.config.layer_windows)
        return per_layer + (keys,) * len(self.config.mtp_stages)

    @property
    def experts(self) -> ExpertsSpec:
        """The experts of each sparse layer. Callers ask only for models that have some."""
        assert self.config.experts is not None
        return self.config.experts

    @property
    def exchanges(self) -> bool:
        """True if tokens travel to experts on other devices."""
        return self.mesh.expert > 1 and bool(self.config.routed_layers)

    @property
    def capacity(self) -> Capacity:
        """Maximum that one device sends to one other device in the first round of the exchange."""
        k, num_experts = self.experts.num_experts_per_tok, self.experts.num_experts
        return first_capacity(self.tokens, k, num_experts, self.mesh.expert, self.capacity_factor)

    @property
    def gathers_tokens(self) -> bool:
        """True if all tokens go to all devices (transport `gather` or `pairwise`); else the transport is `all_to_all`."""
        return self.capacity.tokens == self.tokens

    @property
    def sends_pairwise(self) -> bool:
        """True if the transport is `pairwise`, by the same rule as in `parallel.Parallelism`."""
        return self.exchanges and self.hops == "copies" and self.capacity_factor >= self.mesh.expert

    @property
    def pairwise_step(self) -> int:
        """Number of other devices whose tokens `pairwise` computes in one step."""
        return min(self.mesh.expert - 1, devices_of_step(self.capacity))

    @property
    def received(self) -> int:
        """Token slots that a device has after dispatch, filled or not."""
        return self.mesh.expert * self.capacity.tokens if self.exchanges else self.tokens

    @property
    def room(self) -> int:
        """Rows (token-expert pairs) that a device's buffers hold for its experts."""
        return self.mesh.expert * self.capacity.pairs if self.exchanges else self.tokens * self.experts.num_experts_per_tok

    @property
    def computed_at_once(self) -> int:
        """Rows that the experts compute at a time. On one device with many tokens this is a chunk of `room` (`layers.moe`)."""
        in_chunks = not self.exchanges and self.tokens > 2 * EXPERT_CHUNK_TOKENS
        return EXPERT_CHUNK_TOKENS * self.experts.num_experts_per_tok if in_chunks else self.room

    @property
    def ring_step(self) -> int:
        """Number of other devices whose keys one step of the ring receives."""
        elements = self.config.num_key_value_heads * (self.config.key_dim + self.config.value_dim)
        return min(self.mesh.context - 1, devices_per_ring_step(BYTES["bfloat16"] * self.tokens * elements, self.hops))

    @property
    def parameters(self) -> tuple["Parameter", ...]:
        """The model's parameter arrays and how `parallel.layout` splits each of them."""
        return _parameters(self.config, self.mesh)

    def updated_size(self, parameter: "Parameter") -> int:
        """Returns the elements of the parameter that a device updates: it stores their moments and masters."""
        return parameter.part_size if self.shard_optimizer else parameter.own_size


@dataclass(frozen=True)
class Parameter:
    """One parameter array of the model, and its share on each device."""

    path: tuple
    layers: int
    """Layers stacked in the array; 1 outside stages."""
    own_size: int
    """Elements that a device stores."""
    part_size: int
    """Elements of `own_size` that a device updates if the optimizer's state is split over `data` (`parallel.zero1`)."""
    split_axes: tuple[str, ...]
    """The mesh axes that split the array. Over all other axes its gradients are summed once a step."""
    gather_axes: tuple[str, ...]
    """The mesh axes over which the array is gathered for use."""
    used_size: int
    """Elements that a device has after the gather."""

    @property
    def in_stage(self) -> bool:
        """True if the array belongs to a layer. Then one layer is gathered at a time, one layer ahead of its use."""
        return self.path[0] == "stages"


@functools.cache
def _parameters(config: ModelConfig, mesh: MeshShape) -> tuple[Parameter, ...]:
    abstract = AbstractMesh(tuple(asdict(mesh).values()), MESH_AXES)
    found = []
    for path, shape in _shapes(config):
        ways = tuple(name for names in parameter_spec(path, shape, abstract) if names for name in _as_tuple(names))
        gathered = tuple(name for _, names in gathered_axes(path, shape, abstract) for name in names)
        own = math.prod(shape) // math.prod(getattr(mesh, name) for name in ways)
        used = own * math.prod(getattr(mesh, name) for name in gathered)
        part = own // (1 if data_axis(path, shape, abstract) is None else mesh.data)
        layers = shape[0] if path[0] == "stages" else 1
        found.append(Parameter(path, layers, own, part, ways, gathered, used))
    return tuple(found)


@functools.cache
def _shapes(config: ModelConfig) -> tuple[tuple[tuple, tuple[int, ...]], ...]:
    model = nnx.eval_shape(lambda: from_config(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves_with_path(nnx.state(model, nnx.Param))
    return tuple((parameter_path(path), leaf.shape) for path, leaf in leaves)


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _problems(step: PlannedStep) -> list[str]:
    """Returns the problems of a step, each as one clause."""
    counts = {"rows": step.rows, "sequence_length": step.sequence_length}
    counts |= {f"mesh.{name}": size for name, size in asdict(step.mesh).items()}
    problems = [
        f"{name}={value!r} must be an integer of at least 1"
        for name, value in counts.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < 1
    ]
    for name, value, choices in (
        ("param_dtype", step.param_dtype, BYTES),
        ("moment_dtype", step.moment_dtype, BYTES),
        ("context_method", step.context_method, get_args(Method)),
        ("hops", step.hops, get_args(Hops)),
    ):
        if value not in choices:
            problems.append(f"{name}={value!r} must be one of {', '.join(choices)}")
    if not isinstance(step.remat, bool) and step.remat != "offload":
        problems.append(f"remat={step.remat!r} must be True, False or 'offload'")
    if step.keys_per_token is not None and not 0 < step.keys_per_token <= step.sequence_length:
        problems.append(f"keys_per_token={step.keys_per_token!r} must be above 0, and at most sequence_length")
    if not 1 <= step.expert_load_imbalance < math.inf:
        problems.append(f"expert_load_imbalance={step.expert_load_imbalance!r} must be a number of at least 1")
    if not 0 < step.capacity_factor < math.inf:
        problems.append(f"capacity_factor={step.capacity_factor!r} must be a number above 0")
    if problems:
        return problems
    config, mesh = step.config, step.mesh
    ways = mesh.size // mesh.context
    if step.rows % ways:
        problems.append(f"{step.rows} rows cannot be dealt out to data x fsdp x expert = {ways} devices")
    split = 2 * mesh.context if mesh.context > 1 else 1
    if step.sequence_length % split:
        problems.append(f"sequence_length={step.sequence_length} must be a multiple of 2 * mesh.context = {split}")
    experts = config.experts.num_experts if config.experts else 0
    if experts % mesh.expert:
        problems.append(f"{experts} experts cannot be dealt out to mesh.expert={mesh.expert} devices; take a divisor")
    heads = config.num_attention_heads, config.num_key_value_heads
    if step.context_method == "ulysses" and any(number % mesh.context for number in heads):
        problems.append(f"ulysses needs mesh.context={mesh.context} to divide {heads[0]} heads and {heads[1]} key heads")
    return problems
