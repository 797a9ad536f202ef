"""Defines how each parameter is split over the devices, from its declaration (`layers.matrices`).

Every matrix is split over each mesh axis except `data`. A dense matrix is split over `fsdp`, `expert` and `context`. Experts
are split over `expert` first (and never gathered along it), then over the other axes. The layers of a pipeline are stacked
along three axes, [chunks, ranks, layers of a chunk], and `pipe` splits the second (`parallel.pipeline.chunks`). Matrices
outside the pipeline are split over `pipe` last. Mesh axes split the first of the matrix's own axes; if they do not divide it,
they split the next. Norms, biases and routers are replicated, and so are matrices without an axis that can be split.
A frozen matrix has the layout of a trained one. Adapters of experts are split like experts; other adapters are replicated.

A parameter's moments and master have the parameter's layout. With ZeRO, stage 1, `data` splits them too (`optimizer_spec`).

Outside `shard_map` XLA inserts the collectives that a computation needs. Inside it `parallel.fsdp` gathers the axes of
`gathered_axes`.
"""

import math

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from moe_jax.layers.matrices import Declaration, declaration_of


def mesh_of(parameters) -> Mesh | None:
    """Returns the mesh of a pytree of arrays; None if they are on one device or traced."""
    # A traced array has no attribute `sharding`.
    mesh = getattr(getattr(jax.tree.leaves(parameters)[0], "sharding", None), "mesh", None)
    return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None


def parameter_sharding(path: tuple, shape: tuple[int, ...], mesh: Mesh | None) -> Sharding:
    """Returns the `Sharding` of the parameter at `path` (as in `nnx.to_flat_state`) with this global shape.

    Without a mesh it is on the default device.

    Raises:
      ValueError: a mesh with Explicit axes, over which XLA inserts no collectives.
    """
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    if AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            f"the mesh's axes {', '.join(mesh.axis_names)} must all be AxisType.Auto, as moe_jax.parallel.make_mesh makes "
            "them; jax.make_mesh makes Explicit axes unless axis_types is given"
        )
    return NamedSharding(mesh, parameter_spec(path, shape, mesh))


def parameter_spec(path: tuple, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the PartitionSpec entry (mesh axes or None) for each axis of the parameter."""
    splits = _splits(path, shape, mesh)
    return PartitionSpec(*(splits.get(axis) for axis in range(len(shape))))


def part_shape(path: tuple, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> tuple[int, ...]:
    """Returns the shape of each device's shard of the parameter."""
    splits = _splits(path, shape, mesh)
    return tuple(size // math.prod(mesh.shape[name] for name in splits.get(axis, ())) for axis, size in enumerate(shape))


def optimizer_spec(path: tuple, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the PartitionSpec of a parameter's moments and master under ZeRO-1: `parameter_spec` plus `data` on one axis.

    An array without a `data_axis` keeps `parameter_spec`.
    """
    splits, split_by_data = _splits(path, shape, mesh), data_axis(path, shape, mesh)
    if split_by_data is not None:
        splits[split_by_data] = (*splits.get(split_by_data, ()), "data")
    return PartitionSpec(*(splits.get(axis) for axis in range(len(shape))))


def moving_spec(path: tuple, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns a PartitionSpec with a part of every layer on each device, for moving layers between ranks.

    All mesh axes split a matrix's own axes, `parameter_spec`'s first, and none splits an axis of layers.
    """
    matrix = declaration_of(path, shape)
    splits = _split_own_axes(matrix, shape, mesh, (*matrix.split, "pipe", "data"), {})
    return PartitionSpec(*(splits.get(axis) for axis in range(len(shape))))


def data_axis(path: tuple, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> int | None:
    """Returns the first array axis that `data` can split in addition to the parameter's own sharding; None if there is none.

    The axis of layers comes first. Its parts are contiguous, so that collectives along it need no transposed copy.
    """
    ways, splits = mesh.shape.get("data", 1), _splits(path, shape, mesh)
    for axis, size in enumerate(shape) if ways > 1 else ():
        if size % (ways * math.prod(mesh.shape[name] for name in splits.get(axis, ()))) == 0:
            return axis
    return None


def parameter_path(key_path: tuple) -> tuple:
    """Converts a key path of `jax.tree.leaves_with_path` to a path of names, as in `nnx.to_flat_state`."""
    return tuple(part.key for part in key_path if hasattr(part, "key"))


def gathered_axes(path: tuple, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Returns pairs (array axis, mesh axes) to all-gather before use: all split axes except the axes of experts and layers.

    Axes are negative: the last is -1.
    """
    kept = {"expert"} if declaration_of(path, shape).axes == 3 else set()
    if lies_in_chunks(path, shape):
        kept.add("pipe")
    pairs = (
        (axis - len(shape), tuple(name for name in names if name not in kept))
        for axis, names in _splits(path, shape, mesh).items()
    )  # fmt: skip
    return tuple((axis, names) for axis, names in pairs if names)


def lies_in_chunks(path: tuple, shape: tuple[int, ...]) -> bool:
    """Returns True if the parameter is stacked for a pipeline, [chunks, ranks, layers of a chunk, ...]."""
    return path[0] == "stages" and len(shape) == 3 + declaration_of(path, shape).axes


def _splits(path: tuple, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> dict[int, tuple[str, ...]]:
    """Returns the mesh axes that split each axis of the parameter, the slowest first."""
    matrix = declaration_of(path, shape)
    if mesh.shape.get("pipe", 1) > 1 and lies_in_chunks(path, shape):
        return _split_own_axes(matrix, shape, mesh, matrix.split, {1: ("pipe",)})
    # Axes that are gathered together are in mesh order, as peer-to-peer copies require.
    first = matrix.split[: matrix.axes == 3]
    return _split_own_axes(matrix, shape, mesh, (*first, "pipe", *matrix.split[len(first) :]), {})


def _split_own_axes(
    matrix: Declaration,
    shape: tuple[int, ...],
    mesh: Mesh | AbstractMesh,
    names: tuple[str, ...],
    splits: dict[int, tuple[str, ...]],
) -> dict[int, tuple[str, ...]]:
    """Returns `splits` with the mesh axes `names` added, each to the first of the matrix's own axes that it divides."""
    first_own = len(shape) - matrix.axes
    for name in names if matrix.split else ():
        ways = mesh.shape.get(name, 1)
        # `expert` splits an expert matrix only along the axis of experts: parts of an expert would have to be gathered.
        choices = 1 if name == "expert" and matrix.axes == 3 else matrix.axes
        for axis in range(first_own, first_own + choices) if ways > 1 else ():
            before = splits.get(axis, ())
            if shape[axis] % (ways * math.prod(mesh.shape[other] for other in before)) == 0:
                splits = splits | {axis: (*before, name)}
                break
    return splits
