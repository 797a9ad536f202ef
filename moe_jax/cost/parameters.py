"""A model's parameter arrays on a mesh: each device's share, the arrays gathered for use, and bytes per element.

On a mesh with a pipe, the layers of one stage (`dealt_out`) are split over the ranks. All other parameters are split over
`pipe` as over `fsdp`. docs/fp8.md lists where FP8 copies are made.
"""

import functools
import math
from typing import Literal, NamedTuple

from flax import nnx
from jax.sharding import AbstractMesh

from moe_jax.config import ModelConfig
from moe_jax.kernels.experts.fp8.quantise import GROUP
from moe_jax.layers.moe import EXPERT_MATRICES
from moe_jax.layers.quantised import NF4_BLOCK
from moe_jax.models.auto import abstract_parameters
from moe_jax.models.layers_in_pipe import layers_in_pipe
from moe_jax.parallel.choices import MESH_AXES, MeshShape
from moe_jax.parallel.fsdp import can_travel_in_fp8
from moe_jax.parallel.layout import data_axis, gathered_axes, parameter_spec
from moe_jax.parallel.pipeline.chunks import LayersInPipe, PipeShape, is_dealt_out, stacked_shape

BYTES = {"bfloat16": 2, "float32": 4}

ELEMENT = 2
"""Bytes per element of an operand."""

SCALE = 4
"""Bytes of a scale."""

FP8_ELEMENT = 1 + SCALE / GROUP**2
"""Bytes per element of a matrix in FP8."""

FP8_ROW_ELEMENT = 1 + SCALE / GROUP
"""Bytes per element of a row in FP8."""

MadeInFp8 = Literal["once", "pass", "arrives", "frozen"]
"""How experts that multiply in FP8 get their matrices. "once": each device has the whole weights, and copies them once a step.
"pass": each pass rounds them. "arrives": each device rounds its part before the gather. "frozen": they are stored in FP8. A
backward pass transposes matrices that arrive or are frozen."""


class Parameter(NamedTuple):
    """One parameter array of the model, and the shard of it on each device."""

    path: tuple
    layers: int
    """Layers stacked in the array, with a pipe the layers of one rank; 1 outside stages."""
    own_size: int
    """Elements that a device stores."""
    updated_size: int
    """Number of elements that a device updates, with moments and masters: fewer if `data` splits the optimizer's state."""
    split_axes: tuple[str, ...]
    """The mesh axes that split the array. Over all other axes its gradients are summed once a step."""
    gather_axes: tuple[str, ...]
    """The mesh axes over which the array is gathered for use."""
    used_size: int
    """Elements that a device has after the gather."""
    by_layer: bool
    """True if one layer is gathered at a time, one layer ahead of its use; False if the array is gathered once."""
    adds_in_kernel: bool
    """True if kernels add its gradients to the sums of micro-batches: for experts read in place, on one device or in a pipe."""
    fp8: MadeInFp8 | None
    quantised: float | None
    """Bytes per element of a quantised matrix (`layers.quantised`); None if it is not quantised."""

    @property
    def in_stage(self) -> bool:
        """True if the array belongs to a decoder layer, not to the embedding, final norm or head."""
        return self.path[0] == "stages"

    def whole_size(self, mesh: MeshShape) -> int:
        """Returns the elements of the array's parts on all devices of a mesh."""
        return self.own_size * math.prod(getattr(mesh, axis) for axis in self.split_axes)

    @property
    def travelling_bytes(self) -> float:
        """Bytes per element during an all-gather of the parameter."""
        return self.quantised or (FP8_ELEMENT if self.fp8 == "arrives" else ELEMENT)


def abstract_mesh(mesh: MeshShape) -> AbstractMesh:
    """Returns a mesh of this shape without devices."""
    return AbstractMesh(tuple(getattr(mesh, name) for name in MESH_AXES), MESH_AXES)


@functools.cache
def dealt_out(config: ModelConfig) -> LayersInPipe:
    """Returns the layers that pipeline parallelism splits over ranks."""
    return layers_in_pipe(config, PipeShape())


@functools.cache
def parameters(
    config: ModelConfig, mesh: MeshShape, chunks: int, *, shard_optimizer: bool, in_fp8: bool, frozen: str | None
) -> tuple[Parameter, ...]:
    """Returns the model's parameter arrays, with the shard of each that `parallel.layout` assigns to a device.

    Args:
      config: the model.
      mesh: its axes.
      chunks: chunks of layers on each rank of a pipe; 1 without a pipe.
      shard_optimizer: `data` splits the optimizer's state.
      in_fp8: experts multiply in FP8.
      frozen: the form of weights that adapters leave frozen (`models.precision.Weights`); None if all weights are trained.
    """
    abstract, dealt, pipe = abstract_mesh(mesh), dealt_out(config), PipeShape(mesh.pipe, chunks)
    stacked = {path: stacked_shape(path, shape, dealt, pipe) for path, shape in shapes(config)}
    # FP8 needs whole blocks on each device, of both matrices of a stage.
    cut = {path[1] for path, shape in stacked.items() if _of_experts(path) and not can_travel_in_fp8(path, shape, abstract)}
    is_whole = mesh.size == mesh.data * mesh.pipe
    found = []
    for path, shape in stacked.items():
        ways = tuple(name for names in parameter_spec(path, shape, abstract) for name in _as_tuple(names))
        gathered = tuple(name for _, names in gathered_axes(path, shape, abstract) for name in names)
        own = math.prod(shape) // math.prod(getattr(mesh, name) for name in ways)
        is_split = shard_optimizer and data_axis(path, shape, abstract) is not None
        in_pipe, in_stage = mesh.pipe > 1 and is_dealt_out(path, dealt.stage), path[0] == "stages"
        by_layer = in_pipe or (in_stage and mesh.pipe == 1)
        fp8: MadeInFp8 | None = None
        if in_fp8 and _of_experts(path):
            fp8 = "frozen" if frozen else "once" if by_layer and is_whole else "pass" if path[1] in cut else "arrives"
        found.append(
            Parameter(
                path=path,
                layers=shape[0] * shape[2] if in_pipe else shape[0] if in_stage else 1,
                own_size=own,
                updated_size=own // mesh.data if is_split else own,
                split_axes=ways,
                gather_axes=gathered,
                used_size=own * math.prod(getattr(mesh, name) for name in gathered),
                by_layer=by_layer,
                adds_in_kernel="experts" in path and not gathered and (mesh.size == 1 or (mesh.pipe > 1 and by_layer)),
                fp8=fp8,
                quantised=_quantised(path, frozen),
            )
        )
    return tuple(found)


@functools.cache
def shapes(config: ModelConfig) -> tuple[tuple[tuple, tuple[int, ...]], ...]:
    """Returns the path and shape of every trained parameter; layers of a stage are stacked along a leading axis."""
    return tuple((path, leaf.shape) for path, leaf in abstract_parameters(config).items() if isinstance(leaf, nnx.Param))


def _of_experts(path: tuple) -> bool:
    return path[-1] in EXPERT_MATRICES


def _quantised(path: tuple, frozen: str | None) -> float | None:
    """Returns `Parameter.quantised`. "as stored" is FP8 in blocks, as on the hub: all projections of all layers."""
    if frozen == "nf4" and _of_experts(path):
        return 1 / 2 + SCALE / NF4_BLOCK
    is_projection = path[0] == "stages" and any(str(part).endswith("_proj") for part in path)
    is_fp8 = (frozen == "fp8" and _of_experts(path)) or (frozen == "as stored" and is_projection)
    return FP8_ELEMENT if is_fp8 else None


def _as_tuple(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names or ()
