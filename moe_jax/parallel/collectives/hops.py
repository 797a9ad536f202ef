"""Hops, by which data goes from one device to another: what a ring passes on, tokens that travel to experts pairwise, and
matrices that are gathered.

Over "nccl" a hop is a kernel, which takes cores from those that compute. As one of "copies" it goes from GPU to GPU beside
them: rings of attention, exchanges with experts and gathers were all faster so (docs/performance.md). XLA copies between the
GPUs of one process alone. Which of the two it makes is an option of the program it compiles.
"""

from typing import get_args

from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array

from moe_jax.parallel.choices import MESH_AXES, Hops

COPIES = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
"""Options of `jax.jit`: each `ppermute` is a copy."""

MANY_AT_ONCE = {"xla_gpu_experimental_parallel_collective_overlap_limit": "64"}
"""So many collectives may be under way; else one runs beside computation, and the others alone."""


def default_hops(mesh: Mesh) -> Hops:
    """Copies where they can be made."""
    return "nccl" if _obstacle(mesh) else "copies"


def check_hops(hops: Hops, mesh: Mesh) -> None:
    """Whether the devices of the mesh can make such hops.

    Raises:
      ValueError: they cannot, or `hops` is none of "nccl" and "copies".
    """
    if hops not in get_args(Hops):
        raise ValueError(f"hops={hops!r} must be one of {', '.join(get_args(Hops))}")
    if hops == "copies" and (obstacle := _obstacle(mesh)):
        raise ValueError(f"hops='copies' are between the GPUs of one process, and the mesh has {obstacle}: take hops='nccl'")


def hop(message: Array, axis_name: str | tuple[str, ...], distance: int) -> Array:
    """What the device `distance` places before this one has; inside `jax.shard_map`."""
    devices = lax.axis_size(axis_name)
    if distance % devices == 0:
        return message
    return lax.ppermute(message, axis_name, [(i, (i + distance) % devices) for i in range(devices)])


def _obstacle(mesh: Mesh) -> str:
    """Why there are no copies between the devices; empty if there are."""
    processes, platforms = ({getattr(d, name) for d in mesh.devices.flat} for name in ("process_index", "platform"))
    if len(processes) > 1:
        return f"devices of {len(processes)} processes"
    if platforms != {"gpu"}:
        return f"devices of platform {', '.join(sorted(platforms))}"
    axes = [name for name in mesh.axis_names if name in MESH_AXES]
    in_order = axes == sorted(axes, key=MESH_AXES.index)
    return "" if in_order else f"the axes {', '.join(axes)} in another order than {', '.join(MESH_AXES)}"
