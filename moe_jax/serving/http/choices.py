"""One continuation of a request: from the engine's events to pieces of text with log-probabilities."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moe_jax.serving.events import Event
from moe_jax.serving.handle import Handle
from moe_jax.serving.http.errors import ApiError


class TokenLogprob(NamedTuple):
    """A new token, and the most likely tokens in its place."""

    token: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class TextPiece:
    """Text that new tokens have completed."""

    index: int
    text: str
    logprobs: list[TokenLogprob]
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
        self._logprobs: list[TokenLogprob] = []

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
                self._logprobs.append(TokenLogprob(event.token, event.logprob, event.top_logprobs or {}))
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
