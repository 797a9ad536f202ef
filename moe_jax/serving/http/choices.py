"""One continuation of a request: from the engine's events to pieces of text with log-probabilities."""

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from moe_jax.serving.handle import Event, Handle, NewToken
from moe_jax.serving.http.errors import ApiError
from moe_jax.serving.text import REPLACEMENT


@dataclass(frozen=True)
class TextPiece:
    """Text that new tokens have completed."""

    index: int
    text: str
    logprobs: list[NewToken]
    """Log-probabilities of the tokens since the piece before, if the request asks for them."""
    finish_reason: str | None


class Choice:
    """A continuation while it runs."""

    def __init__(self, index: int, handle: Handle, number: int):
        self.index = index
        """The number of the choice in its answer."""
        self.handle = handle
        self.number = number
        """The number of the continuation in its handle."""
        self.num_tokens = 0
        """New tokens up to its end, with the one that ended it."""
        self.finished = False
        self._logprobs: list[NewToken] = []

    @property
    def cached_tokens(self) -> int:
        """The number of the prompt's tokens that were not computed again, counted once for all choices of a prompt."""
        completion = self.handle.completions[0]
        return completion.cached_tokens if completion is not None and self.number == 0 else 0

    def take(self, event: Event) -> TextPiece | None:
        """Returns the piece that an event completes; None without any.

        Raises:
            ApiError: The continuation was aborted, or ended with an error.
        """
        text, reason = event.text, event.finish_reason
        assert text is not None
        if event.token is not None:
            self.num_tokens += 1
            if event.logprob is not None:
                self._logprobs.append(NewToken(event.token, event.logprob, event.top_logprobs))
        if reason is not None:
            self.finished = True
            if reason not in ("stop", "length"):
                why = "was aborted" if reason == "abort" else "ended with an error"
                raise ApiError(503 if reason == "abort" else 500, f"the request {why}")
        if not (text or reason):
            return None
        logprobs, self._logprobs = self._logprobs, []
        return TextPiece(self.index, text, logprobs, reason)


async def follow(choices: Sequence[Choice], emit: Callable[[TextPiece], Awaitable[None]]) -> None:
    """Emits the pieces of all continuations of one prompt until their end.

    Raises:
        ApiError: A continuation was aborted, or the engine failed.
    """
    handle = choices[0].handle
    try:
        async for event in handle:
            if (piece := choices[event.index].take(event)) is not None:
                await emit(piece)
    except RuntimeError as error:
        if handle.error is None:
            raise
        raise ApiError(503, "the engine does not run any more") from error


def completion_logprobs(tokenizer: Any, tokens: Sequence[NewToken], offset: int) -> dict[str, Any]:
    """Returns the lists that a text completion has; `offset` is the number of characters before the first token."""
    texts = [token_text(tokenizer, each.token) for each in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [_by_text(tokenizer, each) if each.top_logprobs else None for each in tokens],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)),
    }


def _by_text(tokenizer: Any, drawn: NewToken) -> dict[str, float]:
    """Returns the alternatives and the drawn token by their texts: of tokens with one text, the likeliest.

    All parts of characters have the same text.
    """
    found: dict[str, float] = {}
    for token, logprob in ((drawn.top_logprobs or {}) | {drawn.token: drawn.logprob}).items():
        text = token_text(tokenizer, token)
        found[text] = max(logprob, found.get(text, logprob))
    return found


def chat_logprobs(tokenizer: Any, tokens: Sequence[NewToken]) -> dict[str, Any]:
    """Returns the list of tokens that an answer in a chat has."""
    content = [
        _entry(tokenizer, each.token, each.logprob)
        | {"top_logprobs": [_entry(tokenizer, token, logprob) for token, logprob in (each.top_logprobs or {}).items()]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


# Kept: an answer of 1,000 tokens with 20 alternatives each asks 21,000 times, and all streams would wait for a second.
@functools.lru_cache(maxsize=1 << 16)
def token_text(tokenizer: Any, token: int) -> str:
    """Returns the text of a token alone."""
    return tokenizer.decode([token])


@functools.lru_cache(maxsize=1 << 16)
def token_bytes(tokenizer: Any, token: int) -> list[int] | None:
    """Returns the bytes of a token, also where they are a part of a character; None if the tokenizer does not tell them."""
    text = token_text(tokenizer, token)
    if REPLACEMENT not in text:
        return list(text.encode())
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece.startswith("<0x"):
        return [int(piece[3:5], 16)]
    table = _byte_of_letter()
    return [table[letter] for letter in piece] if set(piece) <= table.keys() else None


def _entry(tokenizer: Any, token: int, logprob: float) -> dict[str, Any]:
    return {"token": token_text(tokenizer, token), "logprob": logprob, "bytes": token_bytes(tokenizer, token)}


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """Returns the byte of each letter of byte-level BPE: printable bytes stand for themselves, others for letters from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
