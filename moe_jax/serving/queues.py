"""The queues of an engine: sequences that wait and run, and how one ends, is preempted, or outlives its weights."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from moe_jax.serving.limits import EngineLimits
from moe_jax.serving.pages import PagePool, root_hash
from moe_jax.serving.request import FinishReason
from moe_jax.serving.sequence import Sequence, seal_full_pages


@dataclass
class EngineQueues:
    """Sequences that wait and that run, each the oldest first, and the pages and slots that they share.

    All that run are older than all that wait. Only the youngest that runs may have a prompt that is not computed to its end.
    """

    limits: EngineLimits
    drafts: int = 0
    """Number of drafts that a decoding row computes with its token, 0 or 1."""
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    weights_version: int = 0
    num_preemptions: int = 0
    pool: PagePool = field(init=False)
    free_slots: list[int] = field(init=False)
    root: bytes = field(init=False)
    """Begins the hashes of pages that are written under the present weights."""

    def __post_init__(self):
        self.pool = PagePool(self.limits.num_pages)
        self.free_slots = list(range(self.limits.max_sequences - 1, -1, -1))
        self.root = root_hash((self.weights_version,))


class Preempted(NamedTuple):
    """A sequence that lost its slot, and the pages that it had; none if its prompt was not computed to its end.

    Their keys, values and experts are still there until the next step is dispatched. A sequence that ends with a token that is
    in flight has no others.
    """

    sequence: Sequence
    pages: list[int]


def finish(queues: EngineQueues, sequence: Sequence, reason: FinishReason) -> None:
    """Ends a sequence that waits or runs. One that has ended stays as it is.

    Its pages may be taken at once: steps in flight that still write to them run before any step that is planned later.
    """
    if sequence.finish_reason is not None:
        return
    sequence.finish_reason = reason
    if sequence.slot is None:
        queues.waiting.remove(sequence)
    else:
        queues.running.remove(sequence)
        seal_full_pages(sequence, queues.pool, queues.root)
        _give_back(queues, sequence)


def preempt_youngest(queues: EngineQueues) -> Preempted:
    """Sends the youngest sequence that runs back to the front of the queue, without its pages; returns it.

    Its tokens stay. It is computed again once those in flight were read.
    """
    sequence = queues.running.pop()
    preempted = Preempted(sequence, sequence.pages if sequence.decoding else [])
    _give_back(queues, sequence)
    sequence.num_preemptions += 1
    queues.num_preemptions += 1
    queues.waiting.appendleft(sequence)
    return preempted


def change_weights(queues: EngineQueues) -> None:
    """Counts new weights, after which no page of older ones is shared. Sequences that run keep theirs, and never seal them."""
    queues.weights_version += 1
    queues.root = root_hash((queues.weights_version,))
    queues.pool.forget_all()


def _give_back(queues: EngineQueues, sequence: Sequence) -> None:
    assert sequence.slot is not None
    queues.free_slots.append(sequence.slot)
    queues.pool.release(sequence.pages)
    sequence.slot, sequence.pages, sequence.decoding = None, [], False
    sequence.num_scheduled = sequence.num_uncertain = sequence.num_sealed = 0
