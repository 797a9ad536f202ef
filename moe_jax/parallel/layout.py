"""One table that says along which of its axes each parameter is split, and over which mesh axis.

A mesh axis that the mesh lacks, or whose size does not divide the parameter's axis, leaves that axis whole. XLA inserts the
collectives that the computation then needs.
"""

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

# The module that holds the parameter -> one mesh axis (or None) for each of its last axes. Stacked parameters have the layer
# axis in front of these; it stays whole, since every device runs every layer.
_AXES: dict[str, tuple[str | None, ...]] = {
    "embed_tokens": ("fsdp", None),
    "lm_head": ("fsdp", None),
    "q_proj": ("fsdp", None),
    "k_proj": ("fsdp", None),
    "v_proj": ("fsdp", None),
    "o_proj": (None, "fsdp"),
    "gate_proj": ("fsdp", None),
    "up_proj": ("fsdp", None),
    "gate_up_proj": ("expert", "fsdp", None),
    "down_proj": (None, "fsdp"),
    "experts.down_proj": ("expert", None, "fsdp"),
}


def parameter_sharding(path: tuple, shape: tuple[int, ...], mesh: Mesh | None) -> Sharding:
    """Where the parameter at `path` (as in `nnx.to_flat_state`) lies, by its global shape; no mesh: on the default device."""
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(mesh, parameter_spec(path, shape, mesh))


def parameter_spec(path: tuple, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The mesh axis, or None, for each axis of the parameter."""
    names = [str(part) for part in path if part != "weight"]
    axes = () if path[-1] == "bias" else _AXES.get(".".join(names[-2:]), _AXES.get(names[-1], ()))
    spec: list[str | None] = [*[None] * (len(shape) - len(axes)), *axes]
    for i, axis in enumerate(spec):
        if axis is not None and (axis not in mesh.shape or shape[i] % mesh.shape[axis]):
            spec[i] = None
    return PartitionSpec(*spec)
