"""All-gather and reduce-scatter made of one transfer for each pair of devices (`parallel.collectives.hops`).

Peer-to-peer copies take no core from the kernels beside them; NCCL's kernels do. A gather writes the arrived parts once more,
to their position in the whole. Each collective is in two halves, so that a program can compute between sending and receiving.
"""

from functools import reduce

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from moe_jax.kernels.precision import at_least_f32
from moe_jax.kernels.varying import vary_as
from moe_jax.parallel.collectives.hops import hop


def send_part(part: Array, mesh_axes: tuple[str, ...]) -> list[Array]:
    """Sends this device's part to all devices, inside `jax.shard_map`.

    Returns the parts that arrive: its own, then the part of the device before it, and so on.
    """
    return [hop(part, mesh_axes, distance) for distance in range(lax.axis_size(mesh_axes))]


def join_parts(arrived: list[Array], mesh_axes: tuple[str, ...], axis: int) -> Array:
    """Joins the parts that `send_part` returned, along `axis` and in the devices' order."""
    devices, own = lax.axis_size(mesh_axes), lax.axis_index(mesh_axes)
    part = arrived[0]
    size = part.shape[axis]
    whole = vary_as(lax.empty((*part.shape[:axis], devices * size, *part.shape[axis + 1 :]), part.dtype), part)
    for distance, part in enumerate(arrived):
        whole = lax.dynamic_update_slice_in_dim(whole, part, (own - distance) % devices * size, axis)
    return whole


def send_contributions(x: Array, mesh_axes: tuple[str, ...], axis: int) -> list[Array]:
    """Sends each device the part of x, along `axis`, whose sum it keeps.

    Returns the devices' contributions to this device's part, in the order of `send_part`.
    """
    devices, own = lax.axis_size(mesh_axes), lax.axis_index(mesh_axes)
    size = x.shape[axis] // devices

    def contribution(distance: int) -> Array:
        return lax.dynamic_slice_in_dim(x, (own + distance) % devices * size, size, axis)

    return [hop(contribution(distance), mesh_axes, distance) for distance in range(devices)]


def add_contributions(arrived: list[Array]) -> Array:
    """Returns the sum of the contributions, in at least f32."""
    return reduce(jnp.add, (a.astype(at_least_f32(a.dtype)) for a in arrived))
