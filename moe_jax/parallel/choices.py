"""Choices of how devices are used: plain values, so that settings and commands read them without importing JAX."""

import math
from dataclasses import astuple, dataclass
from typing import Literal

MESH_AXES = ("data", "fsdp", "expert", "context")
"""data: batch split, parameters whole. fsdp: batch and parameters split. expert: experts split. context: sequences split."""

Hops = Literal["nccl", "copies"]
"""How data goes from one device to another (`parallel.hops`)."""


@dataclass(frozen=True)
class MeshShape:
    """How many devices stand along each axis of a mesh: `make_mesh(**asdict(shape))`."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1

    @property
    def size(self) -> int:
        """Devices in all."""
        return math.prod(astuple(self))
