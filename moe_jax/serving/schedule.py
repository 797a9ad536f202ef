"""The schedule of an engine: its sequences, their queues, and the tokens of the next step.

A step runs one token of each sequence that decodes, and fills the rest of its budget with chunks of prompts. Agrawal et al.
(2023, https://arxiv.org/abs/2308.16369) show that this way no prompt delays the others. Sequences get slots in order of
arrival. If pages run out, the youngest running sequence returns to the front of the queue, and is recomputed later.
"""

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.serving.adapters import NamedAdapter
from moe_jax.serving.constraints import Constraint, commit
from moe_jax.serving.pages import PagePool, extend_chain, pages_of, root_hash
from moe_jax.serving.request import DrawnToken, EngineLimits, FinishReason, SamplingOptions


@dataclass(eq=False, slots=True)
class Sequence:
    """One continuation of a prompt. A request for `n` continuations has n sequences with their own seeds.

    Positions count from 0. Only the device may know the token at a position: a step may run before the previous step's tokens
    were read.
    """

    prompt: list[int]
    options: SamplingOptions
    seed: int = 0
    ends: frozenset[int] = frozenset()
    """Tokens that end the sequence: the model's, unless the options ignore them, and the request's own."""
    index: int = 0
    """Number of the continuation in its request, below n."""
    handle: Any = None
    """The request's `Handle`, which receives the tokens."""
    device: int = 0
    """Number of the engine's device that has the slot and the pages."""
    adapter: NamedAdapter | None = None

    tokens: list[int] = field(init=False)
    """Prompt tokens and the new tokens read from the device so far."""
    end: int = field(init=False)
    """Number of positions that are ever computed; the last new token is sampled at position `end` but not computed."""
    num_scheduled: int = field(default=0, init=False)
    """Number of positions whose keys and values the steps so far have written; with drafts in flight, at least."""
    num_uncertain: int = field(default=0, init=False)
    """Number of drafts in flight: further positions that steps have written if all drafts are right."""
    in_flight: int = field(default=0, init=False)
    """Number of steps whose sampled tokens (one, and accepted drafts) the host has not read."""
    decoding: bool = field(default=False, init=False)
    """True if the device has the token at position `num_scheduled`, sampled in this slot."""
    slot: int | None = field(default=None, init=False)
    """The place on the device; None: the sequence waits or has ended."""
    pages: list[int] = field(default_factory=list, init=False)
    """Pages of positions 0 to 63, 64 to 127, and so on."""
    cached_tokens: int = field(default=0, init=False)
    """Number of the prompt's tokens whose keys and values were in the cache when the sequence first got a slot."""
    num_preemptions: int = field(default=0, init=False)
    num_scored: int = field(default=1, init=False)
    """Number of the prompt's first tokens whose log-probabilities steps have computed; the first token has none."""
    finish_reason: FinishReason | None = field(default=None, init=False)
    weights_version: int = field(default=0, init=False)
    """Version of the weights when the sequence first got a slot."""
    drawn: list[DrawnToken] = field(default_factory=list, init=False)
    """The new tokens with their log-probabilities, if the request asks for them."""
    num_drafted: int = field(default=0, init=False)
    """Number of drafts since `weigh_drafts` last decided; a step without a draft counts as one."""
    num_accepted: int = field(default=0, init=False)
    drafts_from: int = field(default=0, init=False)
    """Number of tokens from which on the sequence has drafts."""
    pairs: set[tuple[int, int]] = field(default_factory=set, init=False)
    """The pairs of neighboring tokens that `look_back` has read."""
    repeats: bool = field(default=False, init=False)
    """True if the newest pair occurred before. Else the device finds no draft after it."""
    num_paired: int = field(default=0, init=False)
    experts: Any = field(default=None, init=False)
    """Experts of the computed positions, if the request asks for them, once the sequence has ended or was preempted."""
    constraint: Constraint | None = None
    """The tokens that may come next; None: all, until the end."""
    variant: int = field(default=0, init=False)
    """Number of the drawing program that serves the options (`drawing.VARIANTS`)."""
    root: bytes = field(default=b"", init=False)
    """Root of the chain of `hashes`. It identifies the weights under which the pages are written."""
    hashes: list[bytes] = field(default_factory=list, init=False)
    """Hashes of the first full pages, computed as needed."""
    num_sealed: int = field(default=0, init=False)
    """Number of first pages that are sealed, or whose content another page has sealed."""

    def __post_init__(self):
        self.tokens = list(self.prompt)
        self.end = len(self.prompt) + self.options.max_new_tokens - 1

    @property
    def new_tokens(self) -> list[int]:
        """The new tokens that were read from the device."""
        return self.tokens[len(self.prompt) :]

    @property
    def scores_prompt(self) -> bool:
        """True if this sequence computes the prompt's log-probabilities, as the first one of a request does."""
        return self.options.prompt_logprobs is not None and self.index == 0

    def own_root(self, root: bytes) -> bytes:
        """Returns the root of this sequence's hashes under weights with this root: an adapter has a root of its own."""
        return root if self.adapter is None else root_hash((root.hex(), self.adapter.version))

    def page_hashes(self, root: bytes, num_pages: int) -> list[bytes]:
        """Returns the hashes of the first `num_pages` pages, whose tokens are known. Each page is hashed once per root."""
        root = self.own_root(root)
        if root != self.root:
            self.root = root
            self.hashes.clear()
        if len(self.hashes) < num_pages:
            extend_chain(self.hashes, root, self.tokens, num_pages)
        return self.hashes[:num_pages]


@dataclass
class EngineQueues:
    """Waiting and running sequences, oldest first, and the pages and slots that they share.

    All running sequences are older than all waiting ones. Only the youngest running one may have an unfinished prompt.
    """

    limits: EngineLimits
    drafts: int = 0
    """Number of drafts that a decoding row computes with its token."""
    weighs_drafts: bool = False
    """True if a sequence has drafts only where its text repeats (`look_back`), and while they save time (`weigh_drafts`)."""
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    weights_version: int = 0
    num_preemptions: int = 0
    pool: PagePool = field(init=False)
    free_slots: list[int] = field(init=False)
    root: bytes = field(init=False)
    """Root of the hashes of pages written under the current weights."""

    def __post_init__(self):
        self.pool = PagePool(self.limits.num_pages)
        self.free_slots = list(range(self.limits.max_sequences - 1, -1, -1))
        self.root = root_hash((self.weights_version,))


class Decode(NamedTuple):
    """A row of one token, which the device has from the previous step; with drafts, also the draft after it."""

    sequence: Sequence
    slot: int
    position: int
    """The token's position. With drafts, the last position with a page: only the device knows the token's own."""
    new_page: int
    """The page of this position, if it is new; else -1."""
    drafts: int = 0
    """Number of drafts that the row may compute with its token."""


class PromptChunk(NamedTuple):
    """A row of tokens that the host uploads: part of a prompt, or of the tokens that a preempted sequence recomputes.

    Its sequence's `pages` reach to the end of the chunk. The first chunk begins after the pages found in the cache.
    """

    sequence: Sequence
    start: int
    tokens: list[int]
    samples: bool
    """True if the last token's logits give the sequence's next token."""


class StepPlan(NamedTuple):
    """The rows of a step, decoding rows first. `samples` has the sequences of rows that sample, in row order."""

    decodes: list[Decode]
    chunks: list[PromptChunk]
    samples: list[Sequence]
    preempted: list[tuple[Sequence, list[int]]]
    """Sequences that lost slot and pages for this step, as `preempt_youngest` returns them; they wait at the front."""

    @property
    def is_empty(self) -> bool:
        """True if nothing can run until a step in flight is read or a sequence arrives."""
        return not (self.decodes or self.chunks)


def plan_step(queues: EngineQueues) -> StepPlan:
    """Plans the next step, and treats it as dispatched: pages are assigned, prompts admitted, positions scheduled.

    The caller dispatches the plan before the next call. A page is sealed once the step that fills it is planned. So rows of the
    same step may share it: in each layer a step must write all its keys and values before a row attends.
    """
    preempted: list[tuple[Sequence, list[int]]] = []
    decodes = _plan_decodes(queues, preempted)
    budget = queues.limits.max_tokens_per_step - len(decodes) * (1 + max((each.drafts for each in decodes), default=0))
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


def read_step(queues: EngineQueues, plan: StepPlan, tokens: list[list[int]], drafted: Many[int] = ()) -> list[int]:
    """Adds the tokens of a step, some for each of `plan.samples`, to their sequences; ends complete sequences.

    Steps are read in dispatch order. Returns the number of tokens used for each of `plan.samples`. A sequence may have ended
    after its step was planned: tokens after its end are ignored.

    Args:
      drafted: the number of drafts that the step checked for each of `plan.decodes`; only `weigh_drafts` reads it.
    """
    _commit(plan.samples, tokens)
    taken = []
    for row, (sequence, new) in enumerate(zip(plan.samples, tokens, strict=True)):
        sequence.in_flight -= 1
        if sequence.finish_reason is not None:
            taken.append(0)
            continue
        # A preempted sequence begins at 0 once nothing is in flight.
        if row < len(plan.decodes) and sequence.slot is not None:
            # Nothing is written after its end, even if the device computes tokens there.
            sequence.num_scheduled = min(sequence.num_scheduled + len(new) - 1, sequence.end)
            sequence.num_uncertain -= plan.decodes[row].drafts
            if queues.weighs_drafts and plan.decodes[row].drafts:
                weigh_drafts(sequence, drafted[row], len(new) - 1)
        before = len(sequence.tokens)
        for token in new:
            sequence.tokens.append(token)
            if token in sequence.ends:
                finish(queues, sequence, "stop")
            elif sequence.constraint is not None and sequence.constraint.reason is not None:
                finish(queues, sequence, sequence.constraint.reason)
            elif len(sequence.tokens) > sequence.end:
                finish(queues, sequence, "length")
            if sequence.finish_reason is not None:
                break
        length = len(sequence.tokens)
        taken.append(length - before)
        if queues.weighs_drafts:
            look_back(sequence)
        if (length - 1) // PAGE_SIZE > (before - 1) // PAGE_SIZE and sequence.slot is not None:
            # The step that sampled the page's successor has written its last token.
            _seal_full_pages(sequence, queues.pool, queues.root)
    return taken


def _commit(sequences: list[Sequence], tokens: list[list[int]]) -> None:
    """Adds the step's token to the constraint of each sequence that has one: constrained sequences have no drafts."""
    rows = [
        (sequence, sequence.constraint, new[0])
        for sequence, new in zip(sequences, tokens, strict=True)
        if sequence.constraint is not None and sequence.finish_reason is None and new[0] not in sequence.ends
    ]
    if rows:
        commit([constraint for _, constraint, _ in rows], [token for *_, token in rows])
    for sequence, constraint, _ in rows:
        if constraint.is_over:
            sequence.constraint = None


WEIGHED_DRAFTS, LEAST_ACCEPTED, PAUSED_TOKENS = 64, 0.3, 256
"""A sequence with fewer than 0.3 of 64 drafts accepted has none for 256 tokens.

Such drafts cost more time than they save if few sequences run (docs/log/engine.md). A trial takes at most a fifth of the steps,
and finds a text that has begun to repeat.
"""


def look_back(sequence: Sequence) -> None:
    """Finds out if the newest pair of tokens occurred before; it reads each pair once.

    The device finds drafts in the same case, but knows the token in flight too. So drafts begin a step late.
    """
    tokens = sequence.tokens
    for pair in zip(tokens[sequence.num_paired :], tokens[sequence.num_paired + 1 :], strict=False):
        sequence.repeats = pair in sequence.pairs
        sequence.pairs.add(pair)
    sequence.num_paired = len(tokens) - 1


def weigh_drafts(sequence: Sequence, drafted: int, accepted: int) -> None:
    """Pauses the drafts of a sequence if too few of its last ones were accepted.

    A step that found no draft counts as a wrong one: its program has room for drafts and costs more than one without.
    """
    sequence.num_drafted += max(drafted, 1)
    sequence.num_accepted += accepted
    if sequence.num_drafted >= WEIGHED_DRAFTS:
        if sequence.num_accepted < LEAST_ACCEPTED * sequence.num_drafted:
            sequence.drafts_from = len(sequence.tokens) + PAUSED_TOKENS
        sequence.num_drafted = sequence.num_accepted = 0


def finish(queues: EngineQueues, sequence: Sequence, reason: FinishReason) -> None:
    """Ends a waiting or running sequence. One that has ended stays as it is.

    Its pages can be reused at once: steps in flight that still write to them run before any later step.
    """
    if sequence.finish_reason is not None:
        return
    sequence.finish_reason = reason
    if sequence.slot is None:
        queues.waiting.remove(sequence)
    else:
        queues.running.remove(sequence)
        _seal_full_pages(sequence, queues.pool, queues.root)
        _give_back(queues, sequence)


def preempt_youngest(queues: EngineQueues) -> tuple[Sequence, list[int]]:
    """Moves the youngest running sequence back to the front of the queue, to be computed again once its tokens were read.

    Returns it and the pages that it had; none if its prompt was not finished. Their keys, values and experts are there until
    the next step is dispatched. A sequence that ends with a token in flight has no other copy.
    """
    sequence = queues.running.pop()
    pages = sequence.pages if sequence.decoding else []
    _give_back(queues, sequence)
    sequence.num_preemptions += 1
    queues.num_preemptions += 1
    queues.waiting.appendleft(sequence)
    return sequence, pages


def change_weights(queues: EngineQueues) -> None:
    """Starts a new version of the weights: pages of older ones are no longer shared. Running sequences never seal theirs."""
    queues.weights_version += 1
    drop_prefixes(queues)


def drop_prefixes(queues: EngineQueues) -> None:
    """Frees cached pages. No page computed so far is shared later, not even one that a running sequence is filling."""
    queues.root = root_hash((queues.root.hex(),))
    queues.pool.forget_all()


def _plan_decodes(queues: EngineQueues, preempted: list[tuple[Sequence, list[int]]]) -> list[Decode]:
    pool, decodes = queues.pool, list[Decode]()
    # Preemption removes sequences from the list's end: after the sequence that needs a page, or itself.
    for sequence in queues.running:
        if not sequence.decoding or sequence.num_scheduled >= sequence.end:
            continue
        may_draft = len(sequence.tokens) >= sequence.drafts_from and (sequence.repeats or not queues.weighs_drafts)
        # The token after a draft would need a mask of its own.
        drafts = queues.drafts if may_draft and sequence.constraint is None else 0
        if sequence.num_uncertain and not drafts:
            # The device would accept drafts up to the last position that earlier drafts can reach.
            continue
        # The last position that may be computed: all drafts may be right.
        position = min(sequence.num_scheduled + sequence.num_uncertain + drafts, sequence.end - 1)
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
        sequence.num_uncertain += drafts
        sequence.in_flight += 1
        decodes.append(Decode(sequence, sequence.slot, position, new_page, drafts))
    return decodes


def _has_unfinished_prompt(queues: EngineQueues) -> bool:
    """Returns True if the youngest running sequence has an unfinished prompt; no other can have one."""
    return bool(queues.running) and not queues.running[-1].decoding


def _admit_next(queues: EngineQueues) -> bool:
    """Gives the first waiting sequence a slot and the cached pages of its prefix; returns True on success.

    There must be pages for all its tokens, and one for each running sequence: otherwise it would soon be preempted.
    """
    if not queues.waiting or not queues.free_slots or queues.waiting[0].in_flight:
        return False
    sequence, pool = queues.waiting[0], queues.pool
    length = len(sequence.tokens)
    hashes = sequence.page_hashes(queues.root, length // PAGE_SIZE)
    # At least one token is computed, for its logits. Log-probabilities of a prompt need all tokens' logits.
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
        sequence.cached_tokens, sequence.weights_version = sequence.num_scheduled, queues.weights_version
    sequence.slot = queues.free_slots.pop()
    queues.running.append(queues.waiting.popleft())
    return True


def _plan_chunk(queues: EngineQueues, sequence: Sequence, budget: int) -> PromptChunk | None:
    """Plans the next tokens of a prompt, up to budget and pages; None if no page is left."""
    start, pool = sequence.num_scheduled, queues.pool
    room = (len(sequence.pages) + pool.available) * PAGE_SIZE
    stop = min(len(sequence.tokens), start + budget, room)
    if stop <= start:
        return None
    sequence.pages += pool.take(pages_of(stop) - len(sequence.pages))
    sequence.num_scheduled = stop
    sequence.decoding = stop == len(sequence.tokens)
    sequence.in_flight += sequence.decoding
    _seal_full_pages(sequence, pool, queues.root)
    return PromptChunk(sequence, start, sequence.tokens[start:stop], sequence.decoding)


def _give_back(queues: EngineQueues, sequence: Sequence) -> None:
    assert sequence.slot is not None
    queues.free_slots.append(sequence.slot)
    queues.pool.release(sequence.pages)
    sequence.slot, sequence.pages, sequence.decoding = None, [], False
    sequence.num_scheduled = sequence.num_uncertain = sequence.num_sealed = 0


def _seal_full_pages(sequence: Sequence, pool: PagePool, root: bytes) -> None:
    """Seals the pages whose tokens are all known and written, unless they were written under another root than `root`."""
    num_full = min(len(sequence.tokens), sequence.num_scheduled) // PAGE_SIZE
    if sequence.root != sequence.own_root(root) or num_full <= sequence.num_sealed:
        return
    hashes = sequence.page_hashes(root, num_full)
    for number in range(sequence.num_sealed, num_full):
        pool.seal(sequence.pages[number], hashes[number])
    sequence.num_sealed = num_full
