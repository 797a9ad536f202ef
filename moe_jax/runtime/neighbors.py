"""Names the host of a process that died, in the log of every other process of the job.

JAX ends a process when another one falls silent, and gives that one's number at most. So each process counts in the job's
key-value store, and reads the counts of all. Nothing is ended here: a process that is only busy costs a line in the log.
"""

import itertools
import logging
import math
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import jax

PERIOD_SECONDS = 5.0
SILENT_SECONDS = 15.0
"""A process is named when its count has not changed for this time, before JAX's heartbeats end the job."""

SILENT = f"silent for {SILENT_SECONDS:.0f} s"
COUNTS = "moe_jax/counts/"
ENDED = "ended"

_logger = logging.getLogger(__name__)
_named = threading.Event()
_ended = threading.Event()


@dataclass
class _Watch:
    """One process's view of the others.

    Attributes:
      client: JAX's client of the key-value store.
      answered: the time of the store's last answer.
      seen: of each entry, its text and when it last changed.
    """

    client: Any
    process_id: int
    answered: float
    seen: dict[str, tuple[str, float]]


_own: _Watch | None = None


def watch(client: Any, process_id: int) -> None:
    """Counts and watches in two threads until the connection ends.

    Args:
      client: JAX's `DistributedRuntimeClient`.
    """
    global _own
    _own = _Watch(client, process_id, time.monotonic(), {})
    for target in (_count, _doubt):
        threading.Thread(target=target, args=(_own,), daemon=True).start()


def report_end(status: int) -> None:
    """Tells the other processes that this one ends by a failure; returns within two seconds."""
    if _own is not None:
        _ended.set()
        telling = threading.Thread(target=_write, args=(_own, f"{ENDED} with status {status}"), daemon=True)
        telling.start()
        # The store may be on the host that died.
        telling.join(timeout=2.0)


def wait_for_a_name() -> None:
    """Waits until a process is named, at most as long as that takes."""
    if _own is not None:
        _named.wait(SILENT_SECONDS + 3 * PERIOD_SECONDS)


def _count(own: _Watch) -> None:
    told: set[str] = set()
    count = itertools.count()
    while not _ended.wait(PERIOD_SECONDS):
        try:
            _write(own, str(next(count)))
            found = own.client.key_value_dir_get(COUNTS)
        except jax.errors.JaxRuntimeError:
            own.answered = math.inf
            return
        own.answered = now = time.monotonic()
        for key, text in found:
            if key not in own.seen or own.seen[key][0] != text:
                own.seen[key] = text, now
            host, _, state = text.partition(" ")
            silent = now - own.seen[key][1] > SILENT_SECONDS
            if key not in told and (silent or state.startswith(ENDED)):
                told.add(key)
                _name(key.rpartition("/")[2], host, SILENT if silent else state)


def _doubt(own: _Watch) -> None:
    """Names process 0, whose host has the store, while `_count` waits for an answer."""
    while not _ended.wait(PERIOD_SECONDS):
        if time.monotonic() - own.answered > SILENT_SECONDS:
            host = own.seen.get(f"{COUNTS}0", ("", 0.0))[0].partition(" ")[0]
            _name("0", host, SILENT)
            return


def _write(own: _Watch, state: str) -> None:
    own.client.key_value_set(f"{COUNTS}{own.process_id}", f"{socket.gethostname()} {state}", allow_overwrite=True)


def _name(process: str, host: str, state: str) -> None:
    _logger.warning("process %s on host %s: %s", process, host, state)
    _named.set()
