"""An engine's loop on a fake device, with a check of everything after each of its steps."""

from collections import Counter

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.serving.pages import pages_of
from moe_jax.serving.request import SamplingOptions
from moe_jax.serving.schedule import EngineQueues, Sequence, plan_step, read_step
from tests.helpers import fake_device


class CheckedServing:
    """Queues, a device, and the step that is not read; all that an engine does with them, and a check of each part."""

    def __init__(self, limits, drafts=0, weighs_drafts=False):
        self.queues = EngineQueues(limits, drafts, weighs_drafts)
        self.device = fake_device.FakeDevice(limits, drafts)
        self.unread = None
        self.arrivals = {}
        self.keys = {}
        self.mixed = set()
        """Sequences that ran on when the weights changed: their tokens are functions of two weights."""

    def add(self, prompt, new, ends=()):
        sequence = Sequence(prompt, SamplingOptions(max_new_tokens=new), ends=frozenset(ends))
        self.arrivals[sequence] = len(self.arrivals)
        self.queues.waiting.append(sequence)

    def step(self):
        """Plans and dispatches a step, then reads the one before. With nothing to do and nothing to read, all have ended."""
        finished = self.sealed_and_shared()
        plan = plan_step(self.queues)
        drafts = max((decode.drafts for decode in plan.decodes), default=0)
        num_tokens = len(plan.decodes) * (1 + drafts) + sum(len(chunk.tokens) for chunk in plan.chunks)
        assert num_tokens <= self.queues.limits.max_tokens_per_step
        assert len(plan.chunks) <= self.queues.limits.max_chunks_per_step
        assert not plan.is_empty or self.unread or not (self.queues.waiting or self.queues.running)
        unread = (plan, self.device.run(plan, finished), self.device.version)
        self.read()
        self.unread = None if plan.is_empty else unread

    def read(self):
        if self.unread:
            plan, tokens, version = self.unread
            drafted = [decode.drafts for decode in plan.decodes]
            for sequence, count in zip(plan.samples, read_step(self.queues, plan, tokens, drafted), strict=True):
                for length in range(len(sequence.tokens) - count, len(sequence.tokens)):
                    assert sequence in self.mixed or self.expected_token(sequence, version, length) == sequence.tokens[length]
        self.unread = None

    def expected_token(self, sequence, version, count):
        """Returns the token that follows the first `count` ones; their key is kept from call to call."""
        known_version, length, key = self.keys.get(sequence, (version, 0, 0))
        if known_version != version:
            length, key = 0, 0
        for token in sequence.tokens[length:count]:
            key = fake_device.key_of(key, token, version)
        self.keys[sequence] = version, count, key
        return fake_device.token_of(key)

    def drain(self):
        for _ in range(100_000):
            if not (self.queues.waiting or self.queues.running or self.unread):
                break
            self.step()
        _, _, owned, _ = self.queues.pool.counts()
        assert owned == 0 and len(self.queues.free_slots) == self.queues.limits.max_sequences
        for sequence in self.arrivals:
            length, wanted = len(sequence.new_tokens), sequence.options.max_new_tokens
            assert sequence.in_flight == 0 and not sequence.pages
            assert {
                "stop": sequence.tokens[-1] in sequence.ends,
                "length": length == wanted,
                "abort": length < wanted,
            }[sequence.finish_reason]

    def sealed_and_shared(self):
        pool, owners = self.queues.pool, Counter(page for each in self.queues.running for page in each.pages)
        return {page for page in range(self.queues.limits.num_pages) if pool._hash_of[page] is not None or owners[page] > 1}

    def check(self):
        queues, limits = self.queues, self.queues.limits
        running, waiting = queues.running, list(queues.waiting)
        free, cached, owned, _ = queues.pool.counts()
        assert free + cached + owned == limits.num_pages - 1
        assert owned == len({page for each in running for page in each.pages})
        assert 0 not in {page for each in running for page in each.pages}
        slots = [each.slot for each in running]
        assert sorted(slots + queues.free_slots) == list(range(limits.max_sequences))
        order = [self.arrivals[each] for each in running + waiting]
        assert order == sorted(order), "a sequence has overtaken an older one"
        assert all(each.decoding for each in running[:-1])
        assert all(each.slot is None and not each.pages and each.num_scheduled == each.num_sealed == 0 for each in waiting)
        for each in running:
            assert each.finish_reason is None and 0 <= each.in_flight <= 2
            assert pages_of(each.num_scheduled) <= len(each.pages) <= pages_of(each.num_scheduled + 2 * self.queues.drafts)
            assert each.num_uncertain <= self.queues.drafts * each.in_flight
            assert each.num_scheduled <= each.end
            assert not each.decoding or len(each.tokens) + each.in_flight == each.num_scheduled + 1
            if each.decoding and not self.unread and each not in self.mixed:
                assert each.num_sealed == each.num_scheduled // PAGE_SIZE, "a full page was not sealed"
