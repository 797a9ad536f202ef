"""The pool of pages compared with a model of it: any order of taking, sharing, sealing, releasing and forgetting."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from moe_jax.serving.pages import PagePool, root_hash

NUM_PAGES = 8
CONTENTS = [root_hash((number,)) for number in range(5)]


class PagesMachine(RuleBasedStateMachine):
    """The model: pages of each owner, content of each sealed page, and cached pages in the order of their release."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.owners = []
        self.sealed = {}
        self.cached = []

    def owned(self):
        return Counter(page for pages in self.owners for page in pages)

    @rule(count=st.integers(0, NUM_PAGES))
    def take(self, count):
        owned = self.owned()
        if count > NUM_PAGES - 1 - len(owned):
            before = self.pool.counts()
            try:
                self.pool.take(count)
            except ValueError:
                assert self.pool.counts() == before
                return
            raise AssertionError("more pages were given than there are")
        num_free = self.pool.counts()[0]
        pages = self.pool.take(count)
        assert 0 not in pages and len(set(pages)) == count and not owned.keys() & set(pages)
        evicted, self.cached = self.cached[: max(0, count - num_free)], self.cached[max(0, count - num_free) :]
        assert set(evicted) <= set(pages) and not set(self.cached) & set(pages)
        for page in evicted:
            del self.sealed[page]
        self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        pages = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(pages)
        left = self.owned()
        self.cached += [page for page in reversed(pages) if page not in left and page in self.sealed]

    @precondition(lambda self: self.owned())
    @rule(data=st.data(), content=st.sampled_from(CONTENTS))
    def seal(self, data, content):
        unsealed = sorted(self.owned().keys() - self.sealed.keys())
        if unsealed:
            page = data.draw(st.sampled_from(unsealed))
            is_new = content not in self.sealed.values()
            assert self.pool.seal(page, content) == is_new
            if is_new:
                self.sealed[page] = content

    @rule(contents=st.lists(st.sampled_from(CONTENTS), unique=True))
    def find_and_share(self, contents):
        pages = self.pool.find(contents)
        page_of = {content: page for page, content in self.sealed.items()}
        known = [content in page_of for content in contents] + [False]
        assert pages == [page_of[content] for content in contents[: known.index(False)]]
        assert self.pool.num_cached_among(pages) == len(set(pages) & set(self.cached))
        self.pool.share(pages)
        self.cached = [page for page in self.cached if page not in pages]
        self.owners.append(pages)

    @rule()
    def forget(self):
        self.pool.forget_all()
        self.sealed.clear()
        self.cached.clear()

    @invariant()
    def each_page_is_in_one_state(self):
        free, cached, owned, _ = self.pool.counts()
        assert (cached, owned) == (len(self.cached), len(self.owned())) and free + cached + owned == NUM_PAGES - 1
        assert self.pool.available == free + cached
        assert {page for page in range(NUM_PAGES) if self.pool._hash_of[page] is not None} == self.sealed.keys()


def test_any_order():
    run_state_machine_as_test(PagesMachine, settings=settings(deadline=None, max_examples=100, stateful_step_count=40))
