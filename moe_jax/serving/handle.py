"""The receiving end of a request: its tokens and text as they arrive, for threads and for asyncio.

Text contains only complete characters, and is held back while it could begin a stop text.
"""

import asyncio
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

from moe_jax.serving.request import Completion, DrawnToken, FinishReason, SamplingOptions


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
    """The text that the token completes, often exactly its own, sometimes empty. None if the engine has no tokenizer."""


class WeightsDeleted(RuntimeError):
    """The arrays that an engine shares with its model were deleted. `Engine.update` replaces them."""

    def __init__(self) -> None:
        super().__init__(
            "the model's arrays were deleted, most likely because a training step donated them: call engine.update(model) with "
            "the trained model, and give the engine a copy of its own if requests come during a step"
        )


class ReplicaFailed(RuntimeError):
    """A device of several has failed, and ended the requests of its group. Other groups continue."""

    def __init__(self, devices: str, error: BaseException):
        what = "one of the engine's devices" if "," in devices else "the engine's device"
        super().__init__(f"{what} {devices} failed: {type(error).__name__}: {error}")


Listener = SimpleQueue[None] | tuple[asyncio.AbstractEventLoop, asyncio.Event]
"""The queue from which a thread waits for a signal; or the event of a coroutine, and its loop."""

Delivery = tuple[int, list[DrawnToken], FinishReason | None]
"""The number of a continuation, its new tokens, and why it ends with the last of them; no token if it ends without one."""


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
        """The continuations that have ended; each has its text once its last event was read."""
        self.prompt_logprobs: list[dict[int, float] | None] = [None]
        """Log-probabilities of the prompt's tokens so far, from the first continuation. The first token has none."""
        self.error: BaseException | None = None
        self._abort = abort
        self._texts: list[ContinuationText] | None = None
        if tokenizer is not None:
            self._texts = [ContinuationText(tokenizer, prompt, options) for _ in range(n)]
        self._deliveries: deque[Delivery] = deque()
        self._remaining = n
        """Continuations whose last event was not read."""
        self._came: SimpleQueue[None] = SimpleQueue()
        self._listener: Listener = self._came
        self._waits_for_ends = False
        """True if its reader needs no signal, and no events, before a continuation ends."""

    def abort(self) -> None:
        """Ends all continuations that have not ended yet; their last events follow."""
        self._abort(range(len(self.completions)))

    def events(self) -> Iterator[Event]:
        """Yields the events as they arrive, and returns after the last one."""
        self._waits_for_ends = False
        while self._remaining:
            self._came.get()
            yield from self._new_events()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yields the events as they arrive, in an event loop."""
        self._waits_for_ends = False
        came = asyncio.Event()
        self._listener = (asyncio.get_running_loop(), came)
        # Events that were delivered before this line signaled another listener: without it, the loop would wait for the next.
        came.set()
        while self._remaining:
            await came.wait()
            came.clear()
            for event in self._new_events():
                yield event

    def result(self) -> list[Completion]:
        """Waits for all continuations and returns them."""
        return next(as_completed([self]))[1]

    def deliver(self, index: int, new: list[DrawnToken], reason: FinishReason | None) -> Listener | None:
        """Adds a continuation's tokens or its end; the engine's thread calls this. Returns the listener to `wake`, if any."""
        if reason is None and self._waits_for_ends:
            return None
        self._deliveries.append((index, new, reason))
        return self._listener

    def fail(self, error: BaseException) -> Listener:
        """Ends the request with an error. Returns the listener to `wake`."""
        self.error = error
        return self._listener

    def _new_events(self) -> Iterator[Event]:
        while self._deliveries:
            index, new, reason = self._deliveries.popleft()
            self._remaining -= reason is not None
            if not self._waits_for_ends:
                yield from filter(None, map(self._with_text, self._events_of(index, new, reason)))
        if self.error is not None:
            raise RuntimeError(why(self.error)) from self.error

    def _events_of(self, index: int, new: list[DrawnToken], reason: FinishReason | None) -> Iterator[Event]:
        keeps = self.options.logprobs is not None
        for number, (token, logprob, tops) in enumerate(new, 1):
            yield Event(index, token, logprob if keeps else None, tops, reason if number == len(new) else None)
        if not new:
            yield Event(index, None, finish_reason=reason)

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


def as_completed(handles: Sequence[Handle]) -> Iterator[tuple[int, list[Completion]]]:
    """Yields the index and the continuations of each request as soon as all of these have ended.

    It reads the events of all requests, in the caller's thread. Stop texts are found only while it does.
    """
    came: SimpleQueue[None] = SimpleQueue()
    for handle in handles:
        # A signal for each token would cost the engine more time than its steps.
        handle._waits_for_ends = handle._texts is None
        handle._came = handle._listener = came
    # Earlier steps have signaled other listeners.
    came.put(None)
    open_ones = dict(enumerate(handles))
    while open_ones:
        came.get()
        for index, handle in list(open_ones.items()):
            deque(handle._new_events(), maxlen=0)
            if not handle._remaining:
                del open_ones[index]
                yield index, [completion for completion in handle.completions if completion is not None]


def why(error: BaseException) -> str:
    """Returns the error message for a request that this error ended."""
    is_sentence = isinstance(error, WeightsDeleted | ReplicaFailed)
    return str(error) if is_sentence else f"the engine failed: {type(error).__name__}: {error}"


def wake(listeners: set[Listener]) -> None:
    """Wakes threads, and coroutines with one call into each event loop: a call for each of 256 would take milliseconds."""
    coroutines: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for listener in listeners:
        if isinstance(listener, tuple):
            coroutines.setdefault(listener[0], []).append(listener[1])
        else:
            listener.put(None)
    for loop, events in coroutines.items():
        try:
            loop.call_soon_threadsafe(_set_all, events)
        except RuntimeError:  # the loop is closed, and all its waiting coroutines with it
            pass


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()


class ContinuationText:
    """The text of one continuation, as its events are read.

    Without `include_stop`, a token that ends the continuation is not part of its text, and a stop text is cut off. Tokens after
    the one that completes a stop text are dropped.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], options: SamplingOptions):
        search = StopSearch(options.stop, options.include_stop)
        self._stream = TextStream(tokenizer, prompt, search, skips_special=options.skip_special_tokens)
        self._shows_end, self._min_tokens = options.include_stop, options.min_tokens
        self._num_prompt = len(prompt)
        self._num_tokens = 0
        self._pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        """True once a stop text was found."""
        return self._stream.stopped

    def read(self, event: Event) -> Event | None:
        """Returns an engine's event with its text; None if it only has a dropped token."""
        stream, reason, text = self._stream, event.finish_reason, ""
        if stream.stopped:
            if reason is None:
                return None
            event = Event(event.index, None)
        elif event.token is not None:
            self._num_tokens += 1
            stream.searches = self._num_tokens > self._min_tokens
            text = "" if reason == "stop" and not self._shows_end else stream.add(event.token)
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


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The decoded form of bytes that are not a character, or not yet."""

CONTEXT = 4
"""Number of tokens before the new ones that are decoded with them.

Some tokenizers drop the space before a text's first token. A character has at most 4 bytes, and a token at least one.
"""

MAX_WINDOW = 16
"""Number of decoded tokens above which all but `CONTEXT` of them are dropped."""


class TextStream:
    """The text of one sequence after its prompt, usually without special tokens, cut where a stop text begins.

    The pieces add up to the tokenizer's decoding of the whole, without its clean-up of spaces. Each token costs the decoding of
    at most `MAX_WINDOW` tokens. Runs of single-byte tokens are decoded once, at their end.

    Attributes:
      searches: False while stop texts do not count.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_tokens: Sequence[int] = (),
        stop: "Iterable[str] | StopSearch" = (),
        *,
        skips_special: bool = True,
    ):
        self._tokenizer, self._skips = tokenizer, skips_special
        self._shown, self._bytes, special = _kinds_of_tokens(tokenizer)
        self._shown = self._shown if skips_special else self._shown | special
        self._stop = stop if isinstance(stop, StopSearch) else StopSearch(stop)
        self.searches = True
        self._window = self._end_of(prompt_tokens)
        self._given = len(self._stable(self._decoded()))
        """Number of the window's characters that belong to the prompt or were returned."""

    @property
    def stopped(self) -> bool:
        """True once a stop text was found; all later text is dropped."""
        return self._stop.found

    def add(self, token: int) -> str:
        """Returns the text that the next token completes: often exactly its own, sometimes none."""
        if self.stopped or token not in self._shown:
            return ""
        self._window.append(token)
        # A later byte can make a whole run of byte tokens invalid, or valid again.
        if token in self._bytes:
            return ""
        text = self._decoded()
        end = max(len(self._stable(text)), self._given)
        new, self._given = text[self._given : end], end
        if len(self._window) > MAX_WINDOW:
            held = len(text) - end
            del self._window[:-CONTEXT]
            self._given = len(self._decoded()) - held
        return self._stop.add(new) if self.searches else new

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the sequence."""
        if self.stopped:
            return ""
        text = self._decoded()
        new, self._given = text[self._given :], len(text)
        return self._stop.add(new) + self._stop.flush()

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False)

    def _stable(self, text: str) -> str:
        """Returns the text without a last character that later bytes may complete."""
        return text.removesuffix(REPLACEMENT)

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Returns the last tokens of a prompt that have text, including the whole of a run of byte tokens."""
        found: list[int] = []
        for token in reversed(prompt):
            if len(found) >= CONTEXT and found[-1] not in self._bytes:
                break
            if token in self._shown:
                found.append(token)
        return found[::-1]


class StopSearch:
    """Finds stop texts in a text that comes in pieces; the result does not depend on where one piece ends.

    The stop text that is complete first ends the text. If several end at the same character, the longest counts. `includes`:
    it is part of the text.
    """

    def __init__(self, stop: Iterable[str], includes: bool = False):
        self._stop, self._includes = tuple(stop), includes
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Returns the text before the first stop text, except an end in which one might begin."""
        if self.found:
            return ""
        text = self._held + text
        places = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            end, start = min(places)
            return text[: end if self._includes else start]
        held = self._num_held(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Returns the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Returns the length of the longest end of `text` with which a stop text begins."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)


@functools.lru_cache(maxsize=4)
def _kinds_of_tokens(tokenizer: Any) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
    """Returns the tokens with text, the single-byte tokens, and the special tokens, such as the end of a message.

    Sentencepiece uses single-byte tokens for unknown characters. Reads the vocabulary once, which takes about 0.1 s.
    """
    vocab = tokenizer.get_vocab()
    special = frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
    names = (f"<0x{byte:02X}>" for byte in range(256))
    return frozenset(vocab.values()) - special, frozenset(vocab[name] for name in names if name in vocab), special
