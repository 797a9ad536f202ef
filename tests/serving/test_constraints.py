"""The tokens that may come next: by lists, by words, by a least length and by a grammar."""

import numpy as np
import pytest

from moe_jax.serving import grammar
from moe_jax.serving.constraints import Constraint, bad_word_tokens, commit, num_words, packed_bits
from moe_jax.serving.grammar import Matcher
from moe_jax.serving.request import SamplingOptions
from tests.helpers import tiny

VOCAB, ENDS = 70, {0, 69}


class Choice(Matcher):
    """The grammar of two texts, which begin alike: tokens 5 6 and 5 7."""

    def __init__(self):
        self.text, self.has_ended = (), False

    @property
    def is_complete(self):
        return len(self.text) == 2

    @property
    def bits(self):
        return packed_bits([{5}, {6, 7}, ()][len(self.text)], VOCAB)


@pytest.fixture(autouse=True)
def choices_commit(monkeypatch):
    def commit_choices(texts):
        for matcher, token in texts:
            matcher.text += (token,)

    monkeypatch.setattr(grammar, "commit", commit_choices)


def reason_after(constraint, token):
    """Returns why a sequence ends with its next token, or None."""
    commit([constraint], [token])
    return constraint.reason


def allowed(constraint):
    """Returns the set of allowed tokens."""
    return set(np.flatnonzero(np.unpackbits(constraint.bits.view(np.uint8), bitorder="little")).tolist())


def constraint_of(bad_words=(), matcher=None, **options):
    return Constraint(SamplingOptions(**options), ENDS, VOCAB, bad_words, matcher)


def test_bits_are_packed():
    bits = packed_bits([0, 33, 69], VOCAB)
    assert bits.tolist() == [1, 2, 32] and len(bits) == num_words(VOCAB) == 3


def test_ends_come_after_the_least_length():
    constraint = constraint_of(min_tokens=2)
    for _ in range(2):
        assert allowed(constraint).isdisjoint(ENDS) and {1, 68} <= allowed(constraint) and not constraint.is_over
        assert reason_after(constraint, 3) is None
    assert constraint.bits is None and constraint.is_over


def test_listed_tokens_alone():
    constraint = constraint_of(allowed_token_ids=(3, 0), min_tokens=1)
    assert allowed(constraint) == {3}
    commit([constraint], [3])
    assert allowed(constraint) == {0, 3} and not constraint.is_over


def test_bad_words_do_not_get_their_last_token():
    constraint = constraint_of(bad_words=[[4], [5, 6], [5, 6, 7]])
    for token, forbidden in ((5, {4, 6}), (6, {4, 7}), (6, {4})):
        commit([constraint], [token])
        assert set(range(VOCAB)) - allowed(constraint) == forbidden


def test_a_grammar_ends_where_it_is_complete():
    constraint = constraint_of(matcher=Choice(), min_tokens=9)
    for token, then in ((5, {6, 7}), (7, ENDS)):
        assert reason_after(constraint, token) is None
        assert allowed(constraint) == then


def test_where_nothing_is_allowed():
    with pytest.raises(ValueError, match="allow no first token"):
        constraint_of(matcher=Choice(), allowed_token_ids=(6,))
    constraint = constraint_of(matcher=Choice(), bad_words=[[5, 6], [5, 7]])
    assert reason_after(constraint, 5) == "error"


def test_words_are_forbidden_after_a_space_too():
    tokenizer = tiny.tokenizer()
    word, spaced = bad_word_tokens(tokenizer, ["ab"]), bad_word_tokens(tokenizer, [" ab"])
    assert word == [tokenizer("ab")["input_ids"]] and spaced == [tokenizer(" ab")["input_ids"]]
