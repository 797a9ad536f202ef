"""Drafts from the text: the tokens that followed an earlier occurrence of the newest ones."""

import numpy as np
import pytest

from moe_jax.generation.speculative import NO_DRAFTS, DraftSource, draft_source, looked_up


@pytest.mark.parametrize(
    "text, drafts",
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1]),
        ([7, 7, 7, 7], [7, 7, 7]),
        ([3, 1, 2, 4, 1, 2, 6, 3, 1, 2], [4, 1, 2]),  # three tokens, before the later occurrence of two
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2]),  # the latest of two occurrences
        ([1, 2, 3, 1, 2], [3, 1, 2]),
        ([4, 5, 4, 5, 4], [5, 4, 5]),
        ([1, 2, 3, 4, 5, 6], [-1, -1, -1]),
        ([1, 2, 3, 9, 3], [-1, -1, -1]),  # one token alone
        ([1, 2], [-1, -1, -1]),
        ([1], [-1, -1, -1]),
    ],
)
def test_drafts_follow_the_latest_longest_occurrence(text, drafts):
    """Later places hold tokens of an earlier sequence, which count for nothing."""
    tokens = np.array([(text + [1, 2, 3] * 4)[:12]])
    np.testing.assert_array_equal(looked_up(tokens, np.array([len(text) - 1]), 3), [drafts])


def test_sources_are_read_and_wrong_ones_refused():
    assert draft_source(0) == draft_source(False) == NO_DRAFTS
    assert draft_source(1) == draft_source(True) == draft_source("module") == DraftSource("module", 1)
    assert draft_source("lookup:3") == DraftSource("lookup", 3)
    for wrong in (2, -1, None, "", "lookup", "lookup:", "lookup:0", "lookup:9", "lookup:3.0", "lookup:-1", "eagle"):
        with pytest.raises(ValueError, match="drafts must be 0 or 1, 'module', or 'lookup:N' with N from 1 to 8; got"):
            draft_source(wrong)
