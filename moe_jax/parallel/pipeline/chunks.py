"""The layers of a pipeline: [layers, ...] becomes [chunks, ranks, layers of a chunk, ...]; `pipe` splits the second axis.

Rank r of p holds chunk c, the layers (c p + r) l to (c p + r) l + l - 1. The order of the layers does not change, so this is a
reshape. If v p l exceeds the model's number of layers, the last are zeros. A layer of zeros adds nothing to the residual stream
and gets no gradients.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Int

from moe_jax.parallel.layout import lies_in_chunks, moving_spec, parameter_path, parameter_sharding


class PipeShape(NamedTuple):
    """The number of ranks of a pipeline and of chunks per rank. One rank means no pipeline."""

    ranks: int = 1
    chunks: int = 1


class LayersInPipe(NamedTuple):
    """The one stage of layers that a pipeline splits over ranks; other layers are sharded as without a pipeline."""

    stage: int
    num_layers: int


def to_chunks(params: nnx.State, mesh: Mesh, chunks: int = 1) -> nnx.State:
    """Reshapes and shards a model's parameters for pipelining over the mesh axis `pipe`, one array at a time.

        nnx.update(model, to_chunks(nnx.state(model), mesh, chunks=2))
        state = train.init_state(model, optimizer)

    Biases of experts stay whole on every device, in the order of the layers. Afterwards the model can only be trained and
    saved. `from_pretrained(mesh=, pipe_chunks=)` loads a model in this layout directly, so that no device ever holds all
    layers.

    Args:
      params: `nnx.state(model)`. For DeepSeek-V3 the layers with experts are split into chunks, and the rest is laid out as on
        any mesh.
      mesh: a mesh of `make_mesh`.
      chunks: `Parallelism.pipe_chunks`.

    Raises:
      ValueError: layers with experts before dense ones, a chunk without layers on any rank, or layers already in chunks.
    """
    refuse_chunks(params, "to_chunks")
    pipe, stage = PipeShape(mesh.shape["pipe"], chunks), stage_in_pipe(params["stages"])
    check_layers(jax.tree.leaves(params["stages"][stage])[0].shape[0], pipe)

    def lay_out(key_path: tuple, array: Array) -> Array:
        path = parameter_path(key_path)
        if is_dealt_out(path, stage):
            array = split_layers(array, *pipe)
        return jax.device_put(array, parameter_sharding(path, array.shape, mesh))

    return jax.tree.map_with_path(lay_out, params)


def from_chunks(params: nnx.State, num_layers: int, mesh: Mesh | None = None) -> nnx.State:
    """Inverts `to_chunks`: returns parameters with one axis of layers, on another mesh or the default device (None).

    Args:
      num_layers: the number of layers in chunks, excluding dense layers before and MTP modules after them.
    """

    def lay_out(key_path: tuple, array: Array) -> Array:
        path = parameter_path(key_path)
        if lies_in_chunks(path, array.shape):
            array = join_layers(array, num_layers)
        return jax.device_put(array, parameter_sharding(path, array.shape, mesh))

    return jax.tree.map_with_path(lay_out, params)


def pipe_of(mesh: Mesh | None, chunks: int) -> PipeShape:
    """Returns the `PipeShape` of a mesh with `chunks` chunks per rank.

    Raises:
      ValueError: less than one chunk, or several chunks without several devices along `pipe`.
    """
    ranks = 1 if mesh is None else mesh.shape.get("pipe", 1)
    if chunks < 1 or (chunks > 1 and ranks == 1):
        raise ValueError(
            f"pipe_chunks must be at least 1, and 1 where the mesh axis pipe has one device; got {chunks} with pipe={ranks}"
        )
    return PipeShape(ranks, chunks)


def pipe_of_model(params: nnx.State, mesh: Mesh | None) -> PipeShape:
    """Returns the `PipeShape` that a model's parameters on `mesh` are stacked for.

    Raises:
      ValueError: the mesh has several devices along `pipe`, but the layers are not in chunks.
    """
    ranks = 1 if mesh is None else mesh.shape.get("pipe", 1)
    if ranks == 1:
        return PipeShape()
    stage = stage_in_pipe(params["stages"])
    for key_path, array in jax.tree.leaves_with_path(params):
        path = parameter_path(key_path)
        if is_dealt_out(path, stage) and not lies_in_chunks(path, array.shape):
            raise ValueError(
                f"the mesh has pipe={ranks}, and the model's layers are not split into chunks: load it with "
                "from_pretrained(mesh=, pipe_chunks=), or lay it out with parallel.pipeline.chunks.to_chunks"
            )
    return PipeShape(ranks, jax.tree.leaves(params["stages"][stage])[0].shape[0])


def check_layers(num_layers: int, pipe: PipeShape) -> None:
    """Checks that every chunk of a pipeline has at least one layer on some rank; passes without a pipeline.

    Raises:
      ValueError: a chunk without layers on any rank.
    """
    if pipe.ranks > 1 and not fills_chunks(num_layers, *pipe):
        raise ValueError(
            f"{num_layers} layers do not reach the last of {pipe.chunks} chunks on pipe={pipe.ranks} ranks; use fewer chunks"
        )


def stacked_shape(path: tuple, shape: tuple[int, ...], layers: LayersInPipe, pipe: PipeShape) -> tuple[int, ...]:
    """Returns the shape of a parameter, or of its moment, when stacked for `pipe`.

    Args:
      path: as in `nnx.to_flat_state`; () for another array of the optimizer's.
      shape: in any pipeline, or in none.
    """
    if not is_dealt_out(path, layers.stage):
        return shape
    in_chunks = lies_in_chunks(path, shape)
    own = shape[3:] if in_chunks else shape[1:]
    if pipe.ranks == 1:
        return (layers.num_layers, *own) if in_chunks else shape
    return (pipe.chunks, pipe.ranks, layers_of_chunk(layers.num_layers, *pipe), *own)


def is_dealt_out(path: tuple, stage: int) -> bool:
    """Returns True if the parameter is split over pipeline ranks. Expert biases stay replicated."""
    return path[:2] == ("stages", stage) and path[-1] != "expert_bias"


def stage_in_pipe(stages: Any) -> int:
    """Returns the index of the stage that a pipeline splits: the last one before MTP modules.

    Args:
      stages: the parameters of all stages, by number.

    Raises:
      ValueError: layers with experts precede that stage.
    """
    *before, last = [number for number in sorted(stages) if "eh_proj" not in stages[number]]
    if any("experts" in path for number in before for path, _ in nnx.to_flat_state(stages[number])):
        raise ValueError(
            f"a pipeline deals out a model's last layers of one kind, with dense layers alone before them; this model has "
            f"{len(before) + 1} runs of layers, and experts before the last"
        )
    return last


def refuse_chunks(params: Any, work: str) -> None:
    """Raises if parameters are stacked for a pipeline, for `work` that needs one axis of layers.

    Raises:
      ValueError: the message names the work, a parameter's shape, and the remedy.
    """
    for key_path, array in jax.tree.leaves_with_path(params):
        if parameter_path(key_path)[-2:] == ("input_layernorm", "weight") and array.ndim == 4:
            raise ValueError(
                f"{work} needs a model's layers along one axis, and these are split into a pipeline's chunks: a norm's weights "
                f"have the shape {list(array.shape)} (chunks, ranks, layers of a chunk, hidden). Bring them back first: "
                "nnx.update(model, parallel.pipeline.chunks.from_chunks(nnx.state(model), num_layers))"
            )


def layers_of_chunk(num_layers: int, ranks: int, chunks: int) -> int:
    """Returns the number of layers per chunk, ceil(num_layers / (ranks * chunks))."""
    return -(-num_layers // (ranks * chunks))


def fills_chunks(num_layers: int, ranks: int, chunks: int) -> bool:
    """Returns True if some rank has a layer in its last chunk."""
    return (chunks - 1) * ranks * layers_of_chunk(num_layers, ranks, chunks) < num_layers


def split_layers(stacked: Array, ranks: int, chunks: int) -> Array:
    """Reshapes [layers, ...] to [chunks, ranks, layers of a chunk, ...], zero-padded."""
    of_chunk = layers_of_chunk(stacked.shape[0], ranks, chunks)
    missing = ranks * chunks * of_chunk - stacked.shape[0]
    filled = jnp.pad(stacked, [(0, missing), *[(0, 0)] * (stacked.ndim - 1)]) if missing else stacked
    return filled.reshape(chunks, ranks, of_chunk, *stacked.shape[1:])


def join_layers(split: Array, num_layers: int) -> Array:
    """Reshapes [chunks, ranks, layers of a chunk, ...] to [layers, ...], without padding."""
    return split.reshape(-1, *split.shape[3:])[:num_layers]


def stacked_as(tree: Any, layers: LayersInPipe, pipe: PipeShape) -> Any:
    """Returns the shapes of `tree` (arrays or ShapeDtypeStructs by parameter path) with layers stacked for `pipe`.

    Arrays whose shape changes get a layout with a part of every layer on each device (`layout.moving_spec`), for `restack`.
    """

    def of_leaf(key_path: tuple, leaf) -> jax.ShapeDtypeStruct:
        path, sharding = _path(key_path), leaf.sharding
        shape = stacked_shape(path, leaf.shape, layers, pipe)
        if shape != leaf.shape and isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, moving_spec(path, shape, sharding.mesh))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return jax.tree.map_with_path(of_leaf, tree)


def restack(tree: Any, like: Any, num_layers: int) -> Any:
    """Converts arrays with the shapes of `stacked_as` to the shapes and shardings of `like`.

    Arrays are converted one by one, layer by layer, and their memory is freed. Padding is dropped, or filled with zeros.
    """

    def of_leaf(array: Array, leaf) -> Array:
        if array.shape == leaf.shape:
            return array
        moved = jax.block_until_ready(_restack(array, num_layers, leaf.shape, leaf.sharding))
        array.delete()
        return moved

    return jax.tree.map(of_leaf, tree, like)


@jax.jit
def take_layer(stacked: Array, layer: Int[Array, ""]) -> Array:
    """Returns one layer of an array [chunks, ranks, layers of a chunk, ...], bit for bit, on the devices of all ranks.

    No device gets another rank's other layers: the rank that holds the layer sends it to all.
    """
    _, ranks, of_chunk = stacked.shape[:3]
    chunk, rank, row = layer // (ranks * of_chunk), layer // of_chunk % ranks, layer % of_chunk
    of_ranks = jax.lax.dynamic_index_in_dim(stacked, chunk, 0, keepdims=False)
    of_ranks = jax.lax.dynamic_index_in_dim(of_ranks, row, 1, keepdims=False)
    # Bits are summed: as a float, -0.0 + 0 is +0.0. Sums keep the dtype, so that a layer of 16 bits travels as 16 bits.
    bits = jax.lax.bitcast_convert_type(of_ranks, jnp.dtype(f"uint{8 * stacked.dtype.itemsize}"))
    here = (jnp.arange(ranks) == rank).reshape(-1, *[1] * (bits.ndim - 1))
    return jax.lax.bitcast_convert_type(jnp.where(here, bits, 0).sum(0, dtype=bits.dtype), stacked.dtype)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _restack(array: Array, num_layers: int, shape: tuple[int, ...], sharding: Sharding) -> Array:
    """Returns the array in another shape: the first axes, 1 or 3, number the layers in both."""
    # Shapes differ: one has a single axis of layers, or both have three.
    axes = 1 if len(shape) < array.ndim else 3
    own = shape[axes:]
    layers = array.reshape(-1, *own)
    numbers = jnp.arange(math.prod(shape[:axes])).reshape(*shape[:axes], *[1] * len(own))

    def laid_out(x: Array, first: int) -> Array:
        if not isinstance(sharding, NamedSharding):
            return x
        spec = PartitionSpec(*(*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))[first:])
        return jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, spec))

    def put(number, moved: Array) -> Array:
        # A select supports every layout. Changing the layout of all layers at once, XLA may gather them on every device.
        layer = laid_out(jax.lax.dynamic_index_in_dim(layers, number, keepdims=False), axes)
        return laid_out(jnp.where(numbers == number, layer, moved), 0)

    return jax.lax.fori_loop(0, num_layers, put, laid_out(jnp.zeros(shape, array.dtype), 0))


def _path(key_path: tuple) -> tuple:
    """Returns the path of the parameter in a path of a state, which may begin with names of the state or the optimizer."""
    names = parameter_path(key_path)
    return names[names.index("stages") :] if "stages" in names else names
