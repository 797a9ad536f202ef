"""Moves layers between arrays that are stacked for different pipelines, and takes single layers out of them."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Int

from moe_jax.parallel.layout import moving_spec, parameter_path
from moe_jax.parallel.pipeline.chunks import LayersInPipe, PipeShape, stacked_shape


def stacked_as(tree: Any, layers: LayersInPipe, pipe: PipeShape) -> Any:
    """Returns the shapes of `tree` (arrays or ShapeDtypeStructs under the parameters' paths) with layers stacked for `pipe`.

    Where the shape is another, each device holds a part of every layer (`layout.moving_spec`), ready for `restack`.
    """

    def of_leaf(key_path: tuple, leaf) -> jax.ShapeDtypeStruct:
        path, sharding = _path(key_path), leaf.sharding
        shape = stacked_shape(path, leaf.shape, layers, pipe)
        if shape != leaf.shape and isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, moving_spec(path, shape, sharding.mesh))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return jax.tree.map_with_path(of_leaf, tree)


def restack(tree: Any, like: Any, num_layers: int) -> Any:
    """Brings arrays of `stacked_as` into the shapes and layouts of `like`.

    One array moves after the other, layer by layer, and its memory is freed. Places without a layer are dropped, or filled with
    zeros.
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
        # A select has every layout. To change the layout of all layers at once, XLA may gather them on every device.
        layer = laid_out(jax.lax.dynamic_index_in_dim(layers, number, keepdims=False), axes)
        return laid_out(jnp.where(numbers == number, layer, moved), 0)

    return jax.lax.fori_loop(0, num_layers, put, laid_out(jnp.zeros(shape, array.dtype), 0))


def _path(key_path: tuple) -> tuple:
    """Returns the path of the parameter in a path of a state, which may begin with names of the state or the optimizer."""
    names = parameter_path(key_path)
    return names[names.index("stages") :] if "stages" in names else names
