"""Interleaved 1F1B and uniform ticks: orders, bubbles, memory."""

import pytest

from moe_jax.parallel.pipeline import PassTimes, bubble_formula, interleaved, one_f_one_b, simulate, uniform, uniform_w
from tests.helpers import pipelines

SIZES = [(1, 1, 4), (2, 1, 4), (2, 2, 4), (3, 2, 9), (4, 2, 8), (4, 4, 16), (8, 6, 24)]


def test_order_of_interleaved():
    """Megatron's: rank r warms up with 2 (p - 1 - r) + (v - 1) p forward passes, in groups of p micro-batches."""
    schedule = interleaved(2, 2, 4)
    assert pipelines.listing(schedule.ranks[0]) == (
        "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3"
    )
    assert pipelines.listing(schedule.ranks[1]) == (
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3"
    )
    assert schedule.stages == ((0, 2), (1, 3))


def test_one_chunk_is_1f1b():
    assert interleaved(4, 1, 6).ranks == one_f_one_b(4, 6).ranks


def test_slots_of_uniform():
    """A tick has at most one forward and one backward pass; ticks without are idle slots."""
    schedule = uniform(2, 1, 3)
    assert [pipelines.text(slot) for slot in schedule.ranks[0]] == ["F0.0", "F0.1", "F0.2", "B0.0", "B0.1", "B0.2", ""]
    assert [pipelines.text(slot) for slot in schedule.ranks[1]] == ["", "F0.0", "F0.1&B0.0", "F0.2&B0.1", "B0.2", "", ""]


@pytest.mark.parametrize("sizes", SIZES)
def test_bubbles(sizes):
    """(p - 1) (F + B) / v of both; uniform loses nothing in lockstep, nor by masks. Times are of a rank's layers."""
    ranks, chunks, micro_batches = sizes
    for make in (interleaved, uniform):
        schedule = make(*sizes)
        timeline = simulate(schedule, pipelines.of_stage(schedule, pipelines.UNIT))
        assert timeline.idle == pytest.approx((3 * (ranks - 1) / chunks,) * ranks)
    in_ticks, masked = (
        simulate(schedule, pipelines.of_stage(schedule, pipelines.UNIT), lockstep=True, masked=masked)
        for masked in (False, True)
    )
    assert in_ticks.makespan == masked.makespan == pytest.approx(timeline.makespan)
    assert timeline.makespan == pytest.approx(ranks * 3 + (micro_batches - ranks + (ranks - 1) / chunks) * 3)


@pytest.mark.parametrize("sizes", [sizes for sizes in SIZES if sizes[2] >= 2 * sizes[0]])
def test_inputs_in_flight(sizes):
    """uniform: (v + 1) p - 2 r, so (v + 1) p on rank 0. interleaved computes B before F, and holds one less."""
    ranks, chunks, _ = sizes
    held = tuple((chunks + 1) * ranks - 2 * rank for rank in range(ranks))
    assert simulate(uniform(*sizes), pipelines.UNIT).peak_in_flight == held == uniform(*sizes).in_flight
    if chunks > 1:
        expected = tuple(number - 1 for number in held)
        assert simulate(interleaved(*sizes), pipelines.UNIT).peak_in_flight == expected == interleaved(*sizes).in_flight


def test_weights_put_off():
    """Rank 2 of 3 leaves W of its first two backward passes for the last two ticks, in which it has no pass of `uniform`."""
    schedule = uniform_w(3, 1, 3)
    slots = [pipelines.text(slot) for slot in schedule.ranks[2]]
    assert slots == ["", "", "F0.0", "F0.1&b0.0", "F0.2&b0.1", "B0.2", "W0.0", "W0.1"]
    assert schedule.weights_queue == (0, 1, 2) == simulate(schedule, pipelines.UNIT).peak_weights_queue


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("lockstep", [False, True])
def test_bubble_of_weights_put_off(sizes, lockstep):
    """(p - 1) (F + B - W) / v, for any times."""
    schedule = uniform_w(*sizes)
    times = pipelines.of_stage(schedule, PassTimes(1, 2.5, 0.7))
    bubble = simulate(schedule, times, lockstep=lockstep).bubble
    assert bubble == pytest.approx((sizes[0] - 1) * 2.8 / sizes[1]) == bubble_formula(schedule, times)


@pytest.mark.parametrize("make", [interleaved, uniform, uniform_w])
def test_several_chunks_need_several_ranks(make):
    with pytest.raises(ValueError, match="chunks must be 1 with one rank, whose neighbour is itself; got 2"):
        make(1, 2, 4)
    with pytest.raises(ValueError, match="chunks must be at least 1; got 0"):
        make(2, 0, 4)
