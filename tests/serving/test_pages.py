"""Hashes of pages, and their number; tests/serving/slow/test_pages_machine.py has what becomes of pages."""

import pytest

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.serving.pages import PagePool, extend_chain, pages_of, root_hash

ROOT = root_hash((0, None))


def chain(tokens, root=ROOT):
    hashes = []
    extend_chain(hashes, root, tokens, len(tokens) // PAGE_SIZE)
    return hashes


def test_a_hash_depends_on_all_tokens_before():
    tokens = list(range(200))
    hashes = chain(tokens)
    assert len(set(hashes)) == 3 and hashes[:2] == chain(tokens[:150])
    assert chain([1, *tokens[1:]])[2] != hashes[2] and chain([*tokens[:191], 0])[:2] == hashes[:2]
    assert set(chain(tokens, root_hash((1, None)))).isdisjoint(hashes)
    step_by_step = []
    for count in (1, 3):
        extend_chain(step_by_step, ROOT, tokens, count)
    assert step_by_step == hashes


def test_number_of_pages():
    assert [pages_of(count) for count in (0, 1, 64, 65)] == [0, 1, 1, 2]


def test_too_few_pages_are_an_error():
    """Page 0 is never taken."""
    pool = PagePool(5)
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="1 pages were asked for and 0 are available"):
        pool.take(1)
