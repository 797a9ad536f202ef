"""DualPipe and DualPipeV: the order of DeepSeek's code and of the study notes that describe it, bubbles, memory."""

import pytest

from moe_jax.parallel.pipeline import PassTimes, dualpipe, dualpipe_v, simulate
from moe_jax.parallel.pipeline.dual_pipe import dualpipe_phases
from tests.helpers import pipelines

LISTING = """\
F0.0 F0.1 F0.2 F0.3 F0.4 F1.0 b1.0 W1.0 F1.1 b1.1 W1.1 F1.2 F0.5&B1.2 F1.3&B0.0 B1.3 F1.4&B0.1 B1.4 F1.5&B0.2 B1.5 \
b0.3 W0.3 b0.4 W0.4 b0.5 W0.5
F0.0 F0.1 F0.2 F1.0 F0.3 F1.1 b1.0 W1.0 F1.2 F0.4&B1.1 F1.3&B0.0 F0.5&B1.2 F1.4&B0.1 B1.3 F1.5&B0.2 B1.4 B0.3 b1.5 b0.4 \
W1.5 b0.5 W0.4 W0.5
F0.0 F1.0 F0.1 F1.1 F0.2 F1.2 F0.3 B1.0 F1.3&B0.0 F0.4&B1.1 F1.4&B0.1 F0.5&B1.2 F1.5&B0.2 B1.3 B0.3 B1.4 b0.4 b1.5 b0.5 \
W0.4 W1.5 W0.5
"""
"""Ranks 0, 1 and 2 of 6 with 6 micro-batches in each direction. Ranks 5, 4 and 3 are the same with the chunks exchanged."""


def test_listing_of_six_ranks():
    schedule = dualpipe(6, 12)
    for rank, line in enumerate(LISTING.splitlines()):
        assert pipelines.listing(schedule.ranks[rank]) == line
        exchanged = line.replace("0.", "x.").replace("1.", "0.").replace("x.", "1.")
        assert pipelines.listing(schedule.ranks[5 - rank]) == exchanged
    assert schedule.stages == ((0, 5), (1, 4), (2, 3), (3, 2), (4, 1), (5, 0))


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 12, 16])
@pytest.mark.parametrize("more", [0, 2, 11])
def test_the_order_is_the_notes_rule(ranks, more):
    """The rule of the notes for any even number of ranks gives F, B and b in the same order; W is taken first in, first out."""
    per_direction = ranks + more
    schedule = dualpipe(ranks, 2 * per_direction)
    for rank, slots in enumerate(schedule.ranks):
        ours = [pipelines.text(slot) for slot in merged(slots)]
        ours = [name for name in ours if name[0] != "W"]
        assert ours == rule_of_the_notes(ranks, per_direction, rank)


def rule_of_the_notes(ranks: int, per_direction: int, rank: int) -> list[str]:
    """Warm-up, steady phase and cool-down without W; a chunk ends at `per_direction`, not at twice that as in the notes."""
    distance = min(rank, ranks - 1 - rank)
    chunk = int(rank >= ranks // 2)
    forwards, backwards = [0, 0], [0, 0]
    names = []

    def taken(kind, counts, of):
        counts[of] += 1
        return f"{kind}{of}.{counts[of] - 1}"

    for _ in range(ranks - 2 * distance - 2):
        names.append(taken("F", forwards, chunk))
    for _ in range(distance + 1):
        names += [taken("F", forwards, chunk), taken("F", forwards, 1 - chunk)]
    for _ in range(ranks // 2 - distance - 1):
        names += [taken("B", backwards, 1 - chunk), taken("F", forwards, 1 - chunk)]
    for _ in range(2 * per_direction - ranks + distance + 1):
        forward = [taken("F", forwards, chunk)] if forwards[chunk] < per_direction else []
        names.append("&".join([*forward, taken("B", backwards, 1 - chunk)]))
        chunk = 1 - chunk
    for _ in range(ranks // 2):
        of = 1 - chunk if backwards[1 - chunk] < per_direction else chunk
        names.append(taken("b", backwards, of))
        chunk = 1 - chunk
    assert forwards == backwards == [per_direction] * 2
    return names


def merged(slots) -> list:
    """The slots as the notes count them: b and its W at once are B, and the middle ranks' first F and B are overlapped.

    Only middle ranks compute F and then a whole B before their first overlapped pair.
    """
    found = []
    for slot in slots:
        before = found[-1] if found else ()
        kinds = [part.kind for part in (*before, *slot)]
        if kinds == ["b", "W"] and before[0][1:] == slot[0][1:] and not any(len(each) == 2 for each in found):
            found[-1] = (slot[0]._replace(kind="B"),)
        elif kinds == ["F", "B"] and not any(len(each) == 2 for each in found):
            found[-1] += slot
        else:
            found.append(slot)
    return found


@pytest.mark.parametrize("ranks", range(4, 17, 2))
def test_phases_are_deepseeks(ranks):
    """The counts of the eight phases in DeepSeek's code; each further micro-batch lengthens the fourth."""
    half = ranks // 2
    for rank in range(ranks):
        distance = min(rank, ranks - 1 - rank)
        phases = dualpipe_phases(ranks, 2 * ranks, rank)
        to_middle, near = half - distance - 1, distance + 1
        assert phases == (2 * to_middle, near, to_middle, near, to_middle, near, to_middle, near)
        assert dualpipe_phases(ranks, 2 * ranks + 6, rank) == phases._replace(overlapped=phases.overlapped + 3)
        weights_alone = [slot for slot in dualpipe(ranks, 2 * ranks).ranks[rank] if slot[0].kind == "W"]
        assert len(weights_alone) == phases.other_b_w_forward + phases.weights_then_own_b + phases.weights


@pytest.mark.parametrize("ranks, micro_batches", [(2, 4), (4, 8), (4, 12), (6, 12), (8, 20), (8, 64), (16, 32)])
def test_bubble_of_dualpipe(ranks, micro_batches):
    """(p / 2 - 1) (F&B + B - 3 W) on each rank; p + 1 inputs; W put off up to h + 1 times; parameters twice."""
    schedule = dualpipe(ranks, micro_batches)
    timeline = simulate(schedule, pipelines.UNIT)
    assert timeline.idle == (ranks - 2,) * ranks
    assert timeline.peak_in_flight == (ranks + 1,) * ranks == schedule.in_flight
    assert timeline.peak_weights_queue == tuple(min(rank, ranks - 1 - rank) + 1 for rank in range(ranks))
    assert sum(map(len, schedule.stages)) == 2 * schedule.num_stages


@pytest.mark.parametrize("ranks, micro_batches", [(1, 2), (2, 4), (3, 7), (4, 8), (4, 21), (8, 16)])
def test_bubble_of_dualpipe_v(ranks, micro_batches):
    """With P = 2 p stages: (P / 2 - 1) (F&B + B - 3 W), P + 1 inputs, parameters once."""
    schedule = dualpipe_v(ranks, micro_batches)
    timeline = simulate(schedule, pipelines.UNIT)
    assert timeline.idle == (2 * (ranks - 1),) * ranks
    assert timeline.peak_in_flight == (2 * ranks + 1,) * ranks
    assert timeline.peak_weights_queue == tuple(rank + 1 for rank in range(ranks))
    assert sum(map(len, schedule.stages)) == schedule.num_stages == 2 * ranks


def test_the_formula_is_an_upper_bound():
    """With W = 0.9 and F&B = 2.4, 8 ranks are idle 3.6 to 4.8 where the formula has 5.1."""
    timeline = simulate(dualpipe(8, 20), PassTimes(1, 2, 0.9, 2.4))
    assert timeline.idle == pytest.approx((3.6, 4.2, 4.8, 4.8, 4.8, 4.8, 4.2, 3.6))
    assert 3 * (2.4 + 2 - 3 * 0.9) == pytest.approx(5.1)


def test_refusals():
    with pytest.raises(ValueError, match="ranks must be even, for DualPipe starts at both ends; got 5"):
        dualpipe(5, 20)
    with pytest.raises(ValueError, match="ranks must be even, .*; got 1"):
        dualpipe(1, 4)
    with pytest.raises(ValueError, match="micro_batches must be even, .*; got 9"):
        dualpipe(4, 9)
    with pytest.raises(ValueError, match=r"micro_batches must be at least 2 \* ranks = 8 for DualPipe; got 6"):
        dualpipe(4, 6)
    with pytest.raises(ValueError, match=r"micro_batches must be at least 2 \* ranks = 6 for DualPipeV; got 5"):
        dualpipe_v(3, 5)
