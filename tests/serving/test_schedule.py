"""Plans of steps: decodes first, then chunks of prompts; shared beginnings, preemption, late ends; in fixed small cases."""

import fake_device
import pytest

from moe_jax.serving.limits import EngineLimits
from moe_jax.serving.queues import Queues, change_weights, finish, preempt_youngest
from moe_jax.serving.request import SamplingOptions
from moe_jax.serving.schedule import plan_step, read_step
from moe_jax.serving.sequence import Sequence


def make_queues(**limits):
    defaults = {"max_sequences": 4, "max_tokens_per_step": 128, "max_length": 1024, "num_pages": 100, "max_waiting": 100}
    return Queues(EngineLimits(**defaults | limits))


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


def assert_right(*sequences):
    for each in sequences:
        assert each.new_tokens == fake_device.expected_tokens(each.prompt, len(each.new_tokens))
        assert (each.finish_reason, len(each.new_tokens)) == ("length", each.options.max_new_tokens)


def assert_given_back(queues):
    assert queues.pool.counts().owned == 0 and sorted(queues.free_slots) == list(range(queues.limits.max_sequences))


def test_decodes_come_first_and_chunks_fill_the_step():
    queues = make_queues(max_tokens_per_step=100)
    first, second, third = add(queues, 30), add(queues, 130, first=1), add(queues, 70, first=2)
    plans = serve(queues, fake_device.FakeDevice(queues.limits))
    rows = [
        ([each.sequence for each in plan.decodes], [(each.sequence, each.start, len(each.tokens)) for each in plan.chunks])
        for plan in plans[:3]
    ]
    assert rows == [
        ([], [(first, 0, 30), (second, 0, 70)]),
        ([first], [(second, 70, 60), (third, 0, 39)]),
        ([first, second], [(third, 39, 31)]),
    ]
    assert [chunk.samples for plan in plans[:3] for chunk in plan.chunks] == [True, False, True, False, True]
    assert plans[1].samples == [first, second]
    assert_right(first, second, third)
    assert_given_back(queues)


def test_a_step_is_planned_before_the_one_before_is_read():
    queues = make_queues()
    sequence = add(queues, 10, new=3)
    plans = [plan_step(queues) for _ in range(4)]
    assert [each.is_empty for each in plans] == [False, False, False, True] and sequence.in_flight == 3
    assert [plan.decodes[0].position for plan in plans[1:3]] == [10, 11]


def test_a_token_behind_the_end_counts_for_nothing():
    queues = make_queues()
    sequence = add(queues, 10, ends=frozenset([7]))
    plans = [plan_step(queues) for _ in range(2)]
    assert read_step(queues, plans[0], [7]) == [0] and sequence.finish_reason == "stop"
    assert_given_back(queues)
    assert read_step(queues, plans[1], [3]) == [] and sequence.new_tokens == [7] and sequence.in_flight == 0


def test_a_beginning_is_computed_once():
    queues = make_queues()
    device = fake_device.FakeDevice(queues.limits)
    first = add(queues, 130)
    serve(queues, device)
    again, longer, other = add(queues, 130), add(queues, 200), add(queues, 130, first=3)
    plans = serve(queues, device)
    assert [each.cached_tokens for each in (first, again, longer, other)] == [0, 128, 128, 0]
    assert len(plans[0].chunks[0].tokens) == 2
    assert_right(first, again, longer, other)
    # A token at least is computed: of two pages that are known, one is taken.
    assert add(queues, 128) and plan_step(queues).chunks[0].start == 64


def test_prompts_of_one_step_share_their_beginning():
    queues = make_queues()
    first, second = add(queues, 100), add(queues, 100)
    plans = serve(queues, fake_device.FakeDevice(queues.limits))
    assert [chunk.start for chunk in plans[0].chunks] == [0, 64] and first.prompt == second.prompt
    assert_right(first, second)


def test_new_tokens_are_shared_too():
    queues = make_queues()
    device = fake_device.FakeDevice(queues.limits)
    first = add(queues, 50, new=100)
    serve(queues, device)
    queues.waiting.append(Sequence(first.tokens + [1], SamplingOptions()))
    assert plan_step(queues).chunks[0].start == 128


def test_log_probabilities_of_a_prompt_need_all_of_it():
    queues = make_queues()
    device = fake_device.FakeDevice(queues.limits)
    add(queues, 100)
    serve(queues, device)
    queues.waiting.append(Sequence(add(queues, 100).prompt, SamplingOptions(prompt_logprobs=0)))
    assert [chunk.start for chunk in plan_step(queues).chunks] == [64, 0]


def test_the_youngest_makes_room_and_is_computed_again():
    queues = make_queues(num_pages=5)
    device = fake_device.FakeDevice(queues.limits)
    old, young = add(queues, 60, new=140), add(queues, 60, new=140, first=1)
    plans = serve(queues, device)
    assert [plan.preempted for plan in plans if plan.preempted] == [[young]]
    assert (old.num_preemptions, young.num_preemptions, queues.num_preemptions) == (0, 1, 1)
    assert_right(old, young)
    assert_given_back(queues)


def test_who_waits_longest_comes_first():
    """A prompt for which there are not yet pages is not overtaken by a shorter one."""
    queues = make_queues(num_pages=7)
    device = fake_device.FakeDevice(queues.limits)
    first, long, short = add(queues, 120, new=60), add(queues, 300), add(queues, 5)
    plans = serve(queues, device)
    order = [chunk.sequence for plan in plans for chunk in plan.chunks if chunk.samples]
    assert order == [first, long, short]
    assert_right(first, long, short)


def test_abort_gives_everything_back():
    queues = make_queues(max_sequences=1)
    running, waiting = add(queues, 100), add(queues, 100)
    plan = plan_step(queues)
    finish(queues, running, "abort")
    finish(queues, running, "error")
    finish(queues, waiting, "abort")
    assert (running.finish_reason, waiting.finish_reason) == ("abort", "abort") and not queues.waiting
    assert_given_back(queues)
    assert read_step(queues, plan, [1]) == [] and running.new_tokens == []


def test_a_sequence_without_slot_takes_its_token():
    """A sequence that is preempted while a token is in flight waits for it, and may end with it."""
    queues = make_queues()
    ends, goes_on = add(queues, 10, ends=frozenset([7])), add(queues, 10, first=1)
    plan = plan_step(queues)
    assert [preempt_youngest(queues), preempt_youngest(queues)] == [goes_on, ends] and list(queues.waiting) == [ends, goes_on]
    assert plan_step(queues).is_empty
    assert read_step(queues, plan, [7, 8]) == [0, 1]
    assert ends.finish_reason == "stop" and list(queues.waiting) == [goes_on]
    assert plan_step(queues).chunks[0].tokens == [*goes_on.prompt, 8]


def test_new_weights_share_no_page_of_old_ones():
    queues = make_queues()
    device = fake_device.FakeDevice(queues.limits)
    add(queues, 100)
    serve(queues, device)
    runs_on = add(queues, 130, new=100)
    plan_step(queues)
    change_weights(queues)
    assert queues.pool.counts().cached == 0
    for _ in range(70):
        plan = plan_step(queues)
        read_step(queues, plan, [0] * len(plan.samples))
    finish(queues, runs_on, "abort")
    assert queues.pool.counts().cached == 0, "a page of mixed weights was sealed"
    add(queues, 100), add(queues, 100)
    assert [chunk.start for chunk in plan_step(queues).chunks] == [0, 64]


def test_a_step_that_gives_too_few_tokens_is_refused():
    queues = make_queues()
    add(queues, 10)
    with pytest.raises(ValueError):
        read_step(queues, plan_step(queues), [])
