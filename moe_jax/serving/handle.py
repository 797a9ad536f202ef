"""The receiving end of a request: its tokens as they come, for threads and for asyncio."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_jax.serving.request import Completion, FinishReason


@dataclass(frozen=True, slots=True)
class Event:
    """A new token of one continuation, or its end."""

    index: int
    """The number of the continuation, below `SamplingOptions.n`."""
    token: int | None
    """None if the continuation ends without another token: an abort or an error."""
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None
    """The most likely tokens, if the options asked for some."""
    finish_reason: FinishReason | None = None
    """Set with the last event of a continuation."""


class Handle:
    """A request that was submitted. Its events are read once: by `events`, or by `async for`.

    Raises:
      RuntimeError: while events are read: the engine failed.
    """

    def __init__(self, prompt: list[int], n: int, abort: Callable[[], None]):
        self.prompt = prompt
        self.completions: list[Completion | None] = [None] * n
        """The continuations that have ended."""
        self.error: BaseException | None = None
        self._abort = abort
        self._events: deque[Event] = deque()
        self._remaining = n
        """Continuations whose last event was not read."""
        self._came = threading.Event()
        self._listener: Listener | None = None

    def abort(self) -> None:
        """Ends all continuations that have not ended yet; their last events follow."""
        self._abort()

    def events(self) -> Iterator[Event]:
        """Yields the events as they come, and returns behind the last one."""
        while self._remaining:
            self._came.wait()
            self._came.clear()
            yield from self._new_events()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yields the events as they come, in an event loop."""
        came = asyncio.Event()
        self._listener = Listener(asyncio.get_running_loop(), came)
        if self._came.is_set():
            came.set()
        while self._remaining:
            await came.wait()
            came.clear()
            for event in self._new_events():
                yield event

    def result(self) -> list[Completion]:
        """Waits for all continuations and returns them."""
        for _ in self.events():
            pass
        return [completion for completion in self.completions if completion is not None]

    def deliver(self, event: Event) -> "Listener | None":
        """Adds an event; the engine's thread calls this. Returns whom to wake (`wake`)."""
        self._events.append(event)
        self._came.set()
        return self._listener

    def fail(self, error: BaseException) -> "Listener | None":
        """Ends the request with an error."""
        self.error = error
        self._came.set()
        return self._listener

    def _new_events(self) -> Iterator[Event]:
        while self._events:
            event = self._events.popleft()
            self._remaining -= event.finish_reason is not None
            yield event
        if self.error is not None:
            raise RuntimeError("the engine failed") from self.error


class Listener(NamedTuple):
    """A coroutine that waits for events."""

    loop: Any
    came: asyncio.Event


def wake(listeners: set[Listener]) -> None:
    """Wakes coroutines, with one call into each event loop: a call for each of 256 would take milliseconds."""
    for loop in {listener.loop for listener in listeners}:
        events = [listener.came for listener in listeners if listener.loop is loop]
        try:
            loop.call_soon_threadsafe(_set_all, events)
        except RuntimeError:  # the loop is closed, and with it all that waited there
            pass


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
