"""A schedule in the text format of torch.distributed.pipelining, for comparison with other tools."""

from moe_jax.parallel.pipeline.schedules import Part, Schedule, Slot

TORCH_KINDS = {"F": "F", "B": "B", "b": "I", "W": "W"}
"""Kinds of parts, as torch names them: I is the gradient of inputs."""


def to_actions(schedule: Schedule) -> str:
    """Returns a CSV with a row for each rank, as torch's `_dump_csv` writes it.

    An action is stage, kind and micro-batch: `2F0`, `2I0`, `2W0`. An overlapped pair is `(0F1;1B0)OVERLAP_F_B`, and an idle
    tick is empty. The second stream of DualPipe continues the numbers of the first.
    """

    def action(rank: int, part: Part) -> str:
        micro_batch = schedule.directions[part.chunk] * schedule.micro_batches + part.micro_batch
        return f"{schedule.stages[rank][part.chunk]}{TORCH_KINDS[part.kind]}{micro_batch}"

    def cell(rank: int, slot: Slot) -> str:
        parts = ";".join(action(rank, part) for part in slot)
        return f"({parts})OVERLAP_F_B" if len(slot) == 2 else parts

    return "".join(",".join(cell(rank, slot) for slot in slots) + "\n" for rank, slots in enumerate(schedule.ranks))
