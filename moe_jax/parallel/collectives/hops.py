"""Hops: transfers from one device to another, in ring attention, pairwise exchanges with experts, and gathers of matrices.

With "nccl" a hop is a kernel, which occupies cores that computation then lacks. With "copies" it is a peer-to-peer copy between
GPUs, concurrent with computation. Ring attention, exchanges with experts and gathers were all faster with copies
(docs/log/parallel.md). XLA copies only between the GPUs of one process. A compiler option of the program chooses between the
two.

An all-gather and a reduce-scatter by copies write the received parts again, to their positions in the whole. Each has two
halves, so that a program can compute between sending and receiving. `sum_scatter` and `sum_to_all` sum 16-bit contributions in
f32 and in the devices' order.
"""

from functools import reduce
from typing import get_args

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array

from moe_jax.kernels.precision import at_least_f32
from moe_jax.kernels.shapes import vary_as
from moe_jax.parallel.choices import MESH_AXES, Hops

COPIES = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
"""Options of `jax.jit` that make each `ppermute` a peer-to-peer copy."""

MANY_AT_ONCE = {"xla_gpu_experimental_parallel_collective_overlap_limit": "64"}
"""Options of `jax.jit` that allow 64 collectives in flight. By default only one of them overlaps with computation."""

NO_COPIES = {"xla_gpu_copy_insertion_use_region_analysis": True}
"""Options of `jax.jit` with which XLA copies no arrays that pass through a branch unchanged. Without them it copied all
products of experts twice a tick, in a program of ZB-V compiled for two H200s."""


def default_hops(mesh: Mesh) -> Hops:
    """Returns "copies" if the devices of the mesh support them, and "nccl" otherwise."""
    return "nccl" if _obstacle(mesh) else "copies"


def check_hops(hops: Hops, mesh: Mesh) -> None:
    """Checks that the devices of the mesh support `hops`.

    Raises:
      ValueError: they do not, or `hops` is neither "nccl" nor "copies".
    """
    if hops not in get_args(Hops):
        raise ValueError(f"hops={hops!r} must be one of {', '.join(get_args(Hops))}")
    if hops == "copies" and (obstacle := _obstacle(mesh)):
        raise ValueError(f"hops='copies' needs all GPUs in one process, but the mesh has {obstacle}: use hops='nccl'")


def hop(message: Array, axis_name: str | tuple[str, ...], distance: int) -> Array:
    """Sends `message` to the device `distance` ahead on the axis, inside `jax.shard_map`; returns the one received."""
    devices = lax.axis_size(axis_name)
    if distance % devices == 0:
        return message
    return lax.ppermute(message, axis_name, [(i, (i + distance) % devices) for i in range(devices)])


def _obstacle(mesh: Mesh) -> str:
    """Returns why the devices do not support copies; empty if they do."""
    processes, platforms = ({getattr(d, name) for d in mesh.devices.flat} for name in ("process_index", "platform"))
    if len(processes) > 1:
        return f"devices of {len(processes)} processes"
    if platforms != {"gpu"}:
        return f"devices of platform {', '.join(sorted(platforms))}"
    axes = [name for name in mesh.axis_names if name in MESH_AXES]
    in_order = axes == sorted(axes, key=MESH_AXES.index)
    return "" if in_order else f"the axes {', '.join(axes)} in another order than {', '.join(MESH_AXES)}"


def send_part(part: Array, mesh_axes: tuple[str, ...]) -> list[Array]:
    """First half of an all-gather, inside `jax.shard_map`: sends this device's shard to all devices of the axes.

    Returns the received parts: its own, then the previous device's, and so on.
    """
    return [hop(part, mesh_axes, distance) for distance in range(lax.axis_size(mesh_axes))]


def join_parts(arrived: list[Array], mesh_axes: tuple[str, ...], axis: int) -> Array:
    """Second half of an all-gather: concatenates the shards from `send_part` along `axis`, in device order."""
    devices, own = lax.axis_size(mesh_axes), lax.axis_index(mesh_axes)
    part = arrived[0]
    size = part.shape[axis]
    whole = vary_as(lax.empty((*part.shape[:axis], devices * size, *part.shape[axis + 1 :]), part.dtype), part)
    for distance, part in enumerate(arrived):
        whole = lax.dynamic_update_slice_in_dim(whole, part, (own - distance) % devices * size, axis)
    return whole


def send_contributions(x: Array, mesh_axes: tuple[str, ...], axis: int) -> list[Array]:
    """First half of a reduce-scatter: sends each device the slice of x along `axis` that it will sum.

    Returns the devices' contributions to this device's part, in the order of `send_part`.
    """
    devices, own = lax.axis_size(mesh_axes), lax.axis_index(mesh_axes)
    size = x.shape[axis] // devices

    def contribution(distance: int) -> Array:
        return lax.dynamic_slice_in_dim(x, (own + distance) % devices * size, size, axis)

    return [hop(contribution(distance), mesh_axes, distance) for distance in range(devices)]


def add_contributions(arrived: list[Array]) -> Array:
    """Second half of a reduce-scatter: sums the received contributions in at least f32."""
    return reduce(jnp.add, (a.astype(at_least_f32(a.dtype)) for a in arrived))


def sum_scatter(x: Array, mesh_axes: str | tuple[str, ...], axis: int) -> Array:
    """Reduce-scatter of x along `axis` with sums in at least f32 and device order, inside `jax.shard_map`.

    It is a reduce-scatter written as an all-to-all, with the sum on the device that keeps the part. Contributions travel in
    x's dtype. A reduce-scatter in f32 would move the bytes of f32; one in x's dtype would round after every addition.
    """
    devices = lax.axis_size(mesh_axes)
    received = lax.all_to_all(x, mesh_axes, axis, axis, tiled=True)
    by_device = received.reshape(*x.shape[:axis], devices, x.shape[axis] // devices, *x.shape[axis + 1 :])
    return by_device.sum(axis=axis, dtype=at_least_f32(x.dtype))


def sum_to_all(x: Array, mesh_axes: str | tuple[str, ...]) -> Array:
    """All-reduce of x with f32 sums in device order, rounded once to x's dtype, inside `jax.shard_map`.

    It is an all-reduce written as `sum_scatter` and an all-gather. Like an all-reduce it sends 2(n-1)/n of x's bytes out of
    each device.
    """
    flat = jnp.pad(x.reshape(-1), (0, -x.size % lax.axis_size(mesh_axes)))
    part = sum_scatter(flat, mesh_axes, 0).astype(x.dtype)
    return lax.all_gather(part, mesh_axes, tiled=True)[: x.size].reshape(x.shape)
