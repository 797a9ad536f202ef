"""Names of mesh axes, transfers and optimizers, as plain values: settings and commands read them without importing JAX."""

from dataclasses import dataclass
from typing import Literal

MESH_AXES = ("pipe", "data", "fsdp", "expert", "context")
"""The axes and what each splits: pipe the layers, data the batch, fsdp batch and parameters, expert the experts, context the
sequences."""

Hops = Literal["nccl", "copies"]
"""Transfers between devices: NCCL kernels or peer-to-peer copies (`parallel.collectives.hops`)."""

PipeSchedule = Literal["uniform", "uniform-w", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"]
"""The order of the passes in a pipeline (docs/schedules.md)."""

UNIFORM: tuple[PipeSchedule, ...] = ("uniform", "uniform-w")
"""The schedules in uniform ticks. The others run from a table."""

CHOOSES_CHUNKS: tuple[PipeSchedule, ...] = (*UNIFORM, "interleaved")
"""The schedules that support any number of chunks."""

OptimizerName = Literal["adamw", "muon", "adafactor"]
"""The optimizers of `train.make_optimizer`."""


@dataclass(frozen=True)
class MeshShape:
    """Number of devices along each mesh axis; `make_mesh(**asdict(shape))` builds the mesh."""

    pipe: int = 1
    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1

    @property
    def size(self) -> int:
        """The total number of devices."""
        return self.pipe * self.data * self.fsdp * self.expert * self.context
