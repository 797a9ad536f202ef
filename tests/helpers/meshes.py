"""Meshes of some of the eight devices, models on them, and a comparison of values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

import moe_jax
from moe_jax.parallel.layout import parameter_path, parameter_sharding


def make_mesh(**sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def mesh_of(**sizes):
    """Returns the library's mesh, with all its axes, of the first devices."""
    return moe_jax.parallel.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


def laid_out(model, **sizes):
    """Lays the model out on a mesh of the first devices, as `from_pretrained(mesh=)` does."""
    graph, state = nnx.split(model)
    mesh = mesh_of(**sizes)

    def put(path, leaf):
        return jax.device_put(leaf, parameter_sharding(parameter_path(path), leaf.shape, mesh))

    return nnx.merge(graph, jax.tree.map_with_path(put, state))


def value_and_gradients(f, arrays, direction, *others):
    """Returns ((result, gradients to `arrays` of its projection on `direction`), aside); f returns (result, aside)."""

    def loss(*arrays):
        y, aside = f(*arrays, *others)
        return jnp.sum(y.astype(jnp.float32) * direction), (y, aside)

    gradients, (y, aside) = jax.grad(loss, argnums=tuple(range(len(arrays))), has_aux=True)(*arrays)
    return (y, *gradients), aside


def relative_error(actual, expected) -> float:
    """Returns the relative error in the Frobenius norm; the absolute error if `expected` is zero."""
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    return np.linalg.norm(actual - expected) / (np.linalg.norm(expected) or 1)
