"""One continuation of a request: from the engine's events to pieces of text with log-probabilities."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from moe_jax.serving.handle import Event, Handle
from moe_jax.serving.http.errors import ApiError
from moe_jax.serving.text import TextStream


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

    def __init__(self, index: int, handle: Handle, stream: TextStream, *, counts_prompt: bool, logprobs: bool):
        self.index = index
        self.handle = handle
        self.num_tokens = 0
        """New tokens up to its end, with the one that ended it."""
        self.finished = False
        self._stream = stream
        self._counts_prompt = counts_prompt
        self._wants_logprobs = logprobs
        self._logprobs: list[TokenLogprob] = []

    @property
    def cached_tokens(self) -> int:
        """The number of the prompt's tokens that were not computed again, counted once for all choices of a prompt."""
        completion = self.handle.completions[0]
        return completion.cached_tokens if completion is not None and self._counts_prompt else 0

    async def follow(self, emit: Callable[[TextPiece], Awaitable[None]]) -> None:
        """Emits pieces until the end.

        Raises:
            ApiError: The continuation was aborted, or the engine failed.
        """
        try:
            async for event in self.handle:
                piece = self._take(event)
                if piece.text or piece.finish_reason:
                    await emit(piece)
        except RuntimeError as error:
            if self.handle.error is None:
                raise
            raise ApiError(503, "the engine does not run any more") from error

    def _take(self, event: Event) -> TextPiece:
        text = ""
        was_stopped = self._stream.stopped
        if event.token is not None and not was_stopped:
            self.num_tokens += 1
            if self._wants_logprobs:
                assert event.logprob is not None
                self._logprobs.append(TokenLogprob(event.token, event.logprob, event.top_logprobs or {}))
            # A token that ends the text is no part of it.
            if event.finish_reason != "stop":
                text = self._stream.add(event.token)
        reason: str | None = event.finish_reason
        if reason is not None:
            self.finished = True
            text += self._stream.flush()
            reason = "stop" if self._stream.stopped else reason
            if reason not in ("stop", "length"):
                why = "was aborted" if reason == "abort" else "ended with an error"
                raise ApiError(503 if reason == "abort" else 500, f"the request {why}")
        elif self._stream.stopped and not was_stopped:
            self.handle.abort()
        logprobs = []
        if text or reason:
            logprobs, self._logprobs = self._logprobs, []
        return TextPiece(self.index, text, logprobs, reason)
