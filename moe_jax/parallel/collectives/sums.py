"""Sums 16-bit contributions over devices, in f32 and in the devices' order."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from moe_jax.kernels.precision import at_least_f32


def sum_scatter(x: Array, mesh_axes: str | tuple[str, ...], axis: int) -> Array:
    """Returns this device's part, along `axis`, of the sum of all devices' x, in at least f32, inside `jax.shard_map`.

    It is a reduce-scatter written as an all-to-all, with the sum on the device that keeps the part. Contributions travel in
    x's dtype. A reduce-scatter in f32 would move the bytes of f32; one in x's dtype would round after every addition.
    """
    devices = lax.axis_size(mesh_axes)
    received = lax.all_to_all(x, mesh_axes, axis, axis, tiled=True)
    by_device = received.reshape(*x.shape[:axis], devices, x.shape[axis] // devices, *x.shape[axis + 1 :])
    return by_device.sum(axis=axis, dtype=at_least_f32(x.dtype))


def sum_to_all(x: Array, mesh_axes: str | tuple[str, ...]) -> Array:
    """Returns the sum of all devices' x on each device, rounded once to x's dtype, inside `jax.shard_map`.

    It is an all-reduce written as `sum_scatter` and an all-gather. Like an all-reduce it sends 2(n-1)/n of x's bytes out of
    each device.
    """
    flat = jnp.pad(x.reshape(-1), (0, -x.size % lax.axis_size(mesh_axes)))
    part = sum_scatter(flat, mesh_axes, 0).astype(x.dtype)
    return lax.all_gather(part, mesh_axes, tiled=True)[: x.size].reshape(x.shape)
