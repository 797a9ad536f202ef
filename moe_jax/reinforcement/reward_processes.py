"""Processes that call reward functions in their main thread, where `signal.alarm` works. A call that hangs is killed.

They are new programs. A fork would copy the locks of JAX's threads, and `multiprocessing` would run the user's script again.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any

from moe_jax.reinforcement.reward_calls import BadRewards, CallFailed, Function, Scores, call, function_at

PROCESSES = 4
"""Largest number of processes of a pool."""
IMPORT_SECONDS = 300.0
"""Time limit for the start of a process and the import of a function."""


class Processes:
    """A pool of processes, each started when a call needs it.

    Args:
      timeout: seconds of a call, without the time to import the function.
    """

    def __init__(self, timeout: float):
        self.timeout, self._closed = timeout, False
        # The process used last is taken first, so there are no more processes than calls at once.
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(PROCESSES):
            self._idle.put(None)
        self._alive = set[_Process]()
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="rewards")

    def submit(self, place: str, arguments: Mapping[str, Any]) -> Future[Scores]:
        """Calls the function at a place. The future raises BadRewards or CallFailed."""
        return self._threads.submit(self._call, place, arguments)

    def close(self) -> None:
        """Kills the processes and all that they started."""
        self._closed = True
        for process in list(self._alive):
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._alive:
            process.connection.close()

    def _call(self, place: str, arguments: Mapping[str, Any]) -> Scores:
        process = self._idle.get()
        try:
            process = process or _Process()
            self._alive.add(process)
            # `close` may have missed a new process.
            if self._closed:
                raise _Lost("was not called: the pool is closed")
            if place not in process.imported:
                process.ask((place, None), IMPORT_SECONDS)
                process.imported.add(place)
            return process.ask((place, arguments), self.timeout)
        except _Lost:
            assert process is not None
            process.kill()
            process.connection.close()
            self._alive.discard(process)
            process = None
            raise
        finally:
            self._idle.put(process)


class _Lost(CallFailed):
    """The process has ended, or must be killed."""


class _Process:
    """A process that answers one question after another, with `serve`."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.imported = set[str]()
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        # A function that uses JAX must not take the GPU's memory.
        environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()}, {os.getpid()})"]
        options: dict[str, Any] = dict(stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[theirs.fileno()])
        self._process = subprocess.Popen(command, env=environment, **options)
        theirs.close()

    def ask(self, question: tuple[str, Mapping[str, Any] | None], timeout: float) -> Any:
        """Returns the answer, or raises the error that the process sends."""
        try:
            self.connection.send(question)
            if not self.connection.poll(timeout):
                raise _Lost(f"did not end within {timeout:g} s, and was killed")
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            raise _Lost(f"ended its process, with exit code {self._process.wait()}") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        """Kills the process and all that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def serve(handle: int, parent: int) -> None:
    """Runs in a process: imports and calls functions until the parent closes its end of the pipe, or is gone."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection, functions = Connection(handle), dict[str, Function]()
    while True:
        try:
            place, arguments = connection.recv()
        except EOFError:
            return
        answer: Any = None
        try:
            if arguments is None:
                functions[place] = function_at(place)
            else:
                answer = call(functions[place], arguments)
            connection.send(answer)
        except BadRewards as error:
            connection.send(error)
        except BaseException as error:  # the user's code may raise anything, or log values that cannot be sent
            sent = error if isinstance(error, CallFailed) else CallFailed(f"raised {type(error).__name__}: {error}")
            sent.add_note(traceback.format_exc())
            connection.send(sent)


def _end_with(parent: int) -> None:
    """Kills this process and all that it started once its parent is gone, even in a call that hangs."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)
