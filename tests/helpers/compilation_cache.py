"""Compiled programs of tests are kept from run to run, in one folder for all worker processes: none compiles another's again.

JAX does not guard a file that one process writes from another that reads it, so here a file gets its name when it is whole.
"""

import fcntl
import os
import shutil
import tempfile
import threading
from pathlib import Path

import jax
from jax._src.lru_cache import LRUCache

KEPT = Path(__file__).parents[2] / ".cache" / "jax"
MAX_BYTES = 3 << 30
"""Above this size all is deleted: programs of older sources are never read again."""

ROOM = "MOE_JAX_TEST_PROGRAMS"  # Environment variable with the folder of this run.


def prepare(config) -> None:
    """Chooses the folder; a second run at the same time gets a temporary one."""
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
    if sum(path.stat().st_size for path in room.glob("programs/*")) > MAX_BYTES:
        shutil.rmtree(room / "programs")


def use() -> None:
    """Makes this process, and the processes that it starts, read and write the folder."""
    LRUCache.put, folder = put, os.path.join(os.environ[ROOM], "programs")
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def put(self, key: str, value: bytes) -> None:
    """Another process finds the whole file or none."""
    part = self.path / f"{key}.{os.getpid()}.{threading.get_ident()}"
    part.write_bytes(value)
    part.replace(self.path / f"{key}-cache")
