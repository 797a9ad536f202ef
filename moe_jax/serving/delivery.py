"""Gives the tokens of steps to the requests that wait for them, and completes the records of sequences that end."""

from collections.abc import Callable, Set
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from moe_jax.serving.device import Device, Launched
from moe_jax.serving.handle import Event, Handle, Listener, NewToken, wake
from moe_jax.serving.prompts import read_scores
from moe_jax.serving.queues import EngineQueues, finish
from moe_jax.serving.request import Completion, FinishReason
from moe_jax.serving.sampling import Sampled
from moe_jax.serving.schedule import read_step
from moe_jax.serving.sequence import Sequence


class TokenDelivery:
    """The part of the engine's thread that knows requests; the thread alone calls it.

    Args:
      ended: called with each sequence that ends, once its completion is made.

    Attributes:
      num_tokens: new tokens read so far.
      num_drafted, num_accepted: drafts checked, and those accepted, so far.
    """

    def __init__(self, device: Device, queues: list[EngineQueues], ended: Callable[[Sequence], None]):
        self.num_tokens = self.num_drafted = self.num_accepted = 0
        self._device = device
        self._queues = queues
        self._ended = ended
        self._listeners: set[Listener] = set()

    def read(self, launched: Launched) -> None:
        """Waits for the tokens of a step, and gives them to their requests."""
        for sequence, scores in read_scores(launched.scores):
            if sequence.finish_reason is None:
                sequence.owner.prompt_logprobs += scores
        samples, new = launched.samples, read_tokens(launched)
        self._count_drafts(launched, new)
        pages = {i: list(one.pages) for i, one in enumerate(samples) if one.options.return_experts}
        tokens, taken = iter([[one.token for one in each] for each in new]), list[int]()
        for queues, plan in zip(self._queues, launched.plans, strict=True):
            taken += read_step(queues, plan, list(islice(tokens, len(plan.samples))))
        self.num_tokens += sum(taken)
        for i, count in enumerate(taken):
            sequence = samples[i]
            sequence.owner.new += new[i][:count]
            if count and sequence.finish_reason is not None:
                self.keep_experts(sequence, pages.get(i, []))
                self._close_record(sequence)
            for number, one in enumerate(new[i][:count], 1):
                self._deliver(sequence, one, sequence.finish_reason if number == count else None)

    def end_all(self, sequences: list[Sequence]) -> None:
        """Ends sequences without another token, if they have not ended."""
        for sequence in sequences:
            if sequence.finish_reason is None:
                self.keep_experts(sequence, sequence.pages if sequence.decoding else [])
                finish(self._queues[sequence.device], sequence, "abort")
                self._close_record(sequence)
                self._deliver(sequence, None, "abort")

    def keep_experts(self, sequence: Sequence, pages: list[int]) -> None:
        """Reads the experts of a sequence from its pages, if it has any and its request asks for them."""
        if sequence.options.return_experts and pages:
            sequence.owner.experts = self._device.experts_of(sequence.device, pages, len(sequence.tokens))

    def wake_readers(self, further: Set[Listener] = frozenset()) -> None:
        """Wakes the coroutines to whose requests something was delivered, and `further` ones."""
        wake(self._listeners | further)
        self._listeners.clear()

    def _count_drafts(self, launched: Launched, new: list[list[NewToken]]) -> None:
        if launched.second is not None:
            for decode, tokens in zip(launched.plans[0].decodes, new, strict=False):
                if decode.sequence.finish_reason is None:
                    self.num_drafted += 1
                    self.num_accepted += len(tokens) - 1

    def _close_record(self, sequence: Sequence) -> None:
        sequence.owner.handle.completions[sequence.index] = completion_of(sequence)
        self._ended(sequence)

    def _deliver(self, sequence: Sequence, new: NewToken | None, reason: FinishReason | None) -> None:
        event = Event(sequence.index, None, finish_reason=reason)
        if new is not None:
            logprob = None if sequence.options.logprobs is None else new.logprob
            event = Event(sequence.index, new.token, logprob, new.top_logprobs, reason)
        listener = sequence.owner.handle.deliver(event)
        if listener is not None:
            self._listeners.add(listener)


def read_tokens(launched: Launched) -> list[list[NewToken]]:
    """Waits for the tokens of a step; returns for each of `samples` its token, and the one behind an accepted draft."""
    rows, samples = launched.rows, launched.samples
    found = [[token] for token in _tokens(launched.sampled, rows, samples)]
    if launched.second is not None:
        num = len(launched.plans[0].decodes)
        seconds, accepted = _tokens(launched.second, rows[:num], samples[:num]), np.asarray(launched.accepted).tolist()
        for tokens, second, row in zip(found, seconds, rows, strict=False):
            tokens += [second] if accepted[row] else []
    return found


def _tokens(sampled: Sampled, rows: list[int], samples: Many[Sequence]) -> list[NewToken]:
    tokens, logprobs, top_tokens, top_logprobs = (np.asarray(array)[rows] for array in sampled)
    found = []
    for i, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
        tops = None
        if wanted := samples[i].options.logprobs:
            tops = dict(zip(top_tokens[i, :wanted].tolist(), top_logprobs[i, :wanted].tolist(), strict=True))
        found.append(NewToken(token, logprob, tops))
    return found


@dataclass(eq=False)
class Record:
    """The results of a sequence beside its tokens (`Sequence.owner`)."""

    handle: Handle
    prompt_logprobs: list[dict[int, float] | None]
    """Log-probabilities of the prompt's tokens so far; the first token has none. All continuations of a prompt share them."""
    new: list[NewToken] = field(default_factory=list)
    weights_version: int | None = None
    """The version under which the first token was computed."""
    experts: Any = None
    """Experts of the computed positions, as far as they were asked for when the sequence ended or was preempted."""

    def started(self, weights_version: int) -> None:
        """Notes the version of the weights when the sequence is first computed."""
        if self.weights_version is None:
            self.weights_version = weights_version


def completion_of(sequence: Sequence) -> Completion:
    """Returns the completion of a sequence that has ended."""
    record: Record = sequence.owner
    assert sequence.finish_reason is not None
    wanted = sequence.options.logprobs
    return Completion(
        tokens=sequence.new_tokens,
        finish_reason=sequence.finish_reason,
        logprobs=None if wanted is None else [one.logprob for one in record.new],
        top_logprobs=[one.top_logprobs or {} for one in record.new] if wanted else None,
        prompt_logprobs=None if sequence.options.prompt_logprobs is None else record.prompt_logprobs,
        experts=None if record.experts is None else record.experts[: len(sequence.tokens) - 1],
        weights_version=record.weights_version or 0,
        cached_tokens=sequence.cached_tokens,
    )
