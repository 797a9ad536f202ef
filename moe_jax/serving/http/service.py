"""The state that all endpoints share: an engine, a tokenizer, running requests, and the shutdown."""

import asyncio
import contextlib
import functools
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from moe_jax.checkpoint.tokenizer import beginning
from moe_jax.models.decoder import Decoder
from moe_jax.serving.conversation import Defaults
from moe_jax.serving.engine import Engine
from moe_jax.serving.handle import Event, Handle
from moe_jax.serving.http.body import SHARED, ApiError, took_too_long
from moe_jax.serving.http.record import Metrics, RequestRecord
from moe_jax.serving.loop import QueueFull
from moe_jax.serving.request import SamplingOptions


@dataclass(frozen=True)
class ServerSettings:
    """The name that the model is served under, and limits that keep one client from hurting others."""

    model_name: str
    other_names: tuple[str, ...] = ()
    """Further names of the same model."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may read answers (CORS), such as https://example.org; `*`: all."""
    api_key: str | None = None
    """The key that requests must carry, stripped of surrounding space; None: no key."""
    page: bool = False
    """True: `/` is a page to chat with the model, which also shows the engine's numbers."""
    admin_key: str | None = None
    """The key for `admin.PATHS`; None: these paths do not exist."""
    hosts: tuple[str, ...] = ()
    """Names other than localhost that the header Host may have, if there is no key and only this machine can connect. `*`: any
    name.
    """
    max_body_bytes: int = 8 << 20
    max_choices: int = 128
    """Largest number of continuations that one request may ask for: its prompts times n."""
    max_connections: int = 2048
    body_seconds: float = 30
    """Time within which a request's body must arrive."""
    request_seconds: float = 3600
    """Time after which a request is aborted, including waits for a slow reader."""
    shutdown_seconds: float = 30
    """Time that running requests have to finish after a signal to stop."""

    def __post_init__(self):
        if not all((self.model_name, *self.other_names)):
            raise ValueError("model_name must not be empty")
        for name in ("api_key", "admin_key"):
            if (key := getattr(self, name)) is not None:
                # A header's value arrives without surrounding space.
                object.__setattr__(self, name, key := key.strip())
                if not (key and key.isascii() and key.isprintable()):
                    raise ValueError(f"{name} must be printable ASCII, and not empty")
        names = ("max_body_bytes", "max_choices", "max_connections", "body_seconds", "request_seconds")
        wrong = [name for name in names if not getattr(self, name) > 0]
        wrong += [] if self.shutdown_seconds >= 0 else ["shutdown_seconds"]
        if wrong:
            raise ValueError("; ".join(f"{name} must be above 0; got {getattr(self, name)}" for name in wrong))


logger = logging.getLogger("moe_jax.serving")

LONG_BODY = 1 << 16
"""Bytes of a request above which its text is tokenized in a separate thread, so that short texts do not wait.

A core tokenizes one or two megabytes in a second.
"""

CLOSE_SECONDS = 60
"""Time limit for the engine's last step: otherwise a hanging device would block the shutdown forever."""


class Choice:
    """A continuation of a request: `index` is its number in the answer, `number` its number in the handle.

    `only_scores`: the prompt is scored, and the token that the engine draws is dropped.
    """

    def __init__(self, index: int, handle: Handle, number: int, only_scores: bool = False):
        self.index, self.handle, self.number, self.only_scores = index, handle, number, only_scores
        self.num_tokens = 0
        """New tokens up to its end, including the one that ended it."""
        self.finished = False

    @property
    def cached_tokens(self) -> int:
        """The number of the prompt's tokens found in the cache, counted once for all choices of a prompt."""
        completion = self.handle.completions[0]
        return completion.cached_tokens if completion is not None and self.number == 0 else 0

    def read(self, event: Event) -> Event:
        """Returns an event as the client sees it; counts its token, and notes the end."""
        if self.only_scores and event.finish_reason in ("stop", "length"):
            event = Event(event.index, None, finish_reason="length")
        self.num_tokens += event.token is not None
        self.finished |= event.finish_reason is not None
        return event


class Service:
    """The state of a server, whose engine has a tokenizer.

    Args:
      load: reads a model of the engine's form from a folder; None: the server accepts no new weights.
    """

    def __init__(
        self,
        engine: Engine,
        defaults: Defaults,
        settings: ServerSettings,
        load: Callable[[str], Decoder] | None = None,
    ):
        self.load, self.administration = load, Worker("administration")
        self.engine = engine
        self.tokenizer: Any = engine.tokenizer
        self.defaults = defaults
        self.settings = settings
        self.metrics = Metrics(engine)
        self.created = int(time.time())
        self.running: set[Handle] = set()
        self.connections: Collection = ()
        """The server's open connections."""
        self.hosts: frozenset[str] | None = None
        """Names that the header Host may have; None: any."""
        self.stopping = False
        """True once the server is stopping: it accepts no more requests."""
        # Prompts wait for each other in threads; in the event loop all streams would wait for them.
        self._short_texts, self._long_texts = Worker("tokenizing"), Worker("tokenizing long texts")
        # The first call turns off truncation set by a tokenizer's file, which fails while another thread tokenizes.
        beginning(self.tokenizer)
        # The first call reads the vocabulary, which would delay all streams later.
        fewest_tokens(self.tokenizer, "x")
        # So does the first grammar. A tokenizer without grammars refuses them request by request.
        with contextlib.suppress(ValueError):
            engine.grammars  # noqa: B018
        self._waits: set[asyncio.Timeout] = set()
        """Timeouts of requests that wait for their texts' tokens."""

    async def encode[T](self, encode: Callable[[], T], record: RequestRecord, field: str) -> T:
        """Runs a function that turns the text in a field of a request into tokens, outside the event loop.

        Raises:
            ApiError: The function raised ValueError, the request timed out, or the server stops before the function ends.
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
            message = str(error).replace("template_options", "chat_template_kwargs")
            raise ApiError(400, message, param=getattr(error, "field", field)) from error
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
        """Raises ApiError if the text's length alone proves that it has more tokens than a request can have."""
        most = self.engine.limits.longest_request
        if (fewest := fewest_tokens(self.tokenizer, text)) > most:
            message = f"the text has at least {fewest} tokens, which exceed the {most} of a request"
            raise ApiError(400, message, param=field, code="context_length_exceeded")

    @property
    def model_names(self) -> list[str]:
        """The names that requests may have in `model`, the server's own first."""
        return [self.settings.model_name, *self.settings.other_names]

    def check_model(self, name: Any, param: str = "model") -> str | None:
        """Returns the name of the adapter that a request is for; None: it is for the model itself.

        Raises:
            ApiError: There is no model and no adapter of this name.
        """
        if name is None or name in self.model_names:
            return None
        adapters = [adapter.name for adapter in self.engine.adapters]
        if name not in adapters:
            known = ", ".join(map(repr, [*self.model_names, *adapters]))
            message = f"there is no model {name!r:.80}; this server has {known:.200}"
            raise ApiError(404, message, param=param, code="model_not_found")
        return name

    def submit(self, prompts: Sequence[list[int]], options: SamplingOptions, field: str) -> list[Choice]:
        """Sends the engine a request for each prompt of a field, and returns the `n` choices of each.

        With `max_new_tokens` 0 the prompts are only scored: the engine draws a token that no client sees.

        Raises:
            ApiError: A prompt or the options are wrong, the queue is full, or the engine has failed. Nothing runs then.
        """
        if self.stopping:
            raise ApiError(503, "the server is stopping")
        if options.n * len(prompts) > self.settings.max_choices:
            raise ApiError(400, f"n times the number of prompts must be at most {self.settings.max_choices}", param="n")
        if options.n * len(prompts) > (most := self.engine.capacity):
            # A full queue's 429 would make the client retry forever.
            raise ApiError(400, f"n times the number of prompts must be at most {most}: no more may run or wait", param=field)
        choices: list[Choice] = []
        only_scores = options.max_new_tokens == 0
        options = replace(options, max_new_tokens=1) if only_scores else options
        try:
            for prompt in prompts:
                handle = self.engine.submit(prompt, options)
                self.running.add(handle)
                choices += [Choice(len(choices) + number, handle, number, only_scores) for number in range(options.n)]
        except Exception as error:
            self.release(choices)
            raise _answer_for(error, field) from error
        return choices

    def release(self, choices: Sequence[Choice]) -> None:
        """Aborts the choices of a request that still run, and forgets it."""
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
        """Ends the engine and the threads, after all requests ended or timed out. Anything that takes longer than
        `CLOSE_SECONDS` dies with the process.
        """
        closing = Worker("closing")
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await closing.run(lambda: self.engine.close(drain=False))
        except TimeoutError:
            logger.warning("a step of the engine does not end: after %g seconds the server stops without it", CLOSE_SECONDS)
        closing.close()
        self.administration.close()
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
        return ApiError(503, "the engine is no longer running")
    return error


class Worker:
    """A thread that runs functions in turn. It does not block the exit: a function that never ends dies with the process."""

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[list[tuple[Callable[[], Any], Future]] | None] = queue.SimpleQueue()
        """Lists of one call each, empty if the caller was cancelled; None ends the thread."""
        # Python would join an executor's thread at exit.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run[T](self, function: Callable[[], T]) -> T:
        """Runs a function in the thread, and returns its result or raises its error.

        If the caller is cancelled, a waiting function is skipped, and the result of a running one is dropped.
        """
        done: Future[T] = Future()
        call = [(function, done)]
        self._calls.put(call)
        try:
            return await asyncio.wrap_future(done)
        finally:
            # Else calls queued after a function that never ends would keep their data alive.
            call.clear()

    def close(self, seconds: float = 0.0) -> bool:
        """Ends the thread after its waiting functions; returns True if it ended within `seconds`."""
        self._calls.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._run_next():
            pass

    # A separate function: else the last call and its data would live until the next one.
    def _run_next(self) -> bool:
        call = self._calls.get()
        if call is None:
            return False
        for function, done in call.copy():
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(function())
                except BaseException as error:  # raised again in the waiting caller
                    done.set_exception(error)
        return True


KEPT = {"ByteLevel", "Digits", "Metaspace", "NFC", "Prepend", "Replace", "Sequence", "Split"}
"""Steps of a tokenizer before its merges that drop no byte, unless `_drops` finds one. NFC may write characters in fewer."""

MOST_SHRUNK = 4
"""Bytes of characters for each byte of their NFC form, rounded up: seven of a Greek iota with two marks become two."""


def fewest_tokens(tokenizer: Any, text: str) -> int:
    """Returns a lower bound on a text's number of tokens, from its length alone; 0 if the tokenizer may drop text."""
    if (longest := _longest_token(tokenizer)) is None:
        return 0
    return len(text.encode()) // (longest * (1 if text.isascii() else MOST_SHRUNK))


@functools.lru_cache(maxsize=4)
def _longest_token(tokenizer: Any) -> int | None:
    """Returns the maximum number of a text's bytes per token; None unless the tokenizer is a byte-level BPE that drops none."""
    raw, vocab = getattr(tokenizer, "backend_tokenizer", None), tokenizer.get_vocab()
    if raw is None or type(raw.model).__name__ != "BPE":
        return None
    steps = [step for part in (raw.normalizer, raw.pre_tokenizer) if part is not None for step in _steps(part)]
    added = tokenizer.added_tokens_decoder.values()
    if any(map(_drops, steps)) or any(token.lstrip or token.rstrip for token in added):
        return None
    of_bytes = any(step["type"] == "ByteLevel" for step in steps)
    # Without a token for each byte, all unknown text could be one token, or none.
    single = (
        ByteLevel.alphabet() if of_bytes else [f"<0x{byte:02X}>" for byte in range(256)] if raw.model.byte_fallback else [""]
    )
    if not set(single) <= vocab.keys():
        return None
    return max(
        *(len(name) if of_bytes else len(name.encode()) for name in vocab), *(len(each.content.encode()) for each in added)
    )


def _steps(part: Any) -> list[dict[str, Any]]:
    """Returns the settings of a normalizer or pre-tokenizer, and of all its parts."""
    found = [json.loads(part.__getstate__())]
    for step in found:
        found += [*step.get("normalizers", ()), *step.get("pretokenizers", ())]
    return found


def _drops(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        replaced = step["pattern"].get("String")
        return replaced is None or len(step["content"].encode()) < len(replaced.encode())
    return step["type"] not in KEPT or step.get("behavior") == "Removed"
