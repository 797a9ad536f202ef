"""Queues for tests, prompts in them, and the loop of an engine on a fake device."""

from moe_jax.serving.request import EngineLimits, SamplingOptions
from moe_jax.serving.schedule import EngineQueues, Sequence, plan_step, read_step
from tests.helpers import fake_device


def make_queues(drafts=0, **limits):
    defaults = {"max_sequences": 4, "max_tokens_per_step": 128, "max_length": 1024, "num_pages": 100, "max_waiting": 100}
    return EngineQueues(EngineLimits(**defaults | limits), drafts)


def add(queues, length, new=5, first=0, **others):
    prompt = [(first + i * i) % fake_device.VOCAB_SIZE for i in range(length)]
    queues.waiting.append(Sequence(prompt, SamplingOptions(max_new_tokens=new), **others))
    return queues.waiting[-1]


def serve(queues, device):
    """Runs steps until all sequences have ended, and reads each step after the next is dispatched; returns the plans."""
    plans, unread = [], None
    while queues.waiting or queues.running:
        plans.append(plan_step(queues))
        tokens = device.run(plans[-1])
        if unread:
            read_step(queues, *unread)
        unread = plans[-1], tokens
        assert len(plans) < 1000
    read_step(queues, *unread)
    return plans


def serve_and_return(queues, length, **others):
    sequence = add(queues, length, **others)
    serve(queues, fake_device.FakeDevice(queues.limits))
    return sequence


def assert_right(*sequences):
    for each in sequences:
        assert each.new_tokens == fake_device.expected_tokens(each.prompt, len(each.new_tokens))
        assert (each.finish_reason, len(each.new_tokens)) == ("length", each.options.max_new_tokens)


def assert_given_back(queues):
    assert queues.pool.counts()[2] == 0 and sorted(queues.free_slots) == list(range(queues.limits.max_sequences))
