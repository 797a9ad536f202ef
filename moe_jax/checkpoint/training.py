"""Checkpoints of a training run with Orbax: asynchronous, the newest n kept, complete or absent."""

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


def finished_steps(folder: str | Path) -> list[int]:
    """The steps of a run's complete checkpoints, in order; none where there is no folder, which is not made."""
    return sorted(ocp.utils.checkpoint_steps(Path(folder)))


class TrainingCheckpoints:
    """Checkpoints of (state, position): any pytree of arrays, and a JSON object such as the data's position.

    Saving returns at once and goes on in the background; a checkpoint appears under its step's name only when it is whole, so
    a crash while saving leaves the one before.

    `remove_unfinished`, for who saves here alone, removes what such a crash left. One that is being saved looks the same.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3, remove_unfinished: bool = False):
        if keep < 1:
            raise ValueError(f"keep must be at least 1; got {keep}")
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=True, create=True, cleanup_tmp_directories=remove_unfinished
        )
        self._folder = Path(folder).resolve()
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        _leave_errors_to_the_caller()
        self.stopped_by: signal.Signals | None = None
        self._handlers_before: dict[signal.Signals, Any] = {}

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step; None if there is none."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Those of all complete checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def position(self, step: int) -> dict[str, Any]:
        """The JSON object saved with the step.

        Raises:
          ValueError: the checkpoint is damaged, here and in `restore` and `restore_parts`; names the one before it.
        """
        with self._read(step):
            restored = self._manager.restore(step, args=ocp.args.Composite(position=ocp.args.JsonRestore()))
            return restored["position"]

    def restore(self, step: int, like: Any) -> Any:
        """The state saved at the step, with the shapes, dtypes and shardings of `like` (arrays or ShapeDtypeStructs)."""
        template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        with self._read(step):
            restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(template)))
            return restored["state"]

    def restore_parts(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """Those fields of the state alone that `like` names, with its dtypes and shardings."""
        args = ocp.args.PyTreeRestore(
            item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
        )
        with self._read(step):
            return self._manager.restore(step, args=ocp.args.Composite(state=args))["state"]

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Begins to save; waits first for a save that is still under way. A step that exists is left as it is.

        Raises:
          OSError: that save, or the beginning of this one, failed, as on a full disk; names the newest whole checkpoint.
        """
        if step == self.latest_step():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(position))
        with self._written():
            self._manager.save(step, args=args)

    def told_to_stop(self, step: int) -> bool:
        """Whether all processes of a job are to save now and end, since one of them got SIGTERM; alone only after `listen`."""
        return self.stopped_by is not None or self._manager.reached_preemption(step)

    def listen(self) -> None:
        """From here to `close`, which waits for what is being saved, SIGTERM ends nothing: `told_to_stop` says that it came.

        The first SIGINT (Ctrl-C) likewise; a second one interrupts at once. `stopped_by` is the signal that came. Of several
        processes JAX hears SIGTERM, and lets all know at the same step; threads but the main one cannot hear any.
        """
        if jax.process_count() > 1 or threading.current_thread() is not threading.main_thread():
            return

        def heard(number: int, _) -> None:
            self.stopped_by = signal.Signals(number)
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, self._handlers_before[signal.SIGINT])
                # print may be what was interrupted.
                os.write(2, b"\ninterrupted: the run saves after this step and ends; Ctrl-C again ends it at once\n")

        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers_before[number] = signal.signal(number, heard) or signal.SIG_DFL

    def close(self) -> None:
        """Waits for saves under way.

        Raises:
          OSError: one of them failed.
        """
        try:
            with self._written():
                self._manager.wait_until_finished()
                self._manager.close()
        finally:
            while self._handlers_before:
                signal.signal(*self._handlers_before.popitem())

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            steps = finished_steps(self._folder)
            way = (
                f"goes on from step {steps[-1]}, the newest that is whole" if steps else "begins anew: there is none before it"
            )
            raise OSError(
                f"no checkpoint could be saved in {self._folder} ({_reason(error)}); the same command {way}"
            ) from error

    @contextmanager
    def _read(self, step: int) -> Iterator[None]:
        # Not RuntimeError, which JAX raises where memory is short: the checkpoint is fine then.
        try:
            yield
        except (ValueError, LookupError, OSError) as error:
            before = [other for other in finished_steps(self._folder) if other < step]
            way = f"go on from step {before[-1]}" if before else "begin anew: there is none before it"
            raise ValueError(
                f"checkpoint {step} cannot be read ({_reason(error)}): move the folder {self._folder / str(step)} away to {way}"
            ) from error


def _reason(error: Exception) -> str:
    """The error in a line; of the operating system's errors, within TensorStore's chains of places, their names alone."""
    number = re.search(r"os_error_code='(\d+)'", str(error))
    text = str(error.args[0] if error.args else error)
    if number:
        return os.strerror(int(number.group(1)))
    # TensorStore repeats the whole specification of the array.
    return text.splitlines()[0].split(" [tensorstore_spec")[0] if text else type(error).__name__


def _leave_errors_to_the_caller() -> None:
    """Keeps threads of Orbax and TensorStore from printing tracebacks of errors that `save` or `close` raise later."""
    # A filter that is there already is not added again.
    logging.getLogger("absl").addFilter(_is_no_error_of_orbax)
    if getattr(sys.unraisablehook, "func", None) is not _print_unless_late:
        sys.unraisablehook = partial(_print_unless_late, sys.unraisablehook)


def _is_no_error_of_orbax(record: logging.LogRecord) -> bool:
    return not (record.levelno >= logging.ERROR and f"{os.sep}orbax{os.sep}" in record.pathname)


def _print_unless_late(hook: Callable[[Any], None], unraisable: Any) -> None:
    """TensorStore's writes that end after one has failed find the event loop of the save closed, and would print that each."""
    if not (isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"):
        hook(unraisable)
