"""Checkpoints in the output folder of a training run, whose layers may be stacked for another pipeline than the reader's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from moe_jax.checkpoint.training import TrainingCheckpoints
from moe_jax.parallel.pipeline.chunks import LayersInPipe, PipeShape, restack, stacked_as
from moe_jax.train.state import TrainState

PIPE = "pipe"
"""The entry of a checkpoint's position for its `PipeShape`, as a JSON object; absent in runs without a pipeline."""


class RunCheckpoint(NamedTuple):
    """An open checkpoint of a training run."""

    checkpoints: TrainingCheckpoints
    step: int
    position: dict[str, Any]

    def read_parts(self, like: dict[str, Any]) -> dict[str, Any]:
        """Restores only the fields of the state named in `like`, as `TrainingCheckpoints.restore_parts`."""
        return self.checkpoints.restore_parts(self.step, like)


@contextmanager
def open_run(run: str | Path, step: int | None = None) -> Iterator[RunCheckpoint]:
    """Context manager that opens the checkpoint of `step`, by default the newest.

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
        raise FileNotFoundError(f"{run} has no checkpoint of step {step}; its checkpoints are {', '.join(map(str, steps))}")
    try:
        yield RunCheckpoint(checkpoints, step, checkpoints.position(step))
    finally:
        checkpoints.close()


def restored[Tree: Any](
    read: Callable[[Tree], Tree], like: Tree, layers: LayersInPipe, position: dict[str, Any], pipe: PipeShape
) -> Tree:
    """Restores arrays from a checkpoint with the shapes and shardings of `like`, restacking layers if needed.

    Moments and low halves of masters are handled like their parameters. If the checkpoint's layers are stacked differently,
    arrays are converted one by one, layer by layer. A device holds all layers of an array only in a layout that requires it.

    Args:
      read: reads arrays of given shapes, dtypes and shardings from the checkpoint: `TrainingCheckpoints.restore` or
        `restore_parts`.
      like: arrays or ShapeDtypeStructs, such as a TrainState, with layers stacked for `pipe`.
      position: the checkpoint's position.
    """
    saved = PipeShape(**position.get(PIPE, {}))
    if saved == pipe:
        return read(like)
    return restack(read(stacked_as(like, layers, saved)), like, layers.num_layers)


def freed(state: TrainState) -> TrainState:
    """Frees the state's device memory; returns its shapes and shardings, for restoring into."""
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    jax.tree.map(lambda x: x.delete(), state)
    return template
