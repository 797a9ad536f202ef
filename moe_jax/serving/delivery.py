"""Gives the tokens of steps to the requests that wait for them, and completes the records of sequences that end."""

from collections.abc import Callable, Set
from itertools import islice

from moe_jax.serving.device import Device, Launched
from moe_jax.serving.events import Event
from moe_jax.serving.handle import Listener, wake
from moe_jax.serving.prompts import read_scores
from moe_jax.serving.queues import EngineQueues, finish
from moe_jax.serving.reading import NewToken, read_tokens
from moe_jax.serving.records import completion_of
from moe_jax.serving.request import FinishReason
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
            for one in new[i][:count]:
                sequence.owner.add(one.logprob, one.top_logprobs)
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
