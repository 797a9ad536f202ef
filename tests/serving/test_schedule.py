"""Plans of steps: decodes first, then chunks of prompts; lack of pages, aborts, late ends; in fixed small cases."""

import pytest

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.serving.request import SamplingOptions
from moe_jax.serving.schedule import (
    PAUSED_TOKENS,
    WEIGHED_DRAFTS,
    Sequence,
    finish,
    plan_step,
    preempt_youngest,
    read_step,
    weigh_drafts,
)
from tests.helpers import fake_device
from tests.helpers.scheduling import add, assert_given_back, assert_right, make_queues, serve, serve_and_return


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
    assert read_step(queues, plans[0], [[7]]) == [1] and sequence.finish_reason == "stop"
    assert_given_back(queues)
    assert read_step(queues, plans[1], [[3]]) == [0] and sequence.new_tokens == [7] and sequence.in_flight == 0


def test_the_youngest_makes_room_and_is_computed_again():
    queues = make_queues(num_pages=5)
    device = fake_device.FakeDevice(queues.limits)
    old, young = add(queues, 60, new=140), add(queues, 60, new=140, first=1)
    plans = serve(queues, device)
    assert [sequence for plan in plans for sequence, _ in plan.preempted] == [young]
    assert (old.num_preemptions, young.num_preemptions, queues.num_preemptions) == (0, 1, 1)
    assert_right(old, young)
    assert_given_back(queues)


def test_a_step_has_so_many_chunks_at_most():
    queues = make_queues(max_chunks_per_step=2)
    first, second, third = add(queues, 5), add(queues, 5), add(queues, 5)
    assert [[chunk.sequence for chunk in plan_step(queues).chunks] for _ in range(2)] == [[first, second], [third]]


def test_a_sequence_gets_a_slot_if_pages_suffice():
    """There must be pages for its prompt and one for each sequence that runs; those that it shares must stay there too."""
    queues = make_queues(num_pages=6)
    first, second = add(queues, 60), add(queues, 250, first=1)
    assert [each.sequence for each in plan_step(queues).chunks] == [first], "one page would be left, none for the second"
    finish(queues, second, "abort")
    third = add(queues, 190, first=1)
    assert [each.sequence for each in plan_step(queues).chunks] == [third]

    queues = make_queues(num_pages=6)
    serve_and_return(queues, 130)
    add(queues, 60, first=1), add(queues, 130, new=200)
    # The first sequence owns one of five pages. Two are found and two are free.
    plan = plan_step(queues)
    assert [each.start for each in plan.chunks] == [0, 128]
    finish(queues, plan.samples[1], "abort")
    add(queues, 200)
    # Two are found, two more are needed: none would be left for the first.
    assert not plan_step(queues).chunks


def test_a_prompt_waits_for_pages_in_its_middle():
    queues = make_queues(num_pages=8, max_sequences=2, max_tokens_per_step=2)
    device = fake_device.FakeDevice(queues.limits)
    old, young = add(queues, 60, new=300), add(queues, 250, first=1)
    plans = serve(queues, device)
    # The prompt lacks a page four steps before the first sequence needs one, and takes the prompt's pages.
    preempts = next(i for i, plan in enumerate(plans) if [sequence for sequence, _ in plan.preempted] == [young])
    assert [len(plan.chunks) for plan in plans[preempts - 5 : preempts]] == [1, 0, 0, 0, 0]
    assert_right(old, young)


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
    assert read_step(queues, plan, [[1]]) == [0] and running.new_tokens == []


def test_a_sequence_without_slot_takes_its_token():
    """A sequence that is preempted while a token is in flight waits for it, and may end with it."""
    queues = make_queues()
    ends, goes_on = add(queues, 10, ends=frozenset([7])), add(queues, 10, first=1)
    plan = plan_step(queues)
    pages = [ends.pages, goes_on.pages]
    assert [preempt_youngest(queues), preempt_youngest(queues)] == [(goes_on, pages[1]), (ends, pages[0])]
    assert list(queues.waiting) == [ends, goes_on]
    assert plan_step(queues).is_empty
    assert read_step(queues, plan, [[7], [8]]) == [1, 1]
    assert ends.finish_reason == "stop" and list(queues.waiting) == [goes_on]
    assert plan_step(queues).chunks[0].tokens == [*goes_on.prompt, 8]


def test_a_step_that_gives_too_few_tokens_is_refused():
    queues = make_queues()
    add(queues, 10)
    with pytest.raises(ValueError):
        read_step(queues, plan_step(queues), [])


def test_a_draft_at_the_end_seals_no_page():
    """The last token of a full page is drawn and never computed, also where a draft ends the sequence a step early."""
    queues = make_queues(drafts=1)
    device = fake_device.FakeDevice(queues.limits, drafts=1)
    for first in range(20):
        sequence = add(queues, 3, new=PAGE_SIZE - 3, first=first)
        serve(queues, device)
        assert_right(sequence)
        queues.waiting.append(Sequence([*sequence.tokens, first], SamplingOptions(max_new_tokens=3)))
        following = queues.waiting[-1]
        serve(queues, device)
        assert_right(following)
        assert following.cached_tokens == 0
    assert device.num_right > 20


def test_drafts_of_a_sequence_pause_after_too_many_wrong_ones():
    """Three of ten right is enough. A step without a draft counts as a wrong draft."""
    sequence = Sequence([1, 2], SamplingOptions())
    for _ in range(32):
        weigh_drafts(sequence, 2, 1)
    assert sequence.drafts_from == sequence.num_drafted == 0
    for _ in range(WEIGHED_DRAFTS):
        assert sequence.drafts_from == 0
        weigh_drafts(sequence, 0, 0)
    assert sequence.drafts_from == 2 + PAUSED_TOKENS


def test_drafts_pause_once_the_position_is_known():
    queues = make_queues(drafts=3)
    queues.weighs_drafts = True
    sequence = Sequence([1, 2] * 5, SamplingOptions(max_new_tokens=50))
    queues.waiting.append(sequence)
    first, second = plan_step(queues), plan_step(queues)
    read_step(queues, first, [[1]])
    third = plan_step(queues)
    assert [decode.drafts for plan in (second, third) for decode in plan.decodes] == [0, 3]
    sequence.drafts_from = 100
    read_step(queues, second, [[2]], [0])
    assert plan_step(queues).is_empty
    read_step(queues, third, [[1, 2]], [3])
    (decode,) = plan_step(queues).decodes
    assert (decode.position, decode.drafts) == (len(sequence.tokens) - 1, 0) == (13, 0)


def test_text_that_does_not_repeat_has_neither_drafts_nor_waits():
    """Each step is planned before the one before is read. Drafts begin a step after a pair has occurred again."""
    queues = make_queues(drafts=3)
    queues.weighs_drafts = True
    queues.waiting.append(Sequence([1, 2, 3], SamplingOptions(max_new_tokens=50)))
    in_flight, drafts = plan_step(queues), []
    for token in (4, 1, 5, 6, 2, 3, 7):
        planned = plan_step(queues)
        drafts += [decode.drafts for decode in planned.decodes]
        read_step(queues, in_flight, [[token]], [0])
        in_flight = planned
    assert drafts == [0, 0, 0, 0, 0, 0, 3]
