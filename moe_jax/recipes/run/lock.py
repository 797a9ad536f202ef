"""One run at a time in an output folder, by a lock on a file there that the system releases when a program is killed."""

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from moe_jax.runtime.processes import is_first_process, texts_of_all

LOCK = ".lock"

_logger = logging.getLogger(__name__)


@contextmanager
def output_lock(folder: Path) -> Iterator[None]:
    """Holds `folder` until the block ends; makes the folder if it is not there.

    All processes of a job call this together on a shared file system; the first one holds the lock. On a file system without
    locks a warning is logged and the block runs.

    Raises:
      BlockingIOError: another run holds the folder; the message names its process and host. All processes raise it.
    """
    handle, holder = None, ""
    if is_first_process():
        folder.mkdir(parents=True, exist_ok=True)
        # Not O_TRUNC: it would erase who holds the lock.
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        holder = _locked(handle, folder)
    try:
        if jax.process_count() > 1:
            holder = texts_of_all(holder)[0]
        if holder:
            raise BlockingIOError(
                f"{folder} is in use by another run, {holder}: wait until it ends, or give another output folder"
            )
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _locked(handle: int, folder: Path) -> str:
    """Returns the holder if another process holds the lock; "" if this process holds it now, or if there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return os.read(handle, 1000).decode(errors="replace").strip() or "whose process is not known"
        _logger.warning("%s cannot be locked (%s): nothing keeps two runs from writing there at once", folder, error.strerror)
        return ""
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return ""
