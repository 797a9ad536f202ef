"""The tokens that a sequence may draw next, as packed bits, by the options of its request and by its grammar.

They depend on the tokens so far. So a step with such a sequence draws its tokens once the host has read the step before, while
the device computes the logits. Sequences without constraints draw the same tokens as in any other step.
"""

from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import UInt32

from moe_jax.serving import grammar
from moe_jax.serving.grammar import Matcher
from moe_jax.serving.request import FinishReason, SamplingOptions


def is_constrained(options: SamplingOptions) -> bool:
    """Returns True if the options restrict the tokens that a sequence may draw."""
    return bool(options.min_tokens or options.bad_words or options.grammar or options.allowed_token_ids is not None)


class Constraint:
    """The constraints of one sequence.

    Attributes:
      bits: the tokens that may come next, as in `sampling.SlotOptions.allowed`; None: all.
      reason: why the sequence ends with its last token: it was an end, or nothing may follow; None: it does not.

    Args:
      ends: tokens that end the sequence: forbidden before `min_tokens`, and allowed where the grammar is complete.
      bad_words: the tokens of texts that must not occur.
      matcher: the grammar's; this sequence alone uses it.

    Raises:
      ValueError: no token is allowed first.
    """

    bits: UInt32[np.ndarray, " words"] | None
    reason: FinishReason | None = None

    def __init__(
        self,
        options: SamplingOptions,
        ends: Collection[int],
        vocab_size: int,
        bad_words: Collection[Sequence[int]] = (),
        matcher: Matcher | None = None,
    ):
        self._size, self._min_tokens, self._matcher = vocab_size, options.min_tokens, matcher
        self._bad_words = [list(word) for word in bad_words]
        self._ends = packed_bits(ends, vocab_size)
        allowed = options.allowed_token_ids
        self._always = None if allowed is None else packed_bits(allowed, vocab_size)
        self._new: list[int] = []
        self.bits = self._next()
        if self._is_stuck:
            raise ValueError("allowed_token_ids, bad_words, min_tokens and grammar together allow no first token")

    @property
    def is_over(self) -> bool:
        """True once all tokens are allowed until the end."""
        lasts = self._always is not None or self._bad_words or self._matcher is not None
        return not lasts and len(self._new) >= self._min_tokens

    @property
    def _is_stuck(self) -> bool:
        return self.bits is not None and not self.bits.any()

    def _next(self) -> UInt32[np.ndarray, " words"] | None:
        parts = [] if self._always is None else [self._always]
        if self._matcher is not None:
            parts.append(self._matcher.bits | self._ends if self._matcher.is_complete else self._matcher.bits)
        is_short = len(self._new) < self._min_tokens
        # A grammar whose text can only end has no more tokens to offer.
        if is_short and not (parts and not (parts[-1] & ~self._ends).any()):
            parts.append(~self._ends)
        if last := [word[-1] for word in self._bad_words if self._new[len(self._new) - len(word) + 1 :] == word[:-1]]:
            parts.append(~packed_bits(last, self._size))
        return np.bitwise_and.reduce(parts) if parts else None


def commit(constraints: Sequence[Constraint], tokens: Sequence[int]) -> None:
    """Adds the next token to each sequence; sets `reason` where the sequence ends with it."""
    texts: list[tuple[Matcher, int]] = []
    for constraint, token in zip(constraints, tokens, strict=True):
        constraint._new.append(token)
        if constraint._matcher is not None:
            texts.append((constraint._matcher, token))
    if texts:
        grammar.commit(texts)
    for constraint in constraints:
        if constraint._matcher is not None and constraint._matcher.has_ended:
            constraint.reason = "stop"
            continue
        constraint.bits = constraint._next()
        if constraint._is_stuck:
            constraint.reason = "error"


def packed_bits(tokens: Collection[int], vocab_size: int) -> UInt32[np.ndarray, " words"]:
    """Returns words in which exactly the bits of these tokens are 1."""
    bits = np.zeros(num_words(vocab_size) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def num_words(vocab_size: int) -> int:
    """Returns the number of words with a bit for each token."""
    return -(-vocab_size // 32)


def bad_word_tokens(tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Returns the tokens of each word at the beginning of a text, and after a space if they are others."""
    found: list[list[int]] = []
    for word in words:
        for text in (word, " " + word.lstrip()):
            tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            # A tokenizer that writes the space as a token of its own has already the word's tokens.
            if tokens and tokens not in found and not (text != word and any(tokens[-len(t) :] == t for t in found)):
                found.append(tokens)
    return found
