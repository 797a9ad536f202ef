"""A model's parameter arrays as they lie on a mesh: their share of each device, and what is gathered for use.

On a mesh with a pipe, the layers of one stage (`piped_stage`) are dealt out to the ranks. All other parameters are split over
`pipe` as over `fsdp`.
"""

import functools
import math
from dataclasses import dataclass

from flax import nnx
from jax.sharding import AbstractMesh

from moe_jax.config import ModelConfig
from moe_jax.layers.matrices import declaration_of
from moe_jax.models.auto import abstract_parameters
from moe_jax.parallel.choices import MESH_AXES, MeshShape
from moe_jax.parallel.fsdp import can_travel_in_fp8
from moe_jax.parallel.layout import data_axis, gathered_axes, parameter_spec
from moe_jax.parallel.pipeline.chunks import layers_of_chunk


@dataclass(frozen=True)
class Parameter:
    """One parameter array of the model, and its share on each device."""

    path: tuple
    layers: int
    """Layers stacked in the array, with a pipe those of one rank; 1 outside stages."""
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
    by_layer: bool
    """True if one layer is gathered at a time, one layer ahead of its use; False if the array is gathered once."""
    can_travel_in_fp8: bool
    """True for gathered matrices of experts of which each device keeps whole blocks, as FP8 needs."""

    @property
    def in_stage(self) -> bool:
        """True if the array belongs to a layer."""
        return self.path[0] == "stages"


@functools.cache
def piped_stage(config: ModelConfig) -> int:
    """Returns the number of the stage whose layers a pipe computes: the last of `config.stages`."""
    return len(config.stages) - 1


@functools.cache
def num_piped_layers(config: ModelConfig) -> int:
    """Returns the layers that a pipe deals out, counted as repeats of a stage's body."""
    return config.stages[piped_stage(config)].repeats


@functools.cache
def operand_elements(config: ModelConfig) -> int:
    """Returns the elements for one token of the operands of all weight gradients of a layer in a pipe (`layers.tickets`)."""
    elements = 0
    for path, shape in shapes(config):
        matrix = declaration_of(path, shape)
        if path[:2] != ("stages", piped_stage(config)) or matrix.axes == 1:
            continue
        if matrix.role == "experts":
            # One side of each product has a row for each choice, the other a row for each token.
            per_choice = shape[-2] if path[-1].startswith("gate_up") else shape[-1]
            assert config.experts is not None
            elements += config.experts.num_experts_per_tok * per_choice + config.hidden_size
        else:
            elements += shape[-2] + shape[-1]
    return elements


@functools.cache
def parameters(config: ModelConfig, mesh: MeshShape, chunks: int) -> tuple[Parameter, ...]:
    """Returns the model's parameter arrays and how `parallel.layout` splits each of them.

    Args:
      config: the model.
      mesh: its axes.
      chunks: chunks of layers on each rank of a pipe; 1 without a pipe.
    """
    stage, found = piped_stage(config), []
    abstract = AbstractMesh(tuple(getattr(mesh, name) for name in MESH_AXES), MESH_AXES)
    for path, shape in shapes(config):
        layers = shape[0] if path[0] == "stages" else 1
        in_pipe = mesh.pipe > 1 and path[:2] == ("stages", stage)
        if in_pipe:
            of_chunk = layers_of_chunk(layers, mesh.pipe, chunks)
            layers, shape = chunks * of_chunk, (chunks, mesh.pipe, of_chunk, *shape[1:])
        ways = tuple(name for names in parameter_spec(path, shape, abstract) for name in _as_tuple(names))
        gathered = tuple(name for _, names in gathered_axes(path, shape, abstract) for name in names)
        own = math.prod(shape) // math.prod(getattr(mesh, name) for name in ways)
        used = own * math.prod(getattr(mesh, name) for name in gathered)
        part = own // (1 if data_axis(path, shape, abstract) is None else mesh.data)
        by_layer = in_pipe or (path[0] == "stages" and mesh.pipe == 1)
        found.append(
            Parameter(path, layers, own, part, ways, gathered, used, by_layer, can_travel_in_fp8(path, shape, abstract))
        )
    return tuple(found)


@functools.cache
def shapes(config: ModelConfig) -> tuple[tuple[tuple, tuple[int, ...]], ...]:
    """Returns the path and the shape of every trained parameter of the model; layers of a stage are stacked."""
    return tuple((path, leaf.shape) for path, leaf in abstract_parameters(config).items() if isinstance(leaf, nnx.Param))


def _as_tuple(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names or ()
