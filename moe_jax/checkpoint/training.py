"""Checkpoints of a training run with Orbax: asynchronous, the newest n kept, complete or absent."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class TrainingCheckpoints:
    """Checkpoints of (state, position): any pytree of arrays, and a JSON object such as the data's position.

    Saving returns at once and goes on in the background; a checkpoint appears under its step's name only when it is whole, so
    a crash while saving leaves the one before.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep must be at least 1; got {keep}")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True, create=True)
        self._manager = ocp.CheckpointManager(Path(folder).resolve(), options=options)

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step; None if there is none."""
        return self._manager.latest_step()

    def position(self, step: int) -> dict[str, Any]:
        """The JSON object saved with the step."""
        restored = self._manager.restore(step, args=ocp.args.Composite(position=ocp.args.JsonRestore()))
        return restored["position"]

    def restore(self, step: int, like: Any) -> Any:
        """The state saved at the step, with the shapes, dtypes and shardings of `like` (arrays or ShapeDtypeStructs)."""
        template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(template)))
        return restored["state"]

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Begins to save; waits first for a save that is still under way. A step that exists is left as it is."""
        if step == self.latest_step():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(position))
        self._manager.save(step, args=args)

    def told_to_stop(self, step: int) -> bool:
        """Whether all processes of a job are to save now and end, since one of them got SIGTERM; alone always False."""
        return self._manager.reached_preemption(step)

    def close(self) -> None:
        """Waits for saves under way."""
        self._manager.wait_until_finished()
        self._manager.close()
