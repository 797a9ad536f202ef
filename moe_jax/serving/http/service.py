"""The state that all endpoints share: an engine, a tokenizer, the requests that run, and the end of them all."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from moe_jax.checkpoint.tokenizer import beginning
from moe_jax.serving.defaults import Defaults
from moe_jax.serving.engine import Engine
from moe_jax.serving.handle import Handle
from moe_jax.serving.http.body import SHARED
from moe_jax.serving.http.choices import Choice
from moe_jax.serving.http.errors import ApiError, took_too_long
from moe_jax.serving.http.record import Metrics, RequestRecord
from moe_jax.serving.loop import QueueFull
from moe_jax.serving.request import SamplingOptions
from moe_jax.serving.text import fewest_tokens


@dataclass(frozen=True)
class ServerSettings:
    """The name that the model is served under, and limits that keep one client from hurting others."""

    model_name: str
    api_key: str | None = None
    """The key that requests must carry, without the space around it; None: none."""
    hosts: tuple[str, ...] = ()
    """Names beyond localhost that the header Host may have, where no key is asked for and only this machine can connect.

    `*`: any name.
    """
    max_body_bytes: int = 8 << 20
    max_choices: int = 128
    """Largest number of continuations that one request may ask for: its prompts times n."""
    max_connections: int = 2048
    body_seconds: float = 30
    """Time in which a request's body must have come."""
    request_seconds: float = 3600
    """Time after which a request is aborted, with what it waits for a slow reader."""
    shutdown_seconds: float = 30
    """Time that running requests have to finish once the server was told to stop."""

    def __post_init__(self):
        if not self.model_name:
            raise ValueError("model_name must not be empty")
        if self.api_key is not None:
            # A header's value comes without the space around it.
            object.__setattr__(self, "api_key", self.api_key.strip())
            if not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
                raise ValueError("api_key must be printable ASCII, and not empty")
        names = ("max_body_bytes", "max_choices", "max_connections", "body_seconds", "request_seconds")
        wrong = [name for name in names if not getattr(self, name) > 0]
        wrong += [] if self.shutdown_seconds >= 0 else ["shutdown_seconds"]
        if wrong:
            raise ValueError("; ".join(f"{name} must be above 0; got {getattr(self, name)}" for name in wrong))


logger = logging.getLogger("moe_jax.serving")

LONG_BODY = 1 << 16
"""Bytes of a request beyond which its text is tokenized apart from short ones, which would wait for it.

A core tokenizes one or two megabytes in a second.
"""

CLOSE_SECONDS = 60
"""Time that the engine has for its last step: a device that hangs would else hold up the end for ever."""


class Service:
    """The state of a server, whose engine has a tokenizer."""

    def __init__(self, engine: Engine, defaults: Defaults, settings: ServerSettings):
        self.engine = engine
        self.tokenizer: Any = engine.tokenizer
        self.defaults = defaults
        self.settings = settings
        self.metrics = Metrics(engine.stats)
        self.created = int(time.time())
        self.running: set[Handle] = set()
        self.connections: Collection = ()
        """The server's open connections."""
        self.hosts: frozenset[str] | None = None
        """Names that the header Host may have; None: any."""
        self.stopping = False
        """True once the server was told to stop: it takes no further requests."""
        # Prompts wait for each other there, and not in the event loop, where all streams would wait.
        self._short_texts, self._long_texts = Worker("tokenizing"), Worker("tokenizing long texts")
        # A first call switches off truncation that a tokenizer's file sets, which fails while another thread tokenizes.
        beginning(self.tokenizer)
        # The vocabulary is read at the first call, which would hold up all streams later.
        fewest_tokens(self.tokenizer, "x")
        self._waits: set[asyncio.Timeout] = set()
        """The ends of the time that requests wait for tokens of their texts."""

    async def encode[T](self, encode: Callable[[], T], record: RequestRecord, field: str) -> T:
        """Runs a function that turns the text in a field of a request into tokens, outside the event loop.

        Raises:
            ApiError: The function raised ValueError, the request's time is over, or the server stops before the function ends.
        """
        if self.stopping:
            raise ApiError(503, "the server is stopping")
        seconds = self.settings.request_seconds
        wait = asyncio.timeout(seconds)
        self._waits.add(wait)
        try:
            async with wait:
                return await (self._long_texts if record.body_bytes > LONG_BODY else self._short_texts).run(encode)
        except TimeoutError as error:
            raise ApiError(503, "the server is stopping") if self.stopping else took_too_long(seconds) from error
        except ValueError as error:
            raise ApiError(400, str(error), param=field) from error
        finally:
            self._waits.discard(wait)

    async def decode(self, texts: Sequence[list[int]], record: RequestRecord, field: str) -> list[str]:
        """Returns the texts of lists of token ids, special tokens too.

        Raises:
            ApiError: As `encode`, or a token is outside the vocabulary.
        """
        size = self.engine.config.vocab_size
        if outside := [token for tokens in texts for token in tokens if not 0 <= token < size]:
            raise ApiError(400, f"token {outside[0]} is outside the vocabulary of {size}", param=field)
        return await self.encode(lambda: [self.tokenizer.decode(tokens) for tokens in texts], record, field)

    def check_length(self, text: str, field: str) -> None:
        """Raises ApiError if the text has more tokens than a request can have, where its length alone tells so."""
        most = self.engine.limits.longest_request
        if (fewest := fewest_tokens(self.tokenizer, text)) > most:
            message = f"the text has at least {fewest} tokens, which exceed the {most} of a request"
            raise ApiError(400, message, param=field, code="context_length_exceeded")

    def check_model(self, name: Any) -> None:
        """Raises ApiError if a request is for another model."""
        if name is not None and name != self.settings.model_name:
            raise ApiError(
                404,
                f"there is no model {name!r:.80}; this server has {self.settings.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def submit(self, prompts: Sequence[list[int]], options: SamplingOptions, field: str) -> list[Choice]:
        """Sends the engine a request for each prompt of a field, and returns the `n` choices of each.

        Raises:
            ApiError: A prompt or the options are wrong, the queue is full, or the engine has failed. Nothing runs then.
        """
        if self.stopping:
            raise ApiError(503, "the server is stopping")
        if options.n * len(prompts) > self.settings.max_choices:
            raise ApiError(400, f"n times the number of prompts must be at most {self.settings.max_choices}", param="n")
        if options.n * len(prompts) > (most := self.engine.capacity):
            # A full queue's 429 would make the client come again for ever.
            raise ApiError(400, f"n times the number of prompts must be at most {most}: no more may run or wait", param=field)
        choices: list[Choice] = []
        try:
            for prompt in prompts:
                handle = self.engine.submit(prompt, options)
                self.running.add(handle)
                choices += [Choice(len(choices) + number, handle, number) for number in range(options.n)]
        except Exception as error:
            self.release(choices)
            raise _answer_for(error, field) from error
        return choices

    def release(self, choices: Sequence[Choice]) -> None:
        """Aborts what still runs of a request, and forgets it."""
        for choice in choices:
            if not choice.finished:
                choice.handle.abort()
            self.running.discard(choice.handle)

    def abort_all(self) -> None:
        """Aborts all requests: their clients get an error."""
        for handle in self.running:
            handle.abort()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0)

    async def close(self) -> None:
        """Ends the engine and the threads. All requests have ended, or their time to do so has.

        What does not end within `CLOSE_SECONDS` is left to the end of the process.
        """
        closing = Worker("closing")
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await closing.run(lambda: self.engine.close(drain=False))
        except TimeoutError:
            logger.warning("a step of the engine does not end: after %g seconds the server stops without it", CLOSE_SECONDS)
        closing.close()
        if not all([worker.close(1) for worker in (self._short_texts, self._long_texts)]):
            logger.warning("the tokenizer still works on a text that nobody waits for: the server stops without it")


def _answer_for(error: Exception, field: str) -> Exception:
    if isinstance(error, QueueFull):
        return ApiError(429, f"the server has no room for another request now: {error}", code="queue_full")
    if isinstance(error, ValueError):
        message = str(error).replace("max_new_tokens", "max_tokens")
        # The engine names an option first, and a prompt elsewhere.
        first = message.partition(" ")[0]
        param = first if first in SHARED | {"logprobs"} else field
        return ApiError(400, message, param=param, code="context_length_exceeded" if "exceed the" in message else None)
    if isinstance(error, RuntimeError):
        return ApiError(503, "the engine does not run any more")
    return error


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
