"""A device that computes nothing but what pages hold: keys of a token are a hash over all keys before, read out of pages.

If a page of one sequence holds what another wrote, the next token differs from `expected_tokens`.
"""

import zlib

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.serving.pages import pages_of

VOCAB_SIZE = 50


def key_of(before, token, version):
    return zlib.crc32(b"%d %d %d" % (before, token, version))


def token_of(key):
    return key % VOCAB_SIZE


def expected_tokens(prompt, count, version=0):
    """Returns the tokens that follow a prompt."""
    key, tokens = 0, []
    for token in prompt:
        key = key_of(key, token, version)
    for _ in range(count):
        tokens.append(token_of(key))
        key = key_of(key, tokens[-1], version)
    return tokens


class FakeDevice:
    """Runs plans in order. Each write is checked: not to a page that was shared or sealed before the step was planned.

    With `drafts` a decoding row has drafts too, right or wrong by the key before.
    """

    def __init__(self, limits, drafts=0):
        self.drafts = drafts
        self.num_right = 0
        self.position = [None] * limits.max_sequences
        self.pages = {}
        self.page_table = [[] for _ in range(limits.max_sequences)]
        self.last_token = [None] * limits.max_sequences
        self.version = 0

    def run(self, plan, finished=frozenset()):
        """Runs a plan and returns the tokens of each row that samples. It may write to pages in `finished` if it takes them."""
        taken = {each.new_page for each in plan.decodes}
        taken.update(page for chunk in plan.chunks for page in chunk.sequence.pages[pages_of(chunk.start) :])
        self.finished = finished - taken
        for sequence, slot, position, new_page, _ in plan.decodes:
            assert sequence.slot == slot
            if new_page >= 0:
                self.page_table[slot].append(new_page)
            # A sequence whose drafts were paused may have a page for those that were wrong.
            assert 0 <= len(self.page_table[slot]) - (position // PAGE_SIZE + 1) <= bool(self.drafts)
        for chunk in plan.chunks:
            self.page_table[chunk.sequence.slot] = list(chunk.sequence.pages)
        # A step writes the keys of all its rows before a row reads other rows' keys.
        sampled = [self.decode(each.slot, each.position) for each in plan.decodes]
        for chunk in plan.chunks:
            slot = chunk.sequence.slot
            key = self.write(slot, chunk.start, chunk.tokens)
            if chunk.samples:
                self.keep(slot, chunk.start + len(chunk.tokens), token_of(key))
                sampled.append([token_of(key)])
        return sampled

    def decode(self, slot, last):
        """Runs a decoding row with positions up to `last`; its own position is known to the device alone."""
        position, tokens = self.position[slot], [self.last_token[slot]]
        assert position == last or self.drafts
        if position > last:
            # The sequence has ended, and the host does not know it.
            return [0]
        key = self.write(slot, position, tokens)
        new = [token_of(key)]
        for place in range(position + 1, min(position + self.drafts, last) + 1):
            right = key % 5 < 3
            draft = new[-1] if right else (new[-1] + 1) % VOCAB_SIZE
            key = self.write(slot, place, [draft])
            if not right:
                break
            new.append(token_of(key))
            self.num_right += 1
        self.keep(slot, position + len(new), new[-1])
        return new

    def keep(self, slot, position, token):
        self.position[slot], self.last_token[slot] = position, token

    def write(self, slot, start, tokens):
        table, key = self.page_table[slot], 0
        for number in range(-(-start // PAGE_SIZE)):
            # Each page must follow the one before: one that is not the sequence's own would not.
            keys, before = self.pages[table[number]], key
            key = keys[min(start - number * PAGE_SIZE, PAGE_SIZE) - 1][0]
            assert keys[0][1] == before, "the pages of a sequence do not follow each other"
        for position, token in enumerate(tokens, start):
            page, place = table[position // PAGE_SIZE], position % PAGE_SIZE
            assert page != 0 and page not in self.finished, "a page was written that is sealed or shared"
            before, key = key, key_of(key, token, self.version)
            self.pages.setdefault(page, [None] * PAGE_SIZE)[place] = (key, before)
        return key
