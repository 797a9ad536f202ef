"""Meshes of some of the eight devices, and a comparison of values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType


def make_mesh(**sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def value_and_gradients(f, arrays, direction, *others):
    """f's result, and gradients to `arrays` of its projection on `direction`; f returns (result, something to look at)."""

    def loss(*arrays):
        y, aside = f(*arrays, *others)
        return jnp.sum(y.astype(jnp.float32) * direction), (y, aside)

    gradients, (y, aside) = jax.grad(loss, argnums=tuple(range(len(arrays))), has_aux=True)(*arrays)
    return (y, *gradients), aside


def relative_error(actual, expected) -> float:
    """In the Frobenius norm; the absolute error where nothing is expected."""
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    return np.linalg.norm(actual - expected) / (np.linalg.norm(expected) or 1)
