"""Opens a checkpoint in the output folder of a training run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.checkpoint.training import TrainingCheckpoints


class RunCheckpoint(NamedTuple):
    """A checkpoint of a run, open to be read."""

    checkpoints: TrainingCheckpoints
    step: int
    position: dict[str, Any]

    def read_parts(self, like: dict[str, Any]) -> dict[str, Any]:
        """Reads the fields of the state that `like` names, as `TrainingCheckpoints.restore_parts`."""
        return self.checkpoints.restore_parts(self.step, like)


@contextmanager
def open_run(run: str | Path, step: int | None = None) -> Iterator[RunCheckpoint]:
    """Yields the checkpoint of `step`, by default the newest, and closes it.

    Raises:
      FileNotFoundError: `run` has no checkpoints, or none of this step.
    """
    folder = Path(run).expanduser() / "checkpoints"
    checkpoints = TrainingCheckpoints(folder) if folder.is_dir() else None
    steps = [] if checkpoints is None else checkpoints.steps()
    if checkpoints is None or not steps:
        raise FileNotFoundError(f"no checkpoints in {run}: give the output folder of a training run")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise FileNotFoundError(f"{run} has no checkpoint of step {step}; it has those of {', '.join(map(str, steps))}")
    try:
        yield RunCheckpoint(checkpoints, step, checkpoints.position(step))
    finally:
        checkpoints.close()
