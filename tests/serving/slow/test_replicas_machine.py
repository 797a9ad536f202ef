"""Replicas under all that can happen to them: arrivals, aborts, pauses, new weights and failures, in any order, by threads.

Every request ends: with its own tokens, aborted, or by an error that names its device. Every page comes back.
"""

import contextlib
import re
import threading

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.serving.loop import QueueFull
from moe_jax.serving.request import EngineLimits
from tests.helpers import fake_device
from tests.helpers.fake_replicas import replicas_of, submit
from tests.helpers.served import comes_true

EXHAUSTIVE = settings(deadline=None, max_examples=300, stateful_step_count=40, suppress_health_check=list(HealthCheck))
FAST = settings(EXHAUSTIVE, max_examples=30, stateful_step_count=25)


class ReplicasMachine(RuleBasedStateMachine):
    """Draws what happens. What runs meanwhile is up to the threads."""

    @initialize(
        replicas=st.integers(2, 3),
        size=st.integers(1, 2),
        max_sequences=st.integers(1, 4),
        extra=st.integers(0, 150),
        num_pages=st.integers(2, 14),
        max_waiting=st.integers(3, 12),
    )
    def begin(self, replicas, size, max_sequences, extra, num_pages, max_waiting):
        self.limits = EngineLimits(
            replicas=replicas,
            max_sequences=max_sequences,
            max_tokens_per_step=max_sequences + extra,
            max_length=400,
            num_pages=num_pages,
            max_waiting=max_waiting,
        )
        self.longest = min(400, (num_pages - 1) * PAGE_SIZE + 1)
        self.replicas, self.devices = replicas_of(self.limits, size)
        self.handles, self.num_arrivals, self.aborted, self.mixed, self.version = {}, 0, set(), set(), 0

    @rule(data=st.data(), family=st.integers(0, 2), n=st.integers(1, 3))
    def arrive(self, data, family, n):
        """A prompt of one of three families, whose members begin alike."""
        length = data.draw(st.integers(1, self.longest - 1), label="length")
        new = data.draw(st.integers(1, min(self.longest - length, 150)), label="new")
        prompt = [(family + i * i) % fake_device.VOCAB_SIZE for i in range(length)]
        self.num_arrivals += 1
        # The queue may be full or not, depending on the threads. The draws of the test must not depend on it.
        with contextlib.suppress(QueueFull):
            self.handles[self.num_arrivals] = submit(self.replicas, prompt, new, n)

    @rule(data=st.data())
    def abort(self, data):
        handle = self.handles.get(data.draw(st.integers(0, self.num_arrivals)))
        if handle is not None:
            self.aborted.add(handle)
            handle.abort()

    @rule()
    def new_weights(self):
        self.mixed.update(handle for handle in self.handles.values() if None in handle.completions)
        self.version += 1
        self.replicas.update(self.version)

    @rule(is_paused=st.booleans())
    def pause(self, is_paused):
        self.replicas.pause(is_paused)

    @rule()
    def rest(self):
        threading.Event().wait(0.002)

    @precondition(lambda self: sum(device.error is None for device in self.devices) > 1)
    @rule(data=st.data())
    def fail(self, data):
        data.draw(st.sampled_from([each for each in self.devices if each.error is None])).error = ValueError("a defect")

    def teardown(self):
        if not hasattr(self, "replicas"):
            return
        self.replicas.pause(False)
        reader = threading.Thread(target=self.read_all, daemon=True)
        self.problem = "a request never ends"
        reader.start()
        reader.join(30)
        assert not self.problem, self.problem
        assert comes_true(lambda: not any(loop.num_open for loop in self.replicas.loops if not loop.failed))
        for stats in self.replicas.stats_of_devices().values():
            assert stats.running == stats.waiting == stats.owned_pages == 0
        for loop in self.replicas.loops:
            for queues in () if loop.failed else loop.queues:
                free, cached, owned, _ = queues.pool.counts()
                assert (free + cached, owned) == (self.limits.num_pages - 1, 0)
                assert len(queues.free_slots) == self.limits.max_sequences
        self.replicas.close(drain=True)

    def read_all(self):
        try:
            for handle in self.handles.values():
                self.read(handle)
            self.problem = None
        except BaseException as error:
            self.problem = repr(error)

    def read(self, handle):
        try:
            completions = handle.result()
        except RuntimeError as error:
            assert re.match(r"(one of )?the engine's devices? fake:.* failed: ValueError: a defect", str(error)), error
            assert any(device.error is not None for device in self.devices)
            return
        for one in completions:
            length = len(one.tokens)
            assert one.finish_reason == "length" or handle in self.aborted
            assert (length == handle.options.max_new_tokens) == (one.finish_reason == "length")
            if handle not in self.mixed:
                assert one.tokens == fake_device.expected_tokens(handle.prompt, length, one.weights_version)


def test_whatever_happens():
    run_state_machine_as_test(ReplicasMachine, settings=FAST)


@pytest.mark.thorough
def test_whatever_happens_at_length():
    run_state_machine_as_test(ReplicasMachine, settings=EXHAUSTIVE)
