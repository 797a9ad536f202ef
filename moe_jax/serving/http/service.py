"""The state that all endpoints share: an engine, a tokenizer, the requests that run, and the end of them all."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from moe_jax.serving.defaults import Defaults, room_behind
from moe_jax.serving.engine import Engine
from moe_jax.serving.handle import Handle
from moe_jax.serving.http.choices import Choice
from moe_jax.serving.http.errors import ApiError, took_too_long
from moe_jax.serving.http.metrics import Metrics
from moe_jax.serving.http.settings import ServerSettings
from moe_jax.serving.http.worker import Worker
from moe_jax.serving.loop import QueueFull
from moe_jax.serving.request import SamplingOptions

logger = logging.getLogger("moe_jax.serving")

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
        # Long prompts wait for each other there, and not in the event loop, where all streams would wait.
        self._tokenizing = Worker("tokenizing")
        self._waits: set[asyncio.Timeout] = set()
        """The ends of the time that requests wait for tokens of their texts."""

    async def encode[T](self, encode: Callable[[], T]) -> T:
        """Runs a function that turns text into tokens, beside the event loop.

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
                return await self._tokenizing.run(encode)
        except TimeoutError as error:
            raise ApiError(503, "the server is stopping") if self.stopping else took_too_long(seconds) from error
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        finally:
            self._waits.discard(wait)

    async def decode(self, texts: Sequence[list[int]]) -> list[str]:
        """Returns the texts of lists of token ids, special tokens too.

        Raises:
            ApiError: As `encode`, or a token is outside the vocabulary.
        """
        size = self.engine.config.vocab_size
        if outside := [token for tokens in texts for token in tokens if not 0 <= token < size]:
            raise ApiError(400, f"token {outside[0]} is outside the vocabulary of {size}")
        return await self.encode(lambda: [self.tokenizer.decode(tokens) for tokens in texts])

    def check_model(self, name: Any) -> None:
        """Raises ApiError if a request is for another model."""
        if name is not None and name != self.settings.model_name:
            raise ApiError(
                404,
                f"there is no model {name!r:.80}; this server has {self.settings.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def submit(self, prompts: Sequence[list[int]], options: SamplingOptions) -> list[Choice]:
        """Gives a request to the engine for each prompt, and returns the `n` choices of each.

        Raises:
            ApiError: A prompt or the options are wrong, the queue is full, or the engine has failed. Nothing runs then.
        """
        if self.stopping:
            raise ApiError(503, "the server is stopping")
        if options.n * len(prompts) > self.settings.max_choices:
            raise ApiError(400, f"n times the number of prompts must be at most {self.settings.max_choices}", param="n")
        if options.n * len(prompts) > (most := self.engine.capacity):
            # A full queue's 429 would make the client come again for ever.
            raise ApiError(400, f"n times the number of prompts must be at most {most}: so many run or wait", param="prompt")
        choices: list[Choice] = []
        try:
            for prompt in prompts:
                self._submit(prompt, options, choices)
        except Exception as error:
            self.release(choices)
            raise self._answer_for(error) from error
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
        if not self._tokenizing.close(1):
            logger.warning("the tokenizer still works on a text that nobody waits for: the server stops without it")

    def _submit(self, prompt: list[int], options: SamplingOptions, choices: list[Choice]) -> None:
        if not options.max_new_tokens:
            options = dataclasses.replace(options, max_new_tokens=room_behind(prompt, self.engine.limits))
        handle = self.engine.submit(prompt, options)
        self.running.add(handle)
        choices += [Choice(len(choices) + number, handle, number) for number in range(options.n)]

    def _answer_for(self, error: Exception) -> Exception:
        if isinstance(error, QueueFull):
            return ApiError(429, f"the server has no room for another request now: {error}", code="queue_full")
        if isinstance(error, ValueError):
            message = str(error).replace("max_new_tokens", "max_tokens")
            too_long = "exceed the" in message
            return ApiError(400, message, code="context_length_exceeded" if too_long else None)
        if isinstance(error, RuntimeError):
            return ApiError(503, "the engine does not run any more")
        return error
