"""All-gather and reduce-scatter made of hops, from each device straight to each other (`parallel.hops`).

As copies they take no core from what computes beside them, where NCCL's kernels do. A gather writes what arrives once more,
into its place in the whole. Each is in two halves, so that a program can compute between sending and receiving.
"""

from functools import reduce

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from moe_jax.kernels.precision import at_least_f32
from moe_jax.kernels.varying import vary_as
from moe_jax.parallel.collectives.hops import hop


def send_part(part: Array, mesh_axes: tuple[str, ...]) -> list[Array]:
    """What this device gets of each device's part: its own, then from the one before it, and so on; inside `jax.shard_map`."""
    return [hop(part, mesh_axes, distance) for distance in range(lax.axis_size(mesh_axes))]


def join_parts(arrived: list[Array], mesh_axes: tuple[str, ...], axis: int) -> Array:
    """The whole of what `send_part` brought, joined along `axis` in the devices' order."""
    devices, own = lax.axis_size(mesh_axes), lax.axis_index(mesh_axes)
    part = arrived[0]
    size = part.shape[axis]
    whole = vary_as(lax.empty((*part.shape[:axis], devices * size, *part.shape[axis + 1 :]), part.dtype), part)
    for distance, part in enumerate(arrived):
        whole = lax.dynamic_update_slice_in_dim(whole, part, (own - distance) % devices * size, axis)
    return whole


def send_contributions(x: Array, mesh_axes: tuple[str, ...], axis: int) -> list[Array]:
    """The devices' contributions to this device's part of a sum over devices of x, split along `axis`, in the order of
    `send_part`."""
    devices, own = lax.axis_size(mesh_axes), lax.axis_index(mesh_axes)
    size = x.shape[axis] // devices

    def contribution(distance: int) -> Array:
        return lax.dynamic_slice_in_dim(x, (own + distance) % devices * size, size, axis)

    return [hop(contribution(distance), mesh_axes, distance) for distance in range(devices)]


def add_contributions(arrived: list[Array]) -> Array:
    """Their sum in at least f32."""
    return reduce(jnp.add, (a.astype(at_least_f32(a.dtype)) for a in arrived))
