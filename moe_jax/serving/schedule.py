"""The schedule of an engine: which tokens the next step runs, and where sequences wait, run and end.

A step runs one token of each sequence that decodes, and fills the rest of its budget with chunks of prompts. Agrawal et al.
(2023, https://arxiv.org/abs/2308.16369) show that so no prompt makes the others wait. Sequences get slots in the order in
which they came. If pages run out, the youngest that runs goes back to the front of the queue, and is computed again later.
"""

from typing import NamedTuple

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.serving.pages import pages_of
from moe_jax.serving.queues import EngineQueues, Preempted, finish, preempt_youngest
from moe_jax.serving.sequence import Sequence, seal_full_pages


class Decode(NamedTuple):
    """A row of one token, which the device has from the step before; with drafts, also of a draft behind it."""

    sequence: Sequence
    slot: int
    position: int
    """The token's position. With drafts the last one for which the sequence has a page: the device knows the token's own."""
    new_page: int
    """The page that this position lies in, if it is new; else -1."""


class PromptChunk(NamedTuple):
    """A row of tokens that the host uploads: a part of a prompt, or of what a preempted sequence computes again.

    Its sequence's `pages` reach to the end of the chunk. The first chunk begins behind the pages that were found in the cache.
    """

    sequence: Sequence
    start: int
    tokens: list[int]
    samples: bool
    """True if the last token's logits give the sequence's next token."""


class StepPlan(NamedTuple):
    """The rows of a step, first those that decode. `samples` has the sequences of rows that sample, in the rows' order."""

    decodes: list[Decode]
    chunks: list[PromptChunk]
    samples: list[Sequence]
    preempted: list[Preempted]
    """Sequences that lost slot and pages for this step; they wait at the front."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to run before a step in flight is read, or a sequence comes."""
        return not (self.decodes or self.chunks)


def plan_step(queues: EngineQueues) -> StepPlan:
    """Plans the next step, and counts it as dispatched: pages are taken, prompts admitted, positions scheduled.

    The caller dispatches the plan before the next call. A page is sealed once the step that fills it is planned. So rows of the
    same step may share it: in each layer a step must write all its keys and values before a row attends.
    """
    preempted: list[Preempted] = []
    decodes = _plan_decodes(queues, preempted)
    budget = queues.limits.max_tokens_per_step - len(decodes) * (1 + queues.drafts)
    chunks: list[PromptChunk] = []
    while budget and len(chunks) < queues.limits.max_chunks_per_step:
        if not (_has_unfinished_prompt(queues) or _admit_next(queues)):
            break
        chunk = _plan_chunk(queues, queues.running[-1], budget)
        if chunk is None:
            break
        chunks.append(chunk)
        budget -= len(chunk.tokens)
    samples = [decode.sequence for decode in decodes] + [chunk.sequence for chunk in chunks if chunk.samples]
    return StepPlan(decodes, chunks, samples, preempted)


def read_step(queues: EngineQueues, plan: StepPlan, tokens: list[list[int]]) -> list[int]:
    """Gives the tokens of a step, some for each of `plan.samples`, to their sequences; ends those that are complete.

    Steps are read in the order of their dispatch. Returns for each of `plan.samples` the number of tokens that were taken. A
    sequence may have ended after its step was planned: a token that follows its end counts for nothing.
    """
    taken = []
    for row, (sequence, new) in enumerate(zip(plan.samples, tokens, strict=True)):
        sequence.in_flight -= 1
        if sequence.finish_reason is not None:
            taken.append(0)
            continue
        # A preempted sequence begins at 0 once nothing is in flight.
        if row < len(plan.decodes) and sequence.slot is not None:
            # Behind its end nothing is written, whatever the device computes there.
            sequence.num_scheduled = min(sequence.num_scheduled + len(new) - 1, sequence.end)
            sequence.num_uncertain -= queues.drafts
        before = len(sequence.tokens)
        for token in new:
            sequence.tokens.append(token)
            if token in sequence.ends:
                finish(queues, sequence, "stop")
            elif len(sequence.tokens) > sequence.end:
                finish(queues, sequence, "length")
            if sequence.finish_reason is not None:
                break
        length = len(sequence.tokens)
        taken.append(length - before)
        if (length - 1) // PAGE_SIZE > (before - 1) // PAGE_SIZE and sequence.slot is not None:
            # The step that sampled the page's successor has written its last token.
            seal_full_pages(sequence, queues.pool, queues.root)
    return taken


def _plan_decodes(queues: EngineQueues, preempted: list[Preempted]) -> list[Decode]:
    pool, decodes = queues.pool, list[Decode]()
    # The youngest leave the list at its end, behind the sequence that needs a page, or with it.
    for sequence in queues.running:
        if not sequence.decoding or sequence.num_scheduled >= sequence.end:
            continue
        # The last position that may be computed: all drafts may be right.
        position = min(sequence.num_scheduled + sequence.num_uncertain + queues.drafts, sequence.end - 1)
        new_page = -1
        if position >= len(sequence.pages) * PAGE_SIZE:
            while not pool.available and sequence.slot is not None:
                preempted.append(preempt_youngest(queues))
            if sequence.slot is None:
                break
            (new_page,) = pool.take(1)
            sequence.pages.append(new_page)
        assert sequence.slot is not None
        sequence.num_scheduled += 1
        sequence.num_uncertain += queues.drafts
        sequence.in_flight += 1
        decodes.append(Decode(sequence, sequence.slot, position, new_page))
    return decodes


def _has_unfinished_prompt(queues: EngineQueues) -> bool:
    """Returns whether the youngest that runs is not computed to the end of its prompt; no other may be unfinished."""
    return bool(queues.running) and not queues.running[-1].decoding


def _admit_next(queues: EngineQueues) -> bool:
    """Gives the first sequence that waits a slot, and the cached pages of its beginning; returns whether it could.

    There must be pages for all its tokens, and one for each sequence that runs: otherwise it would soon be preempted.
    """
    if not queues.waiting or not queues.free_slots or queues.waiting[0].in_flight:
        return False
    sequence, pool = queues.waiting[0], queues.pool
    length = len(sequence.tokens)
    hashes = sequence.page_hashes(queues.root, length // PAGE_SIZE)
    # One token at least is computed, for its logits. Log-probabilities of a prompt need the logits of all.
    num_wanted = 0 if sequence.scores_prompt else (length - 1) // PAGE_SIZE
    found = pool.find(hashes[:num_wanted])
    num_needed = pages_of(length) - len(found) + pool.num_cached_among(found)
    if pool.available - num_needed < len(queues.running):
        return False
    pool.share(found)
    sequence.pages = found
    sequence.num_sealed = len(found)
    sequence.num_scheduled = len(found) * PAGE_SIZE
    if not sequence.num_preemptions:
        sequence.cached_tokens = sequence.num_scheduled
    sequence.slot = queues.free_slots.pop()
    queues.running.append(queues.waiting.popleft())
    return True


def _plan_chunk(queues: EngineQueues, sequence: Sequence, budget: int) -> PromptChunk | None:
    """Plans the next tokens of a prompt, as many as budget and pages allow; None if no page is left for any."""
    start, pool = sequence.num_scheduled, queues.pool
    room = (len(sequence.pages) + pool.available) * PAGE_SIZE
    stop = min(len(sequence.tokens), start + budget, room)
    if stop <= start:
        return None
    sequence.pages += pool.take(pages_of(stop) - len(sequence.pages))
    sequence.num_scheduled = stop
    sequence.decoding = stop == len(sequence.tokens)
    sequence.in_flight += sequence.decoding
    seal_full_pages(sequence, pool, queues.root)
    return PromptChunk(sequence, start, sequence.tokens[start:stop], sequence.decoding)
