"""Generation on all devices that hold a model: each continues prompts of its own, and the experts are dealt out among them.

Whatever mesh the parameters lie on, here the devices form one of their own. As many of them as divide the experts hold a part
of these each, as in training with expert parallelism. All other matrices are gathered, in the model's dtype, before the first
token: a token then costs no gathering of weights, and each device needs room for them whole, and for its part of the experts
once more where the model's mesh deals them out otherwise.
"""

import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Key

from moe_jax.config import ModelConfig
from moe_jax.generation.prompts import left_padded
from moe_jax.kernels.varying import vary_as
from moe_jax.models.decoder import Decoder
from moe_jax.parallel.expert import ExpertParallel
from moe_jax.parallel.fsdp import ShardedParameters
from moe_jax.parallel.spread import Spread
from moe_jax.runtime.processes import is_first_process

AXES = ("fsdp", "expert")


@dataclass(frozen=True)
class Devices:
    """What the program of one device knows of the others."""

    with_experts: int
    """Over how many the experts are dealt out."""

    @property
    def spread(self) -> Spread:
        """The spread of a model's calls over the devices."""
        return Spread(expert=ExpertParallel() if self.with_experts > 1 else None)

    def any(self, flags: Bool[Array, "batch"]) -> Bool[Array, ""]:
        """Whether one of them is set on any device."""
        return lax.psum(flags.sum(dtype=jnp.int32), AXES) > 0


def decode_on_devices(
    decode: Callable[..., tuple[Array, ...]], options: tuple, model: Decoder, prompts: list[list[int]], seed: int
) -> tuple[np.ndarray, ...]:
    """What `decode(*options, devices, model, tokens, segment_ids, keys)` gives for each of the prompts, in their order.

    Args:
      decode: traced for one device with some of the prompts, padded on the left, and a key for each; what it returns has a row
        for each of them. A row of padding alone is no prompt; its results are dropped.
      options: hashable; a compilation is kept for each.
    """
    graph, parameters, *rest = nnx.split(model, nnx.Param, ...)
    mesh = generation_mesh(_devices_of(model), model.config)
    specs = ShardedParameters.of(parameters, mesh, dtype=model.dtype, token_axes=AXES).specs
    parameters = jax.tree.map(partial(_placed, mesh), parameters, specs)
    (others,) = jax.tree.map(partial(_placed, mesh, spec=PartitionSpec()), rest)
    tokens, segment_ids = left_padded(prompts, mesh.size)
    number = np.uint32(operator.index(seed) % 2**32)
    _say_if_it_compiles((decode, options, mesh, graph), parameters, tokens, len(prompts))
    with jax.set_mesh(mesh):
        results = _compiled(decode, options, mesh)(graph, parameters, others, tokens, segment_ids, number)
    return tuple(np.asarray(rows)[: len(prompts)] for rows in results)


def generation_mesh(devices: Sequence[jax.Device], config: ModelConfig) -> Mesh:
    """The devices as (fsdp, expert). A model loaded onto this mesh is where generation needs it but for what it gathers."""
    experts = math.gcd(len(devices), getattr(config, "num_experts", 1)) if config.moe_layers else 1
    return Mesh(np.array(devices).reshape(-1, experts), AXES, axis_types=(AxisType.Auto,) * len(AXES))


_said: set[tuple] = set()
"""The programs that were said to be compiled, by all that their compilations depend on."""


def _say_if_it_compiles(program: tuple, parameters: nnx.State, tokens: np.ndarray, num_prompts: int) -> None:
    """Writes a line to a terminal where a call takes long only because it is the first of its kind."""
    key = *program, tokens.shape, *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(parameters))
    if key in _said:
        return
    _said.add(key)
    if sys.stderr.isatty() and is_first_process():
        prompts = "a prompt" if num_prompts == 1 else f"{num_prompts} prompts"
        print(f"compiling for {prompts} of at most {tokens.shape[1]} tokens ...", file=sys.stderr, flush=True)


@functools.cache
def _compiled(decode: Callable, options: tuple, mesh: Mesh) -> Callable:
    """The jitted program; under it jax keeps a compilation for each architecture and shape."""
    # Whole on every device, so that each process can read them.
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(program(decode, options, mesh), static_argnums=0, out_shardings=everywhere)


def program(decode: Callable, options: tuple, mesh: Mesh | AbstractMesh) -> Callable[..., tuple[Array, ...]]:
    """f(graph, parameters, other state, tokens, segment_ids, seed), of all prompts and devices."""
    devices = Devices(mesh.shape["expert"])

    def on_all(graph: nnx.GraphDef, parameters: nnx.State, others: nnx.State, *arguments) -> tuple[Array, ...]:
        dtype = nnx.merge(graph, parameters, others).dtype
        sharded = ShardedParameters.of(parameters, mesh, dtype=dtype, token_axes=AXES)

        def on_one(parameters, others, tokens, segment_ids, seed):
            model = nnx.merge(graph, sharded.gathered(parameters), vary_as(others, tokens))
            first = lax.axis_index(AXES) * len(tokens)
            return decode(*options, devices, model, tokens, segment_ids, row_keys(seed, first + jnp.arange(len(tokens))))

        rows, whole = PartitionSpec(AXES), PartitionSpec()
        in_specs = sharded.specs, whole, rows, rows, whole
        return jax.shard_map(on_one, mesh=mesh, in_specs=in_specs, out_specs=rows)(parameters, others, *arguments)

    return on_all


def row_keys(seed, rows) -> Key[Array, "batch"]:
    """A key for each row of a batch, of the seed and the row's number alone."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), rows)


def _devices_of(model: Decoder) -> list[jax.Device]:
    """Those that hold the parameters, in the order of their mesh."""
    sharding = getattr(jax.tree.leaves(nnx.state(model))[0], "sharding", None)
    if sharding is None:
        return jax.local_devices()[:1]
    if isinstance(sharding, NamedSharding):
        return sharding.mesh.devices.ravel().tolist()
    return sorted(sharding.device_set, key=lambda device: device.id)


def _placed(mesh: Mesh, array: Array, spec: PartitionSpec) -> Array:
    """The array on this mesh: a program of two meshes, whose axes cut the devices in ways that cross, XLA cannot compile."""
    there = NamedSharding(mesh, spec)
    sharding = getattr(array, "sharding", None)
    if sharding is not None and sharding.is_equivalent_to(there, array.ndim):
        # Where it is already; under the mesh's name without a copy.
        parts = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, there, parts)
    return jax.device_put(array, there)
