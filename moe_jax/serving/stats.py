"""The numbers of a running engine: sequences, pages, steps, tokens and drafts."""

from typing import NamedTuple

from moe_jax.serving.loop import EngineLoop


class Stats(NamedTuple):
    """The state of an engine: numbers of all its devices together."""

    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    owned_pages: int
    num_steps: int
    num_tokens: int
    """New tokens so far."""
    num_preemptions: int
    weights_version: int
    num_drafted: int
    """Drafts that were checked so far (`Engine(drafts=)`)."""
    num_accepted: int
    """Drafts that were accepted so far: each gave a token without a step of its own."""

    @property
    def acceptance_rate(self) -> float:
        """The accepted share of the drafts; 0 without any."""
        return self.num_accepted / max(self.num_drafted, 1)


def stats_of(loop: EngineLoop) -> Stats:
    """Returns the present state; any thread may call it."""
    delivery, pages = loop.delivery, [queues.pool.counts() for queues in loop.queues]
    return Stats(
        running=sum(len(queues.running) for queues in loop.queues),
        waiting=sum(len(queues.waiting) for queues in loop.queues),
        free_pages=sum(each.free for each in pages),
        cached_pages=sum(each.cached for each in pages),
        owned_pages=sum(each.owned for each in pages),
        num_steps=loop.num_steps,
        num_tokens=delivery.num_tokens,
        num_preemptions=sum(queues.num_preemptions for queues in loop.queues),
        weights_version=loop.queues[0].weights_version,
        num_drafted=delivery.num_drafted,
        num_accepted=delivery.num_accepted,
    )
