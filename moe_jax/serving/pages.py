"""Pages of keys and values: free pages, pages owned by sequences, and full pages that a later prompt may share.

A page is known by its content, through a chain of hashes: over the ids of its tokens and the hash of the page before. vLLM's
prefix cache does the same (https://docs.vllm.ai/en/latest/design/prefix_caching.html). The keys and values themselves are on
the device.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from moe_jax.kernels.attention.paged import PAGE_SIZE

HASH_BYTES = 16
"""At 128 bits two of 2**40 pages have the same hash with a probability below 1e-14."""


class PagePool:
    """All pages but page 0, to which rows of padding write. Each page is free, cached or owned.

    - An owned page belongs to one sequence or more.
    - A cached page is sealed and belongs to none. It can be shared again or reused, the least recently released first.
    - A free page has no content.

    A sealed page is full, its content never changes, and sequences with the same prefix share it.
    """

    def __init__(self, num_pages: int):
        self._free = list(range(num_pages - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_owners = [0] * num_pages
        self._hash_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._evicted = 0

    @property
    def available(self) -> int:
        """Number of pages that `take` could return now."""
        return len(self._free) + len(self._cached)

    def counts(self) -> tuple[int, int, int, int]:
        """Returns the number of free, cached and owned pages, all but page 0, and of pages evicted since the start."""
        free, cached = len(self._free), len(self._cached)
        return free, cached, len(self._num_owners) - 1 - free - cached, self._evicted

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the sealed pages that match the longest prefix of a chain of hashes. Changes nothing."""
        pages = []
        for each in hashes:
            page = self._page_of.get(each)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_cached_among(self, pages: Sequence[int]) -> int:
        """Returns the number of pages in `pages` without an owner; sharing them reduces `available` by this number."""
        return sum(self._num_owners[page] == 0 for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        """Adds an owner to sealed pages."""
        for page in pages:
            if self._num_owners[page] == 0:
                del self._cached[page]
            self._num_owners[page] += 1

    def take(self, count: int) -> list[int]:
        """Assigns `count` pages to a new owner and returns them: free ones, then the cached ones released longest ago.

        Raises:
            ValueError: Fewer than `count` pages are available.
        """
        if count > self.available:
            raise ValueError(f"{count} pages were asked for and {self.available} are available; preempt a sequence first")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._num_owners[page] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Removes an owner from each of a sequence's pages. Without an owner sealed pages are cached, others are free.

        The last page is evicted first: a page is useful only together with all pages before it.
        """
        for page in reversed(pages):
            self._num_owners[page] -= 1
            if self._num_owners[page] == 0:
                if self._hash_of[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def seal(self, page: int, content: bytes) -> bool:
        """Registers an owned, full page by the hash of its content, for other sequences to share.

        Returns False, and changes nothing, if a page of this content is sealed already.
        """
        if content in self._page_of:
            return False
        self._page_of[content] = page
        self._hash_of[page] = content
        return True

    def forget_all(self) -> None:
        """Frees cached pages and unseals owned ones, when new weights invalidate their contents."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._page_of.clear()
        self._hash_of = [None] * len(self._hash_of)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        content = self._hash_of[page]
        assert content is not None
        del self._page_of[content]
        self._hash_of[page] = None
        self._evicted += 1
        return page


def pages_of(num_tokens: int) -> int:
    """Returns the number of pages that hold the keys and values of `num_tokens` tokens."""
    return -(-num_tokens // PAGE_SIZE)


def root_hash(namespace: tuple[int | str | None, ...]) -> bytes:
    """Returns the hash at which chains begin: pages of other weights or another adapter never match."""
    return blake2b(repr(namespace).encode(), digest_size=HASH_BYTES).digest()


def extend_chain(hashes: list[bytes], root: bytes, tokens: Sequence[int], num_pages: int) -> None:
    """Appends to `hashes` the hashes of the full pages up to `num_pages`; each depends on its parent's and 64 ids."""
    begin = len(hashes) * PAGE_SIZE
    ids = memoryview(array("i", tokens[begin : num_pages * PAGE_SIZE]).tobytes())
    num_bytes = PAGE_SIZE * array("i").itemsize
    for start in range(0, (num_pages * PAGE_SIZE - begin) * array("i").itemsize, num_bytes):
        content = blake2b(hashes[-1] if hashes else root, digest_size=HASH_BYTES)
        content.update(ids[start : start + num_bytes])
        hashes.append(content.digest())
