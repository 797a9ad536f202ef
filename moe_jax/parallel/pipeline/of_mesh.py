"""The schedule of a step on a mesh, and the transfers inside layers that its branches cannot have."""

from moe_jax.parallel.parallelism import Parallelism
from moe_jax.parallel.pipeline.by_name import schedule_by_name
from moe_jax.parallel.pipeline.limits import split_axes, split_problem
from moe_jax.parallel.pipeline.schedules import Schedule
from moe_jax.parallel.pipeline.table import undivided


def schedule_of(parallelism: Parallelism, micro_batches: int) -> Schedule:
    """Returns the schedule of a step. Where matrices are split inside a rank, DualPipe and DualPipeV have no b and W.

    Raises:
      ValueError: sizes that the schedule refuses, or ZB-H1, ZB-V and `uniform-w` where matrices are split inside a rank.
    """
    name = parallelism.pipe_schedule
    schedule = schedule_by_name(name, parallelism.mesh.shape["pipe"], parallelism.pipe_chunks, micro_batches)
    if problem := split_problem(name, parallelism.mesh.shape):
        raise ValueError(problem)
    if not split_axes(parallelism.mesh.shape) or not any(
        part.kind == "W" for slots in schedule.ranks for slot in slots for part in slot
    ):
        return schedule
    return undivided(schedule)


def check_branches(parallelism: Parallelism) -> None:
    """Refuses transfers that would hang where ranks of the pipe are in different branches.

    Raises:
      ValueError: a `ppermute` inside the layers: experts over "pairwise", a ring of sequences, or gathers by copies. One in a
        transport of the caller's own is found when a step is traced (`branches`).
    """
    expert, context = parallelism.expert_parallel, parallelism.context_parallel
    by_copies = parallelism.hops == "copies" and bool(split_axes(parallelism.mesh.shape))
    for is_used, what, instead in (
        (by_copies, "hops='copies' inside the layers", "hops='nccl'"),
        (expert is not None and expert.transport == "pairwise", "the transport 'pairwise'", "'all_to_all' or 'gather'"),
        (context is not None and context.method == "ring", "the method 'ring'", "'all_gather' or 'ulysses'"),
    ):
        if is_used:
            raise ValueError(
                f"pipe_schedule={parallelism.pipe_schedule!r} runs ranks of the pipe in different branches, and {what} would "
                f"wait for ranks that never send: take {instead}, or pipe_schedule='uniform'"
            )
