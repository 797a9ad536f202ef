"""Describes the layout of tokens, experts and parameters on a mesh, in one value for a training step."""

import math
from dataclasses import dataclass, replace

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_jax.parallel.choices import Hops, PipeSchedule
from moe_jax.parallel.collectives.hops import COPIES, MANY_AT_ONCE, NO_COPIES, check_hops
from moe_jax.parallel.expert import ExpertParallel
from moe_jax.parallel.pipeline.chunks import PipeShape, pipe_of
from moe_jax.parallel.pipeline.limits import ranks_problem
from moe_jax.parallel.sequence.attention import ContextParallel


@dataclass(frozen=True)
class Parallelism:
    """A mesh from `make_mesh`, and the settings of expert, context and pipeline parallelism on it.

    Every device has its own tokens. The rows of a batch are split over `data`, `fsdp` and `expert`, the tokens of a row over
    `context`. Along `pipe` devices have the same rows and different layers (`train.pipelined`). Parameters are split over all
    axes except `data` (`parallel.layout`). The experts stay in place, and tokens travel to them along `expert`. All other
    matrices are gathered for use (`parallel.fsdp`).

    Raises:
      ValueError: hops that the mesh's devices do not support, or a `context.axis_name` that the mesh lacks. Also an
        `expert.axis_name` other than "expert": along that axis the mesh splits the experts. Chunks or a schedule without a
        pipe, or numbers of chunks or ranks that the schedule does not support.
    """

    mesh: Mesh
    expert: ExpertParallel = ExpertParallel()
    """Transfers of tokens to experts, if the mesh has more than one device along `expert`."""
    context: ContextParallel = ContextParallel()
    """Layout of sequences and method of attention, if the mesh has more than one device along `context`."""
    hops: Hops = "nccl"
    """Transfers between devices (`parallel.collectives.hops`). "copies" needs a program compiled with `compiler_options`;
    `make_train_step` uses them."""
    shard_optimizer: bool = False
    """Splits the optimizer's moments and the masters, but not the parameters, over `data` too (`parallel.zero1`). With one
    device along `data` the flag has no effect."""

    overlap_micro_batches: bool | None = None
    """With gradient accumulation, compute each micro-batch's forward pass together with the previous one's backward pass
    (`train.micro_batch`). Tokens of one pass travel to experts while the other computes. Two micro-batches are in memory. None:
    if experts are on several devices, layers are recomputed (remat) and the loss is `NextToken`. Without gradient accumulation
    nothing overlaps; with it and a function as loss, True is an error."""

    pipe_chunks: int = 1
    """The parts of consecutive layers that each rank of `pipe` holds. More chunks wait less and send more."""

    pipe_schedule: PipeSchedule = "uniform"
    """The order of the passes along `pipe`. "uniform" runs the same operations on all ranks; so does "uniform-w", except for
    gradients of weights postponed to the end. With the others each rank runs its own branch (`train.pipelined`). Then transfers
    inside the layers must be collectives with groups."""

    def __post_init__(self):
        check_hops(self.hops, self.mesh)
        pipe_of(self.mesh, self.pipe_chunks)
        if problem := ranks_problem(self.pipe_schedule, self._size("pipe"), self.pipe_chunks):
            raise ValueError(problem)
        name = self.expert.axis_name
        if self._size("expert") > 1 and name != "expert":
            raise ValueError(
                f"ExpertParallel.axis_name must be 'expert', along which the mesh splits the experts; got {name!r}"
            )
        if self.context.axis_name not in (*self.mesh.axis_names, ContextParallel.axis_name):
            axes = ", ".join(self.mesh.axis_names)
            raise ValueError(f"ContextParallel.axis_name must be an axis of the mesh, {axes}; got {self.context.axis_name!r}")

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """XLA options for `jax.jit`: they select how hops are transferred, and avoid copies in pipeline branches."""
        hops = {} if self.hops == "nccl" else COPIES | MANY_AT_ONCE
        return hops | ({} if self.pipe_schedule == "uniform" else NO_COPIES)

    @property
    def expert_parallel(self) -> ExpertParallel | None:
        """The settings of expert parallelism, with this object's `hops`; None if one device holds all experts."""
        devices = self._size(self.expert.axis_name)
        return self.expert.over(devices, self.hops) if devices > 1 else None

    @property
    def context_parallel(self) -> ContextParallel | None:
        """The settings of context parallelism, with this object's `hops`; None if sequences are not split."""
        return replace(self.context, hops=self.hops) if self._size(self.context.axis_name) > 1 else None

    @property
    def pipe(self) -> PipeShape:
        """The number of pipeline ranks, and of chunks per rank."""
        return pipe_of(self.mesh, self.pipe_chunks)

    @property
    def pipelined(self) -> bool:
        """True if layers are split over several devices along `pipe`."""
        return self._size("pipe") > 1

    @property
    def splits_optimizer(self) -> bool:
        """True if ZeRO-1 is active: `shard_optimizer` with several devices along `data`."""
        return self.shard_optimizer and self._size("data") > 1

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the rows of a batch."""
        return tuple(name for name in self.mesh.axis_names if name not in ("pipe", self.context.axis_name))

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes along which devices have different tokens: losses and gradients are summed over them.

        A pipeline's ranks each compute the loss of a share of the tokens, so `pipe` is then included.

        Without a pipe no value varies along `pipe`, and JAX refuses to sum such values over it.
        """
        return tuple(name for name in self.mesh.axis_names if name != "pipe" or self.pipelined)

    @property
    def batch_spec(self) -> PartitionSpec:
        """The PartitionSpec of batch arrays [batch, seq], with tokens in the order of `context.layout`."""
        name = self.context.axis_name
        return PartitionSpec(self.row_axes, name if name in self.mesh.axis_names else None)

    def check_batch(self, rows: int) -> None:
        """Checks that the rows of a (micro-)batch split evenly over the devices.

        Raises:
          ValueError: they do not.
        """
        ways = math.prod(self._size(name) for name in self.row_axes)
        if rows % ways:
            axes = " x ".join(f"{name}={self._size(name)}" for name in self.row_axes)
            raise ValueError(f"a (micro-)batch of {rows} rows cannot be divided among {axes}; it must be a multiple of {ways}")

    def own_rows(self, rows: int) -> list[int]:
        """Returns the indices of the batch rows that are at least partly on this process's devices."""
        parts = NamedSharding(self.mesh, PartitionSpec(self.row_axes)).addressable_devices_indices_map((rows,)).values()
        return sorted({row for part in parts if part for row in range(*part[0].indices(rows))})

    def _size(self, name: str) -> int:
        return self.mesh.shape.get(name, 1)
