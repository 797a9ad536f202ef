"""verify names the first broken rule of a schedule that was changed."""

from dataclasses import replace

import hypothesis
import pytest
from hypothesis import strategies as st

from moe_jax.parallel.pipeline import Part, dualpipe, interleaved, one_f_one_b, simulate, uniform, verify, zb_h1
from tests.helpers import pipelines

RULES = (
    "b comes after F|B comes after F|W comes after b|takes micro-batches in order|wait for each other|holds at most"
    "|puts off at most|uniform ticks follow"
)


def with_slot(schedule, rank, k, *parts):
    slots = list(schedule.ranks[rank])
    slots[k] = parts
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(slots), *schedule.ranks[rank + 1 :]))


def refused(schedule, message):
    with pytest.raises(ValueError, match=message):
        verify(schedule)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(pipelines.schedules(), st.data())
def test_swapped_slots_are_found(schedule, data):
    """Two slots whose order matters: of one chunk and kind, or of one chunk and micro-batch, or any two of `uniform`.

    Others may be in either order; then the schedule still ends within its memory.
    """
    rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
    positions = st.integers(0, len(schedule.ranks[rank]) - 1)
    first, second = sorted((data.draw(positions), data.draw(positions)))
    one, other = schedule.ranks[rank][first], schedule.ranks[rank][second]
    hypothesis.assume(one != other)
    mutated = pipelines.with_swapped(schedule, rank, first, second)
    if schedule.name == "uniform" or order_matters(one, other):
        refused(mutated, RULES)
        return
    try:
        verify(mutated)
    except ValueError as error:
        assert any(rule in str(error) for rule in RULES.split("|"))
    else:
        timeline = simulate(mutated, pipelines.UNIT)
        assert all(map(int.__le__, timeline.peak_in_flight, schedule.in_flight))


def order_matters(one, other) -> bool:
    return any(
        a.chunk == b.chunk and (a.micro_batch == b.micro_batch or set(results(a)) & set(results(b))) for a in one for b in other
    )


def results(part: Part) -> str:
    return "bW" if part.kind == "B" else part.kind


@pytest.mark.parametrize("name", pipelines.MAKE)
def test_every_neighbouring_swap(name):
    """Each pair of neighbouring slots whose order matters, on every rank."""
    schedule = pipelines.MAKE[name](4, 2, 8)
    for rank, slots in enumerate(schedule.ranks):
        for k, (one, other) in enumerate(zip(slots, slots[1:], strict=False)):
            if order_matters(one, other):
                refused(pipelines.with_swapped(schedule, rank, k, k + 1), RULES)


def test_own_order():
    schedule = zb_h1(2, 3)
    message = "b comes after F; slot 0 of rank 1 is b of chunk 0, micro-batch 0, before F of chunk 0, micro-batch 0"
    refused(pipelines.with_swapped(schedule, 1, 0, 1), message)
    refused(pipelines.with_swapped(schedule, 0, 2, 3), "W comes after b; slot 2 of rank 0 is W of chunk 0, micro-batch 0")
    message = "a chunk takes micro-batches in order; slot 0 of rank 0 is F of chunk 0, micro-batch 1, before F of micro-batch 0"
    refused(pipelines.with_swapped(one_f_one_b(2, 3), 0, 0, 1), message)
    overlapped = with_slot(one_f_one_b(1, 1), 0, 0, Part("F", 0, 0), Part("B", 0, 0))
    refused(replace(overlapped, ranks=(overlapped.ranks[0][:1],)), "B comes after F; slot 0 of rank 0")


def test_each_pass_once():
    schedule = one_f_one_b(2, 2)
    refused(with_slot(schedule, 0, 0), "each pass is computed once; rank 0 computes F of chunk 0, micro-batch 0 0 times")
    refused(with_slot(schedule, 0, 1, Part("F", 0, 0)), "rank 0 computes F of chunk 0, micro-batch 0 2 times")


def test_slots_and_sizes():
    schedule = one_f_one_b(2, 2)
    refused(with_slot(schedule, 1, 0, Part("F", 1, 0)), "rank 1 has chunks 0 to 0; slot 0 of rank 1 is F of chunk 1")
    refused(
        with_slot(schedule, 1, 0, Part("F", 0, 2)), "micro-batches are 0 to 1; slot 0 of rank 1 is F of chunk 0, micro-batch 2"
    )
    pair = (Part("F", 0, 0), Part("F", 0, 1))
    refused(
        with_slot(schedule, 0, 0, *pair),
        r"a slot is idle, one part, \(F, B\) or \(F, b\); slot 0 of rank 0 is F of chunk 0, .* and F",
    )


def test_stages_and_hops():
    schedule = one_f_one_b(4, 4)
    refused(replace(schedule, stages=((0,), (1,), (1,), (3,))), "stage 1 must be on one rank in direction 0; it is on 2")
    refused(
        replace(schedule, stages=((0,), (2,), (1,), (3,))),
        "neighbouring stages must be on neighbouring ranks; stage 0 is on rank 0, stage 1 on rank 2",
    )


def test_circles():
    """Rank 0 wants the gradients of a micro-batch before it sends the next one, which rank 1 wants first."""
    schedule = pipelines.with_swapped(one_f_one_b(2, 4), 0, 1, 2)
    verify(schedule)
    slots = one_f_one_b(1, 4).ranks[0]
    first_all_forward = tuple(sorted(slots, key=lambda slot: slot[0].kind == "B"))
    refused(replace(schedule, ranks=(schedule.ranks[0], first_all_forward)), "the ranks wait for each other: slot 1 of rank 0")


def test_memory():
    forward_first = tuple(sorted(one_f_one_b(2, 4).ranks[0], key=lambda slot: slot[0].kind == "B"))
    schedule = one_f_one_b(2, 4)
    message = "rank 0 of 1f1b holds at most 2 chunk inputs; these slots need 4"
    refused(replace(schedule, ranks=(forward_first, schedule.ranks[1])), message)
    refused(
        replace(dualpipe(4, 8), in_flight=(5, 4, 5, 5)), "rank 1 of dualpipe holds at most 4 chunk inputs; these slots need 5"
    )
    weights_late = replace(zb_h1(2, 4), weights_queue=(1, 1))
    refused(weights_late, "rank 1 of zb-h1 puts off at most 1 passes W; these slots put off 2")


def test_uniform_ticks():
    schedule = uniform(2, 2, 4)
    refused(pipelines.with_swapped(schedule, 1, 0, 4), RULES)
    refused(replace(schedule, ranks=(schedule.ranks[0], (*schedule.ranks[1], ()))), "uniform has 13 ticks; rank 1 has 14 slots")
    earlier = (*schedule.ranks[1][1:], ())
    message = "uniform ticks follow their arithmetic; slot 0 of rank 1 is F of chunk 0, micro-batch 0, not idle"
    refused(replace(schedule, ranks=(schedule.ranks[0], earlier)), message)
    # The same slots under another name are a legal order.
    verify(replace(schedule, name="other"))
    verify(interleaved(2, 2, 4))
