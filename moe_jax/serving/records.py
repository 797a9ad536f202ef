"""The results of a sequence while it runs, as its completion will have them."""

from dataclasses import dataclass, field
from typing import Any

from moe_jax.serving.handle import Handle
from moe_jax.serving.request import Completion
from moe_jax.serving.sequence import Sequence


@dataclass(eq=False)
class Record:
    """The results of a sequence beside its tokens (`Sequence.owner`)."""

    handle: Handle
    prompt_logprobs: list[dict[int, float] | None]
    """Log-probabilities of the prompt's tokens so far; the first token has none. All continuations of a prompt share them."""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float] | None] = field(default_factory=list)
    weights_version: int | None = None
    """The version under which the first token was computed."""
    experts: Any = None
    """Experts of the computed positions, as far as they were asked for when the sequence ended or was preempted."""

    def started(self, weights_version: int) -> None:
        """Notes the version of the weights when the sequence is first computed."""
        if self.weights_version is None:
            self.weights_version = weights_version

    def add(self, logprob: float, top_logprobs: dict[int, float] | None) -> None:
        """Adds what came with a new token."""
        self.logprobs.append(logprob)
        self.top_logprobs.append(top_logprobs)


def completion_of(sequence: Sequence) -> Completion:
    """Returns the completion of a sequence that has ended."""
    record: Record = sequence.owner
    assert sequence.finish_reason is not None
    wants_logprobs = sequence.options.logprobs is not None
    tops = [one for one in record.top_logprobs if one is not None]
    return Completion(
        tokens=sequence.new_tokens,
        finish_reason=sequence.finish_reason,
        logprobs=record.logprobs if wants_logprobs else None,
        top_logprobs=tops if sequence.options.logprobs else None,
        prompt_logprobs=None if sequence.options.prompt_logprobs is None else record.prompt_logprobs,
        experts=None if record.experts is None else record.experts[: len(sequence.tokens) - 1],
        weights_version=record.weights_version or 0,
        cached_tokens=sequence.cached_tokens,
    )
