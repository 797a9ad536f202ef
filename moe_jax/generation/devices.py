"""Generation on all devices that hold a model: each continues its own prompts, and the experts are spread over all.

Generation uses its own mesh, independent of the parameters' mesh. The experts are spread over the largest number of devices
that divides both counts, as in training with expert parallelism. All other matrices are gathered, in the model's dtype, before
the first token. Tokens then need no gathering of weights, but each device needs memory for the gathered matrices. If the
model's mesh spreads the experts differently, a device also needs memory for a second copy of its part of the experts.
"""

import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, Key

from moe_jax.config import ModelConfig
from moe_jax.generation.request import DecodeOptions, check_memory, left_padded
from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.moe import is_expert_matrix
from moe_jax.models.decoder import Decoder
from moe_jax.models.inputs import refuse_deleted
from moe_jax.parallel.choices import Hops
from moe_jax.parallel.collectives.hops import COPIES, MANY_AT_ONCE, default_hops
from moe_jax.parallel.expert import ExpertParallel
from moe_jax.parallel.fsdp import ShardedParameters
from moe_jax.parallel.layout import parameter_path
from moe_jax.parallel.mesh import refuse_pipe
from moe_jax.parallel.pipeline.chunks import refuse_chunks
from moe_jax.parallel.spread import Spread
from moe_jax.runtime.processes import is_first_process

AXES = ("fsdp", "expert")


@dataclass(frozen=True)
class Devices:
    """Number of devices that share the experts during generation, and how they exchange tokens."""

    with_experts: int
    """The number of devices over which the experts are spread."""
    hops: Hops = "nccl"
    """How tokens travel if the prompts are split into two halves, as in `parallel.Parallelism`."""

    @property
    def spread(self) -> Spread:
        """The `Spread` of the model's calls: expert parallelism if experts are split over devices, else none."""
        return Spread(expert=ExpertParallel() if self.with_experts > 1 else None)

    @property
    def spread_of_halves(self) -> Spread:
        """The `Spread` of two overlapping half-batches: pairwise exchange, with a capacity for any routing."""
        if self.hops == "nccl":
            return self.spread
        return Spread(expert=ExpertParallel(transport="pairwise", capacity_factor=self.with_experts))

    def any(self, flags: Bool[Array, "batch"]) -> Bool[Array, ""]:
        """Returns True on all devices if a flag is set on any of them."""
        return lax.psum(flags.sum(dtype=jnp.int32), AXES) > 0


class DecodeInputs(NamedTuple):
    """Inputs of one device's decoding loop: its prompts, left-padded, and a PRNG key per prompt."""

    devices: Devices
    model: Decoder
    tokens: Int[Array, "batch seq"]
    segment_ids: Int[Array, "batch seq"]
    """1 for tokens of a prompt and 0 for padding; a row of only padding is not a prompt."""
    keys: Key[Array, "batch"]


def decode_on_devices[Results: tuple](
    decode: Callable[[DecodeOptions, DecodeInputs], Results],
    options: DecodeOptions,
    model: Decoder,
    prompts: list[list[int]],
    seed: int,
) -> Results:
    """Runs `decode` on all devices that hold the model; returns its results with a row for each prompt, in order.

    Args:
      decode: a decoding loop, traced for one device. Each array of its result, a tuple, has a row for each of the device's
        prompts. Results of rows without a prompt are dropped.
      options: a compiled program is cached for each set of values.

    Raises:
      ValueError: the model is on a mesh with several devices along `pipe`, or split into a pipeline's chunks. Or
        `options.overlap_prefill` is True and `overlap_refusal` returns a reason. Or the cache would not fit the memory.
    """
    refuse_deleted(nnx.state(model))
    graph, parameters, *rest = nnx.split(model, nnx.Param, ...)
    mesh = generation_mesh(devices_of(model, "generation"), model.config)
    refuse_chunks(parameters, "generation")
    check_memory(model.config, prompts, options.max_new_tokens, dtype=model.dtype, devices=mesh.size)
    if options.overlap_prefill and (reason := overlap_refusal(mesh, model.config, len(prompts))):
        raise ValueError(f"overlap_prefill=True: {reason}")
    specs = ShardedParameters.of(parameters, mesh, dtype=model.dtype, token_axes=AXES).specs
    parameters = jax.tree.map(partial(_placed, mesh), parameters, specs)
    (others,) = (jax.tree.map(partial(_placed, mesh), state, _specs_of_others(state, mesh)) for state in rest)
    tokens, segment_ids = left_padded(prompts, mesh.size)
    number = np.uint32(operator.index(seed) % 2**32)
    _announce_compilation((decode, options, mesh, graph), parameters, tokens, len(prompts))
    with jax.set_mesh(mesh):
        results = _compiled(decode, options, mesh)(graph, parameters, others, tokens, segment_ids, number)
    return jax.tree.map(lambda rows: np.asarray(rows)[: len(prompts)], results)


def generation_mesh(devices: Sequence[jax.Device], config: ModelConfig) -> Mesh:
    """Builds the mesh (fsdp, expert) of generation.

    For a model loaded onto this mesh, only the matrices other than experts' must be gathered.
    """
    has_experts = config.experts is not None and bool(config.moe_layers)
    experts = math.gcd(len(devices), config.experts.num_experts) if has_experts and config.experts else 1
    return Mesh(np.array(devices).reshape(-1, experts), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def overlap_refusal(mesh: Mesh, config: ModelConfig, num_prompts: int) -> str | None:
    """Returns why the prefill cannot overlap two halves of the batch; None if it can."""
    if mesh.shape["expert"] == 1:
        return (
            f"no device has experts of its own, so no token travels while another is computed; {_whole_because(mesh, config)}"
        )
    rows = -(-num_prompts // mesh.size)
    if rows % 2:
        return f"each device must have an even number of prompts; {num_prompts} on {mesh.size} devices are {rows} on each"
    if config.rope_parameters.rope_type == "dynamic":
        return "rope_type 'dynamic' reads the longest of all prompts, and a half has some of them alone"
    return None


def _whole_because(mesh: Mesh, config: ModelConfig) -> str:
    """Returns the reason why each device of the mesh has all experts, with a remedy if there is one."""
    if config.experts is None or not config.moe_layers:
        return "the model has none"
    if mesh.size == 1:
        return "lay the model out on several"
    number = config.experts.num_experts
    return f"the model has {number}, and a number of devices with a common divisor can share them; got {mesh.size}"


def _specs_of_others(others: nnx.State, mesh: Mesh | AbstractMesh) -> nnx.State:
    """Returns the layout of arrays other than parameters: frozen experts are spread like others, all else is whole."""

    def spec(path: tuple, array: Array) -> PartitionSpec:
        if mesh.shape["expert"] == 1 or not is_expert_matrix(parameter_path(path)):
            return PartitionSpec()
        # Codes and scales of quantised matrices have the axes of the matrices.
        return PartitionSpec(*(None,) * (array.ndim - 3), "expert")

    return jax.tree.map_with_path(spec, others)


_announced: set[tuple] = set()
"""Programs whose compilation was announced; a key holds all that a compilation depends on."""


def _announce_compilation(program: tuple, parameters: nnx.State, tokens: np.ndarray, num_prompts: int) -> None:
    """Prints a line to a terminal if a call is slow only because its program must be compiled first."""
    key = *program, tokens.shape, *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(parameters))
    if key in _announced:
        return
    _announced.add(key)
    if sys.stderr.isatty() and is_first_process():
        prompts = "a prompt" if num_prompts == 1 else f"{num_prompts} prompts"
        print(f"compiling for {prompts} of at most {tokens.shape[1]} tokens ...", file=sys.stderr, flush=True)


@functools.cache
def _compiled(decode: Callable, options: DecodeOptions, mesh: Mesh) -> Callable:
    """Returns the jitted program; jax keeps a compilation of it for each architecture and shape."""
    # Results are whole on every device, because each process must read them.
    everywhere = NamedSharding(mesh, PartitionSpec())
    copies = options.overlap_prefill and default_hops(mesh) == "copies"
    options_of_copies = COPIES | MANY_AT_ONCE if copies else None
    of_all = program(decode, options, mesh, "copies" if copies else "nccl")
    return jax.jit(of_all, static_argnums=0, out_shardings=everywhere, compiler_options=options_of_copies)


def program(decode: Callable, options: DecodeOptions, mesh: Mesh | AbstractMesh, hops: Hops = "nccl") -> Callable:
    """Returns f(graph, parameters, other state, tokens, segment_ids, seed), which runs `decode` on all devices.

    Args:
      hops: `Devices.hops`; "copies" needs a program compiled for copies.
    """
    devices = Devices(mesh.shape["expert"], hops)

    def on_all(graph: nnx.GraphDef, parameters: nnx.State, others: nnx.State, tokens, segment_ids, seed):
        dtype = nnx.merge(graph, parameters, others).dtype
        sharded = ShardedParameters.of(parameters, mesh, dtype=dtype, token_axes=AXES)

        def on_one(parameters, others, tokens, segment_ids, seed):
            model = nnx.merge(graph, sharded.gathered(parameters), vary_as(others, tokens))
            first = lax.axis_index(AXES) * len(tokens)
            keys = row_keys(seed, first + jnp.arange(len(tokens)))
            return decode(options, DecodeInputs(devices, model, tokens, segment_ids, keys))

        rows, whole = PartitionSpec(AXES), PartitionSpec()
        in_specs = sharded.specs, _specs_of_others(others, mesh), rows, rows, whole
        on_mesh = jax.shard_map(on_one, mesh=mesh, in_specs=in_specs, out_specs=rows)
        return on_mesh(parameters, others, tokens, segment_ids, seed)

    return on_all


def row_keys(seed, rows) -> Key[Array, "batch"]:
    """Returns a PRNG key per row, which depends only on the seed and the row's index."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), rows)


def devices_of(model: Decoder, work: str) -> list[jax.Device]:
    """Returns the devices that hold the parameters, in the order of their mesh.

    Raises:
      ValueError: the mesh has several devices along `pipe`; the message names the `work`.
    """
    sharding = getattr(jax.tree.leaves(nnx.state(model))[0], "sharding", None)
    if sharding is None:
        return jax.local_devices()[:1]
    if isinstance(sharding, NamedSharding):
        refuse_pipe(sharding.mesh, work)
        return sharding.mesh.devices.ravel().tolist()
    return sorted(sharding.device_set, key=lambda device: device.id)


def _placed(mesh: Mesh, array: Array, spec: PartitionSpec) -> Array:
    """Moves the array to this mesh.

    XLA cannot compile a program with two meshes whose axes partition the devices incompatibly.
    """
    there = NamedSharding(mesh, spec)
    sharding = getattr(array, "sharding", None)
    if sharding is not None and sharding.is_equivalent_to(there, array.ndim):
        # The array is in place already: only its sharding is replaced, without a copy.
        parts = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, there, parts)
    return jax.device_put(array, there)
