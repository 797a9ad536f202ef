"""A training run whose cost is asked for: model, mesh and batch, checked as the training step would check them."""

import functools
import math
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import jax
from flax import nnx
from jax.sharding import AbstractMesh

from moe_jax.config import DeepseekV3Config, ModelConfig, Qwen3MoeConfig, Stage
from moe_jax.layers.moe import EXPERT_CHUNK_TOKENS
from moe_jax.layers.stack import Remat
from moe_jax.models.auto import from_config
from moe_jax.parallel.choices import MESH_AXES, Hops, MeshShape
from moe_jax.parallel.expert.settings import Capacity, ExpertParallel, devices_of_step, first_capacity
from moe_jax.parallel.layout import gathered_axes, parameter_path, parameter_spec
from moe_jax.parallel.sequence.attention import Method
from moe_jax.parallel.sequence.ring import devices_per_ring_step

Dtype = Literal["bfloat16", "float32"]
BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Run:
    """One optimizer step of `config` on `mesh`: `rows` sequences of `sequence_length` tokens over all devices.

    Modules that predict further tokens are trained with the model; `config.without_mtp()` has none.

    Attributes:
      remat: each layer is computed again in the backward pass, of its input alone; with "offload" that is in the host's memory.
      param_dtype, moment_dtype: what parameters (their masters are f32 in either case) and AdamW's moments are kept in.
      keys_per_token: how many keys a token sees on average, as packed documents shorten it; None: half a row.
      expert_load_imbalance: choices that the busiest device of the axis `expert` computes, over the mean.
      context_method: how attention is computed where the mesh has an axis `context`.
      hops: as in `parallel.Parallelism`; "copies" is for one process that has all GPUs.
      capacity_factor: as in `parallel.ExpertParallel`.

    Raises:
      ValueError: what cannot run so: axes, rows or experts that cannot be dealt out, sequences that cannot be split.
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

    def __post_init__(self):
        problems = _problems(self)
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def tokens(self) -> int:
        """Of one device."""
        return self.rows * self.sequence_length // self.mesh.size

    @property
    def imbalance(self) -> float:
        """`expert_load_imbalance`, of which so few devices may be too few."""
        return min(self.expert_load_imbalance, self.mesh.expert)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The model's stages: runs of its layers, and behind them a stage for each module that predicts further tokens."""
        return (*self.config.stages, *self.config.mtp_stages)

    def is_module(self, stage: Stage) -> bool:
        """Whether a stage is such a module."""
        return stage.first_layer >= self.config.num_hidden_layers

    @property
    def attended(self) -> tuple[float, ...]:
        """For each layer, those of modules among them, how many keys a token sees."""
        keys = self.sequence_length / 2 if self.keys_per_token is None else self.keys_per_token
        of_layers = tuple(min(keys, window or keys) for window in self.config.layer_windows)
        return of_layers + (keys,) * len(self.config.mtp_stages)

    @property
    def moe_config(self) -> Qwen3MoeConfig | DeepseekV3Config:
        """The config, which has experts."""
        assert isinstance(self.config, Qwen3MoeConfig | DeepseekV3Config)
        return self.config

    @property
    def shared_inter(self) -> int:
        """The width of the experts that all tokens share, together."""
        return getattr(self.config, "n_shared_experts", 0) * self.moe_config.moe_intermediate_size

    @property
    def exchanges(self) -> bool:
        """Whether tokens travel to experts."""
        return self.mesh.expert > 1 and bool(self.config.routed_layers)

    @property
    def capacity(self) -> Capacity:
        """What one device sends to one other at most, in the first round of the exchange."""
        config, sizes = self.moe_config, (self.mesh.expert, self.capacity_factor)
        return first_capacity(self.tokens, config.num_experts_per_tok, config.num_experts, *sizes)

    @property
    def gathers_tokens(self) -> bool:
        """Whether all tokens go to all devices, by transport `gather` or `pairwise`; else by `all_to_all`."""
        return self.capacity.tokens == self.tokens

    @property
    def sends_pairwise(self) -> bool:
        """Whether they do so by `pairwise`, as `parallel.Parallelism` has it."""
        return self.exchanges and self.hops == "copies" and self.capacity_factor >= self.mesh.expert

    @property
    def pairwise_step(self) -> int:
        """How many other devices' tokens `pairwise` computes at once."""
        return min(self.mesh.expert - 1, devices_of_step(self.capacity))

    @property
    def received(self) -> int:
        """Tokens, or slots for them, that a device has after dispatch."""
        return self.mesh.expert * self.capacity.tokens if self.exchanges else self.tokens

    @property
    def room(self) -> int:
        """Rows for which a device's experts have room."""
        return self.mesh.expert * self.capacity.pairs if self.exchanges else self.tokens * self.moe_config.num_experts_per_tok

    @property
    def computed_at_once(self) -> int:
        """Of these rows, those that the experts compute at a time: a part where one device has many tokens (`layers.moe`)."""
        in_chunks = not self.exchanges and self.tokens > 2 * EXPERT_CHUNK_TOKENS
        return EXPERT_CHUNK_TOKENS * self.moe_config.num_experts_per_tok if in_chunks else self.room

    @property
    def ring_turn(self) -> int:
        """How many other devices' keys a ring takes at once."""
        elements = self.config.num_key_value_heads * (self.config.key_dim + self.config.value_dim)
        return min(self.mesh.context - 1, devices_per_ring_step(BYTES["bfloat16"] * self.tokens * elements, self.hops))

    @property
    def parameters(self) -> tuple["Parameter", ...]:
        """The model's arrays and how `parallel.layout` splits them."""
        return _parameters(self.config, self.mesh)


@dataclass(frozen=True)
class Parameter:
    """One of the model's arrays; of a stage's arrays `layers` lie stacked in it."""

    path: tuple
    layers: int
    own_size: int
    """Elements that a device keeps."""
    split_axes: tuple[str, ...]
    """The mesh axes that split it; over the others its gradients are summed once a step."""
    gather_axes: tuple[str, ...]
    """The mesh axes over which it is gathered for use."""
    used_size: int
    """Elements that a device has after that."""

    @property
    def in_stage(self) -> bool:
        """Whether it belongs to a layer: then one layer at a time is gathered, one ahead of its use."""
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
        layers = shape[0] if path[0] == "stages" else 1
        found.append(Parameter(path, layers, own, ways, gathered, used))
    return tuple(found)


@functools.cache
def _shapes(config: ModelConfig) -> tuple[tuple[tuple, tuple[int, ...]], ...]:
    model = nnx.eval_shape(lambda: from_config(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves_with_path(nnx.state(model, nnx.Param))
    return tuple((parameter_path(path), leaf.shape) for path, leaf in leaves)


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _problems(run: Run) -> list[str]:
    """What is wrong, each as one clause."""
    counts = {"rows": run.rows, "sequence_length": run.sequence_length}
    counts |= {f"mesh.{name}": size for name, size in asdict(run.mesh).items()}
    problems = [
        f"{name}={value!r} must be an integer of at least 1"
        for name, value in counts.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < 1
    ]
    for name, value, choices in (
        ("param_dtype", run.param_dtype, BYTES),
        ("moment_dtype", run.moment_dtype, BYTES),
        ("context_method", run.context_method, get_args(Method)),
        ("hops", run.hops, get_args(Hops)),
    ):
        if value not in choices:
            problems.append(f"{name}={value!r} must be one of {', '.join(choices)}")
    if not isinstance(run.remat, bool) and run.remat != "offload":
        problems.append(f"remat={run.remat!r} must be True, False or 'offload'")
    if run.keys_per_token is not None and not 0 < run.keys_per_token <= run.sequence_length:
        problems.append(f"keys_per_token={run.keys_per_token!r} must be above 0, and at most sequence_length")
    if not 1 <= run.expert_load_imbalance < math.inf:
        problems.append(f"expert_load_imbalance={run.expert_load_imbalance!r} must be a number of at least 1")
    if not 0 < run.capacity_factor < math.inf:
        problems.append(f"capacity_factor={run.capacity_factor!r} must be a number above 0")
    if problems:
        return problems
    config, mesh = run.config, run.mesh
    ways = mesh.size // mesh.context
    if run.rows % ways:
        problems.append(f"{run.rows} rows cannot be dealt out to data x fsdp x expert = {ways} devices")
    split = 2 * mesh.context if mesh.context > 1 else 1
    if run.sequence_length % split:
        problems.append(f"sequence_length={run.sequence_length} must be a multiple of 2 * mesh.context = {split}")
    experts = getattr(config, "num_experts", 0) if config.routed_layers else 0
    if experts % mesh.expert:
        problems.append(f"{experts} experts cannot be dealt out to mesh.expert={mesh.expert} devices; take a divisor")
    heads = config.num_attention_heads, config.num_key_value_heads
    if run.context_method == "ulysses" and any(number % mesh.context for number in heads):
        problems.append(f"ulysses needs mesh.context={mesh.context} to divide {heads[0]} heads and {heads[1]} key heads")
    return problems
