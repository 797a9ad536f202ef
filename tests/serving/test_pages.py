"""Pages are free, cached or owned; full ones are found again by their content, and are forgotten in order."""

import pytest

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.serving.pages import PagePool, extend_chain, pages_of, root_hash

ROOT = root_hash((0, None))


def chain(tokens, root=ROOT):
    hashes = []
    extend_chain(hashes, root, tokens, len(tokens) // PAGE_SIZE)
    return hashes


def sealed(pool, tokens):
    pages = pool.take(len(tokens) // PAGE_SIZE)
    assert all(pool.seal(page, each) for page, each in zip(pages, chain(tokens), strict=True))
    return pages


def test_page_zero_is_never_taken():
    pool = PagePool(5)
    assert sorted(pool.take(4)) == [1, 2, 3, 4] and pool.counts()[:3] == (0, 0, 4)
    with pytest.raises(ValueError, match="1 pages were asked for and 0 are available"):
        pool.take(1)


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


def test_sealed_pages_are_found_and_shared():
    pool, tokens = PagePool(10), list(range(200))
    pages = sealed(pool, tokens[:192])
    assert pool.find(chain(tokens)) == pages and pool.find(chain(tokens[:128] + [0] * 64)) == pages[:2]
    pool.share(pages[:2])
    pool.release(pages)
    assert pool.counts()[:3] == (6, 1, 2) and pool.num_cached_among(pages) == 1
    pool.share(pages)
    pool.release(pages[:2])
    pool.release(pages)
    assert pool.counts()[:3] == (6, 3, 0) and pool.available == 9


def test_unsealed_pages_become_free():
    pool = PagePool(4)
    pool.release(pool.take(2))
    assert pool.counts()[:3] == (3, 0, 0)


def test_the_second_page_of_a_content_stays_unsealed():
    pool, tokens = PagePool(10), list(range(64))
    (first,) = sealed(pool, tokens)
    (second,) = pool.take(1)
    assert not pool.seal(second, chain(tokens)[0]) and pool._hash_of[second] is None and pool._hash_of[first] is not None
    pool.release([second])
    assert pool.find(chain(tokens)) == [first] and pool.counts()[:3] == (8, 0, 1)


def test_free_pages_go_first_then_those_released_longest_ago():
    pool = PagePool(6)
    old, young = list(range(128)), list(range(1, 129))
    for tokens in (old, young):
        pool.release(sealed(pool, tokens))
    pool.take(1)
    assert len(pool.find(chain(old))) == 2
    # The end of the older one goes first, then its beginning.
    pool.take(1)
    assert len(pool.find(chain(old))) == 1 and pool.counts()[3] == 1
    pool.take(1)
    assert pool.find(chain(old)) == [] and len(pool.find(chain(young))) == 2


def test_forgotten_pages_are_never_found():
    pool, tokens = PagePool(6), list(range(128))
    pages = sealed(pool, tokens)
    pool.release(pages[1:])
    pool.forget_all()
    assert pool.find(chain(tokens)) == [] and pool.counts()[:3] == (4, 0, 1)
    assert pool.seal(pages[0], chain(tokens)[0]) and pool.find(chain(tokens)) == pages[:1]
    pool.release(pages[:1])
    assert pool.counts()[:3] == (4, 1, 0)


def test_number_of_pages():
    assert [pages_of(count) for count in (0, 1, 64, 65)] == [0, 1, 1, 2]
