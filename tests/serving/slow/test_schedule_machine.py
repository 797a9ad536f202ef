"""The schedule under all that can happen to it: arrivals, ends found late, aborts, lack of pages, new weights, in any order.

A fake device computes each token out of pages. Every token that is read must be a function of its own sequence alone.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.serving.request import EngineLimits
from moe_jax.serving.schedule import change_weights, finish, preempt_youngest
from tests.helpers import fake_device, seeds
from tests.helpers.checked_serving import CheckedServing

EXHAUSTIVE = settings(deadline=None, max_examples=600, stateful_step_count=80, suppress_health_check=list(HealthCheck))
FAST = settings(EXHAUSTIVE, max_examples=60, stateful_step_count=50)


class ServingMachine(RuleBasedStateMachine):
    """Draws what happens."""

    @initialize(
        max_sequences=st.integers(1, 5),
        extra=st.integers(0, 150),
        chunks=st.integers(1, 4),
        num_pages=st.integers(2, 14),
        max_length=st.integers(2, 400),
        drafts=st.integers(0, 3),
        weighs_drafts=st.booleans(),
    )
    def begin(self, max_sequences, extra, chunks, num_pages, max_length, drafts, weighs_drafts):
        limits = EngineLimits(
            max_sequences=max_sequences,
            max_tokens_per_step=max_sequences * (1 + drafts) + extra,
            max_chunks_per_step=chunks,
            max_length=max_length,
            num_pages=num_pages,
        )
        self.longest = min(max_length, (num_pages - 1) * PAGE_SIZE + 1)
        self.serving = CheckedServing(limits, drafts, weighs_drafts)

    @rule(data=st.data(), family=st.integers(0, 2), ends=st.sets(st.integers(0, fake_device.VOCAB_SIZE - 1), max_size=2))
    def arrive(self, data, family, ends):
        """A prompt of one of three families, whose members begin alike; perhaps with an end that comes soon."""
        length = data.draw(st.integers(1, self.longest - 1), label="length")
        new = data.draw(st.integers(1, min(self.longest - length, 150)), label="new")
        self.serving.add([(family + i * i) % fake_device.VOCAB_SIZE for i in range(length)], new, ends)

    @precondition(lambda self: any(each.finish_reason for each in self.serving.arrivals))
    @rule(data=st.data())
    def goes_on(self, data):
        """A prompt that repeats an earlier one with its answer, as a next turn of a chat does."""
        done = [each for each in self.serving.arrivals if each.finish_reason and len(each.tokens) < self.longest]
        if done:
            tokens = data.draw(st.sampled_from(done)).tokens
            self.serving.add([*tokens], data.draw(st.integers(1, min(self.longest - len(tokens), 70))))

    @rule(count=st.integers(1, 70))
    def steps(self, count):
        for _ in range(count):
            self.serving.step()
            self.serving.check()

    @rule()
    def read_at_once(self):
        self.serving.read()

    @precondition(lambda self: self.serving.queues.waiting or self.serving.queues.running)
    @rule(data=st.data())
    def abort(self, data):
        queues = self.serving.queues
        finish(queues, data.draw(st.sampled_from([*queues.running, *queues.waiting])), "abort")

    @rule(drop=st.booleans())
    def new_weights(self, drop):
        """The weights change; sequences that run keep their pages, or are all computed again."""
        queues = self.serving.queues
        while drop and queues.running:
            preempt_youngest(queues)
        change_weights(queues)
        self.serving.device.version = queues.weights_version
        self.serving.mixed.update(queues.running)

    @invariant()
    def holds(self):
        if hasattr(self, "serving"):
            self.serving.check()

    def teardown(self):
        if hasattr(self, "serving"):
            self.serving.drain()


def test_whatever_happens():
    run_state_machine_as_test(ServingMachine, settings=FAST)


@pytest.mark.thorough
def test_whatever_happens_at_length():
    run_state_machine_as_test(ServingMachine, settings=EXHAUSTIVE)


@pytest.mark.parametrize("drafts", [0, 1, pytest.param(3, id="weighed")])
@pytest.mark.parametrize("requests", [500, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_nothing_leaks(requests, drafts):
    """Many requests later, with aborts and too few pages, everything is given back and no more is cached than fits."""
    rng = seeds.rng()
    serving = CheckedServing(
        EngineLimits(max_sequences=8, max_tokens_per_step=200, max_length=400, num_pages=12), drafts, drafts == 3
    )
    for _ in range(requests):
        length, family = int(rng.integers(1, 200)), int(rng.integers(20))
        prompt = [(family + i * i) % fake_device.VOCAB_SIZE for i in range(length)]
        ends = [int(rng.integers(fake_device.VOCAB_SIZE))] if rng.random() < 0.5 else []
        serving.add(prompt, int(rng.integers(1, 200)), ends)
        while len(serving.queues.waiting) > 10:
            serving.step()
        if serving.queues.running and rng.random() < 0.1:
            finish(serving.queues, serving.queues.running[int(rng.integers(len(serving.queues.running)))], "abort")
        serving.check()
    serving.drain()
    free, cached, _, evicted = serving.queues.pool.counts()
    assert free + cached == 11 and evicted > 0 and serving.queues.num_preemptions > 0
    assert (serving.device.num_right > 0) == (drafts > 0)
