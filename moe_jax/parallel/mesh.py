"""Makes the device mesh: all named axes, in one fixed order."""

import math

import jax
from jax import lax

from moe_jax.parallel.choices import MESH_AXES


def make_mesh(
    *, pipe: int = 1, data: int = 1, fsdp: int = 1, expert: int = 1, context: int = 1, devices: list[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """Makes a mesh with the axes MESH_AXES of the given sizes, for `from_pretrained(..., mesh=)`.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = (pipe, data, fsdp, expert, context)
    if math.prod(sizes) != len(devices) or min(sizes) < 1:
        wanted = " x ".join(f"{name}={size}" for name, size in zip(MESH_AXES, sizes, strict=True))
        problem = f"the mesh {wanted} has {math.prod(sizes)} places; there are {len(devices)} devices"
        if min(sizes) >= 1 and all(device.platform == "cpu" for device in devices):
            problem += f". To try a mesh on CPUs, {_imitated(math.prod(sizes))}"
        raise ValueError(problem)
    auto = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)
    return jax.make_mesh(sizes, MESH_AXES, axis_types=auto, devices=devices)


def _imitated(places: int) -> str:
    """Returns how to imitate this number of devices on CPUs; the launcher sets each process's own number."""
    processes = jax.process_count()
    if processes == 1:
        return f"set JAX_NUM_CPU_DEVICES={places} before Python starts"
    if places % processes:
        return f"use a mesh that {processes} processes can share evenly"
    return f"start moe-jax launch with --processes {processes} --cpu-devices {places // processes}"


def refuse_pipe(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None,
    work: str,
    instead: str = "load the model's folder onto another mesh, by from_pretrained(folder, mesh=make_mesh(fsdp=...)); or "
    "move the layers out of their chunks first, by parallel.pipeline.chunks.from_chunks",
) -> None:
    """Raises if the mesh has several devices along `pipe`, for `work` that pipelines do not support.

    Raises:
      ValueError: the message names the work, the size of `pipe`, and what to do `instead`.
    """
    if mesh is not None and mesh.shape.get("pipe", 1) > 1:
        raise ValueError(f"{work} has no pipe yet, and the mesh has pipe={mesh.shape['pipe']}: {instead}")


def axis_size(axis_name: str) -> int:
    """Returns the number of devices along a mesh axis, inside a `jax.shard_map` over it.

    Raises:
      NameError: outside `shard_map`, or inside one whose mesh lacks the axis.
    """
    try:
        return lax.axis_size(axis_name)
    except NameError:
        message = f"no mesh axis {axis_name!r} here; call it inside a jax.shard_map over that axis"
        raise NameError(message) from None
