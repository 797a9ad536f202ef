"""The receiving end of a request: its tokens as they come, for threads and for asyncio."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from moe_jax.serving.request import Completion, FinishReason, SamplingOptions
from moe_jax.serving.text import TextStream


class NewToken(NamedTuple):
    """A token that was drawn, and the most likely ones in its place."""

    token: int
    logprob: float
    top_logprobs: dict[int, float] | None
    """None unless the request asks for some."""


@dataclass(frozen=True, slots=True)
class Event:
    """A new token of one continuation, or its end."""

    index: int
    """The number of the continuation, below `SamplingOptions.n`."""
    token: int | None
    """None if the continuation ends without another token: at a stop text, an abort or an error."""
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None
    """The most likely tokens, if the options asked for some."""
    finish_reason: FinishReason | None = None
    """Set with the last event of a continuation."""
    text: str | None = None
    """The text that the token completes: often all of its own, sometimes none. None if the engine has no tokenizer."""


class ContinuationText:
    """The text of one continuation, as its events are read.

    A token that ends the continuation is no part of its text. A stop text ends both where it begins. Tokens behind the one that
    completes it are dropped.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Iterable[str]):
        self._stream = TextStream(tokenizer, prompt, stop)
        self._num_prompt = len(prompt)
        self._num_tokens = 0
        self._pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        """True once a stop text was found."""
        return self._stream.stopped

    def read(self, event: Event) -> Event | None:
        """Returns an event of the engine with its text; None if it has a dropped token and nothing else."""
        stream, reason, text = self._stream, event.finish_reason, ""
        if stream.stopped:
            if reason is None:
                return None
            event = Event(event.index, None)
        elif event.token is not None:
            self._num_tokens += 1
            text = "" if reason == "stop" else stream.add(event.token)
        if reason is not None:
            text += stream.flush()
            reason = "stop" if stream.stopped else reason
        self._pieces.append(text)
        return replace(event, text=text, finish_reason=reason)

    def of(self, completion: Completion) -> Completion:
        """Returns the engine's completion with its text, and without dropped tokens."""
        num = self._num_tokens

        def first(values: Any, count: int = num) -> Any:
            return None if values is None else values[:count]

        return replace(
            completion,
            tokens=completion.tokens[:num],
            text="".join(self._pieces),
            finish_reason="stop" if self.stopped else completion.finish_reason,
            logprobs=first(completion.logprobs),
            top_logprobs=first(completion.top_logprobs),
            experts=first(completion.experts, self._num_prompt + num - 1),
        )


class WeightsDeleted(RuntimeError):
    """The arrays that an engine shares with its model were deleted. `Engine.update` gives it others."""

    def __init__(self) -> None:
        super().__init__(
            "the model's arrays were deleted, most likely because a training step donated them: call engine.update(model) with "
            "the trained model, and give the engine a copy of its own if requests come during a step"
        )


class Handle:
    """A request that was submitted. Its events are read once: by `events`, or by `async for`.

    With a tokenizer, events and completions have text. A stop text ends its continuation when its events are read.

    Args:
      abort: ends the continuations of these numbers.

    Raises:
      RuntimeError: while events are read: the engine failed, or the model's arrays were deleted.
    """

    def __init__(
        self, prompt: list[int], options: SamplingOptions, abort: Callable[[range], None], tokenizer: Any | None = None
    ):
        n = options.n
        self.prompt = prompt
        self.options = options
        self.completions: list[Completion | None] = [None] * n
        """The continuations that have ended. One has its text once its last event was read."""
        self.error: BaseException | None = None
        self._abort = abort
        self._texts: list[ContinuationText] | None = None
        if tokenizer is not None:
            self._texts = [ContinuationText(tokenizer, prompt, options.stop) for _ in range(n)]
        self._events: deque[Event] = deque()
        self._remaining = n
        """Continuations whose last event was not read."""
        self._came = threading.Event()
        self._listener: Listener | None = None

    def abort(self) -> None:
        """Ends all continuations that have not ended yet; their last events follow."""
        self._abort(range(len(self.completions)))

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
        return results([self])[0]

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
            if (read := self._with_text(event)) is not None:
                yield read
        if self.error is not None:
            raise RuntimeError(why(self.error)) from self.error

    def _with_text(self, event: Event) -> Event | None:
        """Returns the event with its text, and ends its continuation if a stop text is complete; None: it is dropped."""
        if self._texts is None:
            return event
        index, text = event.index, self._texts[event.index]
        was_stopped = text.stopped
        read = text.read(event)
        completion = self.completions[index]
        if event.finish_reason is not None and completion is not None:
            self.completions[index] = text.of(completion)
        elif text.stopped and not was_stopped:
            self._abort(range(index, index + 1))
        return read


def results(handles: list[Handle]) -> list[list[Completion]]:
    """Waits for all continuations of all requests, and returns them."""
    stopping = [handle for handle in handles if handle.options.stop]
    for handle in handles:
        for _ in handle.events():
            # A stop text is found only where events are read: else a request would run on behind its own.
            for other in stopping:
                deque(other._new_events(), maxlen=0)
    return [[completion for completion in handle.completions if completion is not None] for handle in handles]


def why(error: BaseException) -> str:
    """Returns the message for a request that this error ended."""
    return str(error) if isinstance(error, WeightsDeleted) else f"the engine failed: {type(error).__name__}: {error}"


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
