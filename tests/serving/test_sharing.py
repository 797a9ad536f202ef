"""Sequences that begin alike share pages: of prompts, of new tokens, in one step; never pages of other weights."""

import pytest

from moe_jax.serving.request import SamplingOptions
from moe_jax.serving.schedule import Sequence, change_weights, drop_prefixes, finish, plan_step, preempt_youngest, read_step
from tests.helpers import fake_device
from tests.helpers.scheduling import add, assert_right, make_queues, serve, serve_and_return


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


@pytest.mark.parametrize("new, shared", [(14, 0), (15, 64), (78, 64), (79, 128), (100, 128)])
def test_new_tokens_are_shared_too(new, shared):
    """The last new token is not computed: 50 tokens and 15 new ones fill a page."""
    queues = make_queues()
    first = serve_and_return(queues, 50, new=new)
    queues.waiting.append(Sequence([*first.tokens, 1], SamplingOptions()))
    assert plan_step(queues).chunks[0].start == shared


def test_a_page_with_a_token_that_nobody_read_is_not_shared():
    queues = make_queues()
    sequence = add(queues, 63)
    plan_step(queues), plan_step(queues)
    assert sequence.num_scheduled == 64
    finish(queues, sequence, "abort")
    assert queues.pool.counts()[1] == 0


def test_log_probabilities_of_a_prompt_need_all_of_it():
    queues = make_queues()
    device = fake_device.FakeDevice(queues.limits)
    add(queues, 100)
    serve(queues, device)
    queues.waiting.append(Sequence(add(queues, 100).prompt, SamplingOptions(prompt_logprobs=0)))
    assert [chunk.start for chunk in plan_step(queues).chunks] == [64, 0]


def test_what_a_sequence_finds_of_its_own_is_no_hit():
    queues = make_queues()
    sequence = add(queues, 70)
    read_step(queues, plan_step(queues), [[3]])
    preempt_youngest(queues)
    (chunk,) = plan_step(queues).chunks
    assert (chunk.start, chunk.tokens) == (64, [*sequence.prompt[64:], 3]) and sequence.cached_tokens == 0


def test_a_page_is_shared_once_its_last_token_is_computed():
    queues = make_queues()
    first = add(queues, 62)
    for token in (1, 2, 3):
        read_step(queues, plan_step(queues), [[token]])
    queues.waiting.append(Sequence([*first.tokens, 4], SamplingOptions()))
    assert first.finish_reason is None and plan_step(queues).chunks[0].start == 64


@pytest.mark.parametrize("change", [change_weights, drop_prefixes])
def test_a_change_shares_no_page_of_before(change):
    queues = make_queues()
    device = fake_device.FakeDevice(queues.limits)
    add(queues, 100)
    serve(queues, device)
    runs_on = add(queues, 130, new=100)
    plan_step(queues)
    change(queues)
    assert queues.pool.counts()[1] == 0
    for _ in range(70):
        plan = plan_step(queues)
        read_step(queues, plan, [[0]] * len(plan.samples))
    finish(queues, runs_on, "abort")
    assert queues.pool.counts()[1] == 0, "a page from before was sealed"
    add(queues, 100), add(queues, 100)
    assert [chunk.start for chunk in plan_step(queues).chunks] == [0, 64]
