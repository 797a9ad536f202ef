"""Events of a request, and their text: end tokens have none, and stop texts end it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_jax.serving.request import Completion, FinishReason
from moe_jax.serving.text import TextStream


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
