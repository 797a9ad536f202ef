"""A thread beside the event loop, for work that takes long and that nobody needs any more once the process ends."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Worker:
    """A thread that runs functions in turn. It holds up no exit: a function that never ends dies with the process."""

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[list[tuple[Callable[[], Any], Future]] | None] = queue.SimpleQueue()
        """Lists of one call, or of none if its caller was cancelled; None at the end."""
        # An executor's thread would be joined when Python exits.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run[T](self, function: Callable[[], T]) -> T:
        """Runs a function in the thread, and returns its result or raises its error.

        If the caller is cancelled, a function that waits is left out, and the result of one that runs is dropped.
        """
        done: Future[T] = Future()
        call = [(function, done)]
        self._calls.put(call)
        try:
            return await asyncio.wrap_future(done)
        finally:
            # Behind a function that never ends, calls would pile up with all that they hold.
            call.clear()

    def close(self, seconds: float = 0.0) -> bool:
        """Lets the thread end behind the functions that wait; returns whether it has, after at most so many seconds."""
        self._calls.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._run_next():
            pass

    # A function of its own: else the last call, with all that it holds, would live until the next one.
    def _run_next(self) -> bool:
        call = self._calls.get()
        if call is None:
            return False
        for function, done in call.copy():
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(function())
                except BaseException as error:  # raised again where the caller waits
                    done.set_exception(error)
        return True
