"""A sequence: one continuation of one prompt, with the pages that hold its keys and values."""

from dataclasses import dataclass, field
from typing import Any

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.serving.pages import PagePool, extend_chain
from moe_jax.serving.request import FinishReason, SamplingOptions


@dataclass(eq=False, slots=True)
class Sequence:
    """One continuation of a prompt. A request of `n` continuations is n sequences with seeds of their own.

    Positions count from 0. The device alone may know the token at a position: a step may run before the tokens of the
    step before it were read.
    """

    prompt: list[int]
    options: SamplingOptions
    seed: int = 0
    ends: frozenset[int] = frozenset()
    """Tokens that end the sequence: the model's, unless the options ignore them, and the request's own."""
    index: int = 0
    """Number of the continuation in its request, below n."""
    owner: Any = None
    """Belongs to the engine: where the tokens go."""
    device: int = 0
    """Number of the engine's device that has the slot and the pages."""

    tokens: list[int] = field(init=False)
    """Prompt and new tokens that were read from the device."""
    end: int = field(init=False)
    """Number of positions that are ever computed; the last new token is sampled at position `end` and not computed."""
    num_scheduled: int = field(default=0, init=False)
    """Number of positions whose keys and values the steps so far have written; with drafts in flight, at least."""
    num_uncertain: int = field(default=0, init=False)
    """Number of drafts in flight: of further positions that steps have written if all of them are right."""
    in_flight: int = field(default=0, init=False)
    """Number of steps that have sampled tokens, one and accepted drafts, which the host has not read."""
    decoding: bool = field(default=False, init=False)
    """True if the device has the token at position `num_scheduled`, sampled in this slot."""
    slot: int | None = field(default=None, init=False)
    """The place on the device; None: the sequence waits or has ended."""
    pages: list[int] = field(default_factory=list, init=False)
    """Pages of positions 0 to 63, 64 to 127, and so on."""
    cached_tokens: int = field(default=0, init=False)
    """Number of the prompt's tokens whose keys and values were found, not computed, when the sequence first got a slot."""
    num_preemptions: int = field(default=0, init=False)
    num_scored: int = field(default=1, init=False)
    """Number of the prompt's first tokens whose log-probabilities steps have computed; the first token has none."""
    finish_reason: FinishReason | None = field(default=None, init=False)
    root: bytes = field(default=b"", init=False)
    """Begins the chain of `hashes`. It stands for the weights under which the pages are written."""
    hashes: list[bytes] = field(default_factory=list, init=False)
    """Hashes of the first full pages, as far as they were needed."""
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
        """True if log-probabilities of the prompt are computed with this sequence: with the first of a request."""
        return self.options.prompt_logprobs is not None and self.index == 0

    def page_hashes(self, root: bytes, num_pages: int) -> list[bytes]:
        """Returns the hashes of the first `num_pages` pages, whose tokens are known. Each page is hashed once a root."""
        if root != self.root:
            self.root = root
            self.hashes.clear()
        if len(self.hashes) < num_pages:
            extend_chain(self.hashes, root, self.tokens, num_pages)
        return self.hashes[:num_pages]


def seal_full_pages(sequence: Sequence, pool: PagePool, root: bytes) -> None:
    """Seals the pages whose tokens are all known and written, unless they were written under another root than `root`."""
    num_full = min(len(sequence.tokens), sequence.num_scheduled) // PAGE_SIZE
    if sequence.root != root or num_full <= sequence.num_sealed:
        return
    hashes = sequence.page_hashes(root, num_full)
    for number in range(sequence.num_sealed, num_full):
        pool.seal(sequence.pages[number], hashes[number])
    sequence.num_sealed = num_full
