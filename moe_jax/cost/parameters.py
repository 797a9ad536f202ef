"""A model's parameter arrays as they lie on a mesh: their share of each device, and what is gathered for use.

On a mesh with a pipe, the layers of one stage (`piped_stage`) are dealt out to the ranks. All other parameters are split over
`pipe` as over `fsdp`.
"""

import functools
import math
from dataclasses import dataclass, replace

import jax
from flax import nnx
from jax.sharding import AbstractMesh

from moe_jax.config import ModelConfig
from moe_jax.models.auto import from_config
from moe_jax.parallel.choices import MESH_AXES, MeshShape
from moe_jax.parallel.layout import data_axis, gathered_axes, parameter_path, parameter_spec


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

    @property
    def in_stage(self) -> bool:
        """True if the array belongs to a layer."""
        return self.path[0] == "stages"


@functools.cache
def piped_stage(config: ModelConfig) -> int:
    """Returns the number of the stage whose layers a pipe computes: the longest of `config.stages`, the first of equals."""
    lengths = [stage.num_layers for stage in config.stages]
    return lengths.index(max(lengths))


@functools.cache
def num_piped_layers(config: ModelConfig) -> int:
    """Returns the layers that a pipe computes."""
    return config.stages[piped_stage(config)].num_layers


def layers_of_chunk(config: ModelConfig, ranks: int, chunks: int) -> int:
    """Returns the layers of one chunk of a pipe. The last chunks may have places without a layer."""
    return math.ceil(num_piped_layers(config) / (ranks * chunks))


@functools.cache
def parameters(config: ModelConfig, mesh: MeshShape, chunks: int) -> tuple[Parameter, ...]:
    """Returns the model's parameter arrays and how `parallel.layout` splits each of them.

    Args:
      config: the model.
      mesh: its axes.
      chunks: chunks of layers on each rank of a pipe; 1 without a pipe.
    """
    whole = replace(mesh, pipe=1)
    if mesh.pipe == 1:
        return tuple(_parameter(path, shape, whole) for path, shape in _shapes(config))
    as_fsdp, stage = replace(whole, fsdp=mesh.pipe * mesh.fsdp), piped_stage(config)
    found = []
    for path, shape in _shapes(config):
        if path[:2] == ("stages", stage):
            own_layers = chunks * layers_of_chunk(config, mesh.pipe, chunks)
            parameter = _parameter(path, (own_layers, *shape[1:]), whole)
            found.append(replace(parameter, split_axes=("pipe", *parameter.split_axes)))
        else:
            parameter = _parameter(path, shape, as_fsdp)
            split, gathered = _over_pipe_too(parameter.split_axes), _over_pipe_too(parameter.gather_axes)
            found.append(replace(parameter, split_axes=split, gather_axes=gathered, by_layer=False))
    return tuple(found)


def _parameter(path: tuple, shape: tuple[int, ...], mesh: MeshShape) -> Parameter:
    abstract = AbstractMesh(tuple(getattr(mesh, name) for name in MESH_AXES), MESH_AXES)
    ways = tuple(name for names in parameter_spec(path, shape, abstract) if names for name in _as_tuple(names))
    gathered = tuple(name for _, names in gathered_axes(path, shape, abstract) for name in names)
    own = math.prod(shape) // math.prod(getattr(mesh, name) for name in ways)
    used = own * math.prod(getattr(mesh, name) for name in gathered)
    part = own // (1 if data_axis(path, shape, abstract) is None else mesh.data)
    in_stage = path[0] == "stages"
    return Parameter(path, shape[0] if in_stage else 1, own, part, ways, gathered, used, by_layer=in_stage)


@functools.cache
def _shapes(config: ModelConfig) -> tuple[tuple[tuple, tuple[int, ...]], ...]:
    model = nnx.eval_shape(lambda: from_config(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves_with_path(nnx.state(model, nnx.Param))
    return tuple((parameter_path(path), leaf.shape) for path, leaf in leaves)


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _over_pipe_too(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes with `pipe` before `fsdp`."""
    return tuple(both for name in names for both in (("pipe", "fsdp") if name == "fsdp" else (name,)))
