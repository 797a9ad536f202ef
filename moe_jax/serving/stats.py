"""The numbers of a running engine: sequences, pages, steps, tokens and drafts."""

from typing import NamedTuple

from moe_jax.serving.loop import EngineLoop


class Stats(NamedTuple):
    """The state of an engine."""

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
    queues, delivery = loop.queues, loop.delivery
    pages = queues.pool.counts()
    return Stats(
        running=len(queues.running),
        waiting=len(queues.waiting),
        free_pages=pages.free,
        cached_pages=pages.cached,
        owned_pages=pages.owned,
        num_steps=loop.num_steps,
        num_tokens=delivery.num_tokens,
        num_preemptions=queues.num_preemptions,
        weights_version=queues.weights_version,
        num_drafted=delivery.num_drafted,
        num_accepted=delivery.num_accepted,
    )
