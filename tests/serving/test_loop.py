"""The engine's thread signals readers no more often than they need it, and keeps nothing of requests that have ended."""

import gc
from collections import Counter

import pytest

from moe_jax.serving import handle as handles
from moe_jax.serving import loop as loops
from moe_jax.serving.handle import Handle, as_completed
from moe_jax.serving.loop import EngineLoop
from moe_jax.serving.request import EngineLimits
from moe_jax.serving.schedule import EngineQueues, Sequence
from tests.helpers.fake_device import expected_tokens
from tests.helpers.fake_replicas import FakeReplica, request_of, submit

LIMITS = EngineLimits(max_sequences=8, max_tokens_per_step=64, max_chunks_per_step=8, max_length=128, num_pages=33)


@pytest.fixture
def loop():
    made = EngineLoop(FakeReplica(LIMITS, 0), [EngineQueues(LIMITS)])
    yield made
    made.close(drain=False)


@pytest.fixture
def signals(monkeypatch):
    """The number of listeners that each step has signaled."""
    counts = []
    monkeypatch.setattr(loops, "wake", lambda listeners: (counts.append(len(listeners)), handles.wake(listeners)))
    return counts


def test_requests_that_have_ended_are_freed_without_a_garbage_collection(loop):
    """Cycles of handles and sequences would keep all tokens until a full collection, which takes ever longer."""
    gc.collect()
    gc.disable()
    try:
        before = counts_of_requests()
        for first in range(3):
            result = [submit(loop, [first, each, 7], new=20, n=2).result() for each in range(4)]
            del result
        loop.pause(True)  # The thread has left the last step's plan.
        assert counts_of_requests() == before
    finally:
        gc.enable()


def counts_of_requests():
    """Returns the number of handles and of sequences in memory."""
    kinds = Counter(type(each) for each in gc.get_objects())
    return kinds[Handle], kinds[Sequence]


def test_a_reader_of_completions_is_signaled_at_ends_alone(loop, signals):
    pairs = [request_of(loop, [number, 3], new=20 + number % 2) for number in range(8)]
    each = [handle for handle, _ in pairs]
    completed = as_completed(each)
    loop.pause(True)
    loop.add([sequences for _, sequences in pairs], limited=False)
    for handle in each:  # As the iterator sets it at its first value, which would wait for the loop.
        handle._waits_for_ends = True
    loop.pause(False)
    found = dict(completed)
    loop.pause(True)  # The last signals were counted.
    assert [found[number][0].tokens for number in range(8)] == [
        expected_tokens([number, 3], 20 + number % 2) for number in range(8)
    ]
    assert len(signals) == 2 and not any(handle._deliveries for handle in each)


def test_a_reader_of_events_is_signaled_once_a_step(loop, signals):
    handle = submit(loop, [1, 2], new=10, n=3)
    assert Counter(event.index for event in handle.events()) == {0: 10, 1: 10, 2: 10}
    loop.pause(True)
    assert set(signals) == {1} and len(signals) <= 12
