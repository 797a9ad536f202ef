"""Saves and restores the checkpoints of a training run with Orbax: asynchronous, complete or absent, the newest n kept."""

import json
import logging
import math
import os
import re
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as preservation

CHECKSUMS = "checksums"
"""The entry of a stored position for checksums of the state's arrays, and of the position. Older runs have none."""
ALGORITHM = "odd weights 1"
"""The name of `_checksum`'s formula, stored with the sums. Sums of another formula are not compared."""


def finished_steps(folder: str | Path) -> list[int]:
    """Returns the sorted steps of a run's complete checkpoints; empty if the folder does not exist."""
    return sorted(ocp.utils.checkpoint_steps(Path(folder)))


class TrainingCheckpoints:
    """Asynchronous checkpoints of (state, position): a pytree of arrays, and a JSON object such as the data position.

    Saving returns at once and continues in the background. A checkpoint appears under its step's name only when it is complete,
    so a crash while saving leaves the previous one. A read refuses values that have changed on disk: the devices compute a
    checksum of each array at a save and after a restore. It does not depend on the array's sharding.

    Args:
      keep: the number of newest checkpoints to keep. The checkpoint of the step `kept_step` is kept too.
      remove_unfinished: removes the remains of such a crash. Only if no other program saves here: a checkpoint being saved
        looks the same.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3, remove_unfinished: bool = False):
        if keep < 1:
            raise ValueError(f"keep must be at least 1; got {keep}")
        self.kept_step: int | None = None
        policies = [preservation.LatestN(keep), _Kept(lambda: self.kept_step)]
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation.AnyPreservationPolicy(policies),
            enable_async_checkpointing=True,
            create=True,
            cleanup_tmp_directories=remove_unfinished,
        )
        self._folder = Path(folder).resolve()
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        _leave_errors_to_the_caller()
        self.stopped_by: signal.Signals | None = None
        self._handlers_before: dict[signal.Signals, Any] = {}

    def latest_step(self) -> int | None:
        """Returns the newest complete checkpoint's step; None if there is none."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def position(self, step: int) -> dict[str, Any]:
        """Returns the JSON object saved with the step.

        Raises:
          ValueError: the checkpoint is damaged; the message names the previous one. `restore` and `restore_parts` raise it too.
        """
        with self._read(step):
            return self._restore(step)["position"]

    def restore(self, step: int, like: Any) -> Any:
        """Restores the state of the step, with the shapes, dtypes and shardings of `like` (arrays or ShapeDtypeStructs)."""
        template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        with self._read(step):
            return self._restore(step, state=ocp.args.StandardRestore(template))["state"]

    def restore_parts(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """Restores only the fields named in `like`, with its dtypes and shardings."""
        args = ocp.args.PyTreeRestore(
            item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
        )
        with self._read(step):
            return self._restore(step, state=args)["state"]

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Waits for a save in progress, then starts this one. An existing step is not overwritten.

        Raises:
          OSError: the earlier save, or the beginning of this one, failed, for instance on a full disk; the message names the
            newest complete checkpoint.
        """
        if step == self.latest_step():
            return
        noted = position | {CHECKSUMS: {"algorithm": ALGORITHM} | _checksums(position, state)}
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(noted))
        with self._written():
            self._manager.save(step, args=args)

    def told_to_stop(self, step: int) -> bool:
        """Returns True if all processes must save now and exit because one of them received SIGTERM.

        A single process sees the signal only after `listen`.
        """
        return self.stopped_by is not None or self._manager.reached_preemption(step)

    def listen(self) -> None:
        """Makes SIGTERM set `told_to_stop` instead of ending the process, until `close`, which waits for saves in progress.

        The first SIGINT (Ctrl-C) does the same; a second one interrupts at once. `stopped_by` is the signal that arrived. With
        several processes JAX handles SIGTERM, and informs all of them at the same step. Only the main thread can install signal
        handlers.
        """
        if jax.process_count() > 1 or threading.current_thread() is not threading.main_thread():
            return

        def heard(number: int, _) -> None:
            self.stopped_by = signal.Signals(number)
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, self._handlers_before[signal.SIGINT])
                # Not print, which may be the call that was interrupted.
                os.write(2, b"\ninterrupted: the run saves after this step and ends; Ctrl-C again ends it at once\n")

        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers_before[number] = signal.signal(number, heard) or signal.SIG_DFL

    def close(self) -> None:
        """Waits for saves in progress.

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

    def _restore(self, step: int, **state: Any) -> Any:
        """Returns the position and perhaps the state; raises a ValueError if a checksum differs from the saved one."""
        restored = self._manager.restore(step, args=ocp.args.Composite(position=ocp.args.JsonRestore(), **state))
        position = restored["position"]
        noted = position.pop(CHECKSUMS, {})
        if noted.pop("algorithm", None) != ALGORITHM:
            return restored
        for name, (dtype, checksum) in _checksums(position, restored.get("state")).items():
            # An array restored in another dtype has different bits.
            if noted.get(name, [None])[0] == dtype and noted[name][1] != checksum:
                raise ValueError(f"the values of {name} differ from the saved ones")
        return restored

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            steps = finished_steps(self._folder)
            way = f"resumes from step {steps[-1]}, the newest complete one" if steps else "starts over: there is no earlier one"
            raise OSError(
                f"no checkpoint could be saved in {self._folder} ({reason_of(error)}); the same command {way}"
            ) from error

    @contextmanager
    def _read(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if lacks_memory(error):
                raise
            before = [other for other in finished_steps(self._folder) if other < step]
            way = f"resume from step {before[-1]}" if before else "start over: there is no earlier one"
            folder, reason = self._folder / str(step), reason_of(error)
            raise ValueError(f"checkpoint {step} cannot be read ({reason}): move the folder {folder} away to {way}") from error


class _Kept(preservation.PreservationPolicy):
    """Keeps the checkpoint of one step; the step may change."""

    def __init__(self, step: Callable[[], int | None]):
        self._step = step

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns which checkpoints to keep."""
        return [each.step == self._step() for each in checkpoints]


def lacks_memory(error: Exception) -> bool:
    """Returns True if a read failed because memory ran out rather than because of damaged data."""
    return isinstance(error.__cause__ or error, RuntimeError | MemoryError)


def _checksums(position: dict[str, Any], state: Any) -> dict[str, list]:
    """Returns [dtype, checksum] of the position and of each array, by path."""
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree_util.tree_leaves_with_path(state)
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, np.generic) and not jnp.iscomplexobj(x)
    }
    sums = jax.device_get({name: _checksum(x) for name, x in arrays.items()})
    of_position = {"position": ["json", zlib.crc32(json.dumps(position).encode())]}
    return of_position | {f"state/{name}": [x.dtype.name, int(sums[name])] for name, x in arrays.items()}


@jax.jit
def _checksum(x: jax.Array) -> jax.Array:
    """Sums the elements' bits modulo 2^32, each times a weight of its index. Odd weights reveal any single flipped bit."""
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}").astype(jnp.uint32)
    # Without this, swapped values that differ only in their signs keep the sum.
    bits ^= bits >> 16
    if bits.ndim:
        # XLA vectorizes only short sums on CPUs: this one reduces the elements by 16. Shards of the axis stay in place.
        few = math.gcd(bits.shape[-1], 16)
        bits = bits.reshape(*bits.shape[:-1], bits.shape[-1] // few, few)
    while bits.ndim:
        weights = (jnp.arange(bits.shape[-1], dtype=jnp.uint32) + np.uint32(bits.ndim << 28)) * np.uint32(0x9E3779B9)
        weights = (weights ^ weights >> 15) * np.uint32(0x85EBCA6B)
        bits = (bits * (weights ^ weights >> 13 | 1)).sum(-1, dtype=jnp.uint32)
    return bits


def reason_of(error: BaseException) -> str:
    """Describes an error in one line, shortening operating system errors in TensorStore messages to their names."""
    if type(error) is Exception and error.__cause__ is not None:
        # Orbax wraps TensorStore's error of a failed read into one that repeats the specification of the array.
        return reason_of(error.__cause__)
    number = re.search(r"os_error_code='(\d+)'", str(error))
    text = str(error.args[0] if error.args else error)
    if number:
        return os.strerror(int(number.group(1)))
    # TensorStore repeats the whole specification of the array.
    return text.splitlines()[0].split(" [tensorstore_spec")[0] if text else type(error).__name__


def _leave_errors_to_the_caller() -> None:
    """Keeps threads of Orbax and TensorStore from printing tracebacks of errors that `restore`, `save` or `close` raise."""
    # A filter that is there already is not added again.
    logging.getLogger("absl").addFilter(_is_no_error_of_orbax)
    logging.getLogger("asyncio").addFilter(_is_no_error_of_tensorstore)
    if getattr(sys.unraisablehook, "func", None) is not _print_unless_raised:
        sys.unraisablehook = partial(_print_unless_raised, sys.unraisablehook)


def _is_no_error_of_orbax(record: logging.LogRecord) -> bool:
    return not (record.levelno >= logging.ERROR and f"{os.sep}orbax{os.sep}" in record.pathname)


def _is_no_error_of_tensorstore(record: logging.LogRecord) -> bool:
    return "tensorstore_spec" not in record.getMessage()


def _print_unless_raised(hook: Callable[[Any], None], unraisable: Any) -> None:
    """Hides errors of reads and writes that end after a failed one, which is raised: their event loop is closed by then."""
    error = unraisable.exc_value
    late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    if not late and not str(error).startswith("Encountered error while reading array index"):
        hook(unraisable)
