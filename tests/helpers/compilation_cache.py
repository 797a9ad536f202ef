"""Compiled programs of tests are kept from run to run, in one folder per worker process.

JAX does not guard a file that one process writes from another that reads it, so each worker has a folder of its own. A test
may be another worker's in the next run: before the workers start, each folder gets links to what the others hold.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import jax

KEPT = Path(__file__).parents[2] / ".cache" / "jax"
MAX_BYTES = 3 << 30
"""Above this size all is deleted: programs of older sources are never read again."""

ROOM = "MOE_JAX_TEST_PROGRAMS"
"""Environment variable with the folder that holds the workers' folders of this run."""


def prepare(config, workers: int) -> None:
    """Makes one folder for each of the workers; a second run at the same time gets temporary folders."""
    KEPT.mkdir(parents=True, exist_ok=True)
    lock = (KEPT / "lock").open("w")
    config.add_cleanup(lock.close)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        room = KEPT
    except BlockingIOError:
        room = Path(tempfile.mkdtemp(prefix="moe_jax-compiled-"))
        config.add_cleanup(lambda: shutil.rmtree(room, ignore_errors=True))
    os.environ[ROOM] = str(room)
    programs = {path.name: path for path in room.glob("gw*/*")}
    if sum(path.stat().st_size for path in programs.values()) > MAX_BYTES:
        for folder in room.glob("gw*"):
            shutil.rmtree(folder)
        programs = {}
    for worker in range(workers):
        folder = room / f"gw{worker}"
        folder.mkdir(exist_ok=True)
        for name in programs.keys() - set(os.listdir(folder)):
            os.link(programs[name], folder / name)


def use(worker: str) -> None:
    """Makes this process, and the processes that it starts, read and write a worker's folder."""
    folder = str(Path(os.environ[ROOM]) / worker)
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
