"""The efficiency of schedules asynchronously, in lockstep and masked; hops, times of stages, errors."""

from dataclasses import replace

import pytest

from moe_jax.parallel.pipeline import Part, PassTimes, bubble_formula, one_f_one_b, simulate, uniform, zb_h1
from moe_jax.parallel.pipeline.simulator import memory_peaks
from tests.helpers import pipelines

REMAT = PassTimes(1, 3, 0.8, 4)
OVERLAP = PassTimes(1, 2, 1, 2.6)
EFFICIENCIES = [
    # ranks, micro-batches, times, uniform with 1, 2, 4 chunks, then (asynchronous, lockstep, masked) of the others;
    # `test_page` compares more
    (
        16,
        64,
        pipelines.UNIT,
        (0.810, 0.895, 0.945),
        (0.810, 0.640),
        (0.928, 0.928),
        (0.932, 0.857, 0.756),
        (0.928, 0.842, 0.741),
    ),
    (8, 32, REMAT, (0.821, 0.901, 0.948), (0.821, 0.587), (0.884, 0.594), (0.909, 0.848, 0.784), (0.891, 0.817, 0.755)),
    (8, 32, OVERLAP, (0.795, 0.871, 0.915), (0.711, 0.562), (0.808, 0.808), (0.908, 0.860, 0.762), (0.902, 0.832, 0.734)),
]


@pytest.mark.parametrize("row", EFFICIENCIES)
def test_efficiencies(row):
    ranks, micro_batches, times, by_chunks, *others = row
    for chunks, expected in zip((1, 2, 4), by_chunks, strict=True):
        assert efficiencies("uniform", ranks, chunks, micro_batches, times) == (expected,) * 3
    for name, expected in zip(("1f1b", "zb-h1", "dualpipe", "dualpipe-v"), others, strict=True):
        assert efficiencies(name, ranks, 1, micro_batches, times)[: len(expected)] == expected


def efficiencies(name, ranks, chunks, micro_batches, of_rank) -> tuple[float, ...]:
    schedule = pipelines.MAKE[name](ranks, chunks, micro_batches)
    times = pipelines.of_stage(schedule, of_rank)
    ways = ({}, {"lockstep": True}, {"lockstep": True, "masked": True})
    return tuple(round(simulate(schedule, times, **way).efficiency, 3) for way in ways)


def test_times_of_slots():
    """Rank 1 of 1F1B begins when F of rank 0 has travelled; a hop within a rank takes nothing."""
    first, second = simulate(one_f_one_b(2, 1), PassTimes(1, 2), hop=0.25).ranks
    assert [(slot.start, slot.end) for slot in first] == [(0, 1), (4.5, 6.5)]
    assert [(slot.start, slot.end) for slot in second] == [(1.25, 2.25), (2.25, 4.25)]
    assert simulate(uniform(1, 1, 2), PassTimes(1, 2), hop=9).makespan == 6


def test_lockstep_waits_for_the_longest():
    """Ticks: F; F and F; B; F and B; B; B. Each but the last is followed by a hop."""
    timeline = simulate(one_f_one_b(2, 2), PassTimes(1, 2), lockstep=True, hop=0.5)
    starts = [[slot.start for slot in slots] for slots in timeline.ranks]
    assert starts == [[0, 1.5, 5.5, 10.5], [1.5, 3, 5.5, 8]]
    assert timeline.makespan == 12.5


def test_the_least_work():
    """Efficiency counts min(F + B, F&B) for each micro-batch, for schedules that overlap nothing too."""
    apart, timeline = PassTimes(1, 3, 0.8), simulate(one_f_one_b(8, 32), PassTimes(1, 3, 0.8, 3.5), hop=0.1)
    assert timeline.makespan == pytest.approx(162.8) and timeline.bubble == pytest.approx(34.8)
    assert timeline.efficiency == pytest.approx(32 * 3.5 / 162.8)
    assert simulate(one_f_one_b(8, 32), apart, hop=0.1).efficiency == pytest.approx(1 - 34.8 / 162.8)
    assert simulate(one_f_one_b(2, 2), PassTimes(1e307, 2e307, 0)).efficiency == pytest.approx(2 / 3)


def test_times_of_stages():
    """The longest stage bounds the step: one stage of double length makes the others wait."""
    schedule = one_f_one_b(3, 9)
    slow = simulate(schedule, PassTimes((1, 2, 1), (2, 4, 2), 1))
    assert slow.idle[1] == pytest.approx(slow.makespan - 9 * 6)
    assert 9 * 6 < slow.makespan < simulate(schedule, PassTimes(2, 4)).makespan
    both = PassTimes(1, 2, 1, (2, 3, 5))
    assert both.both(0, 2) == 5 and both.divided(2).both(0, 1) == 1.5
    assert PassTimes((1, 2), (3, 5)).both(0, 1) == 6


def test_memory_peaks():
    """An input is held from F to W; the F of an overlapped pair comes before the B is done."""
    f, b, w = (lambda i, kind=kind: Part(kind, 0, i) for kind in "FbW")
    assert memory_peaks([(f(0),), (f(1),), (b(0),), (b(1),), (f(2),), (w(0),), (w(1),)]) == (3, 2)
    assert memory_peaks([(f(0),), (f(1), Part("B", 0, 0)), ()]) == (2, 0)


def test_a_deadlock_is_named():
    schedule = pipelines.with_swapped(one_f_one_b(2, 2), 0, 1, 2)
    schedule = pipelines.with_swapped(schedule, 1, 0, 2)
    for lockstep in (False, True):
        with pytest.raises(
            ValueError, match="the ranks wait for each other: slot 1 of rank 0 needs b of stage 1, micro-batch 0"
        ):
            simulate(schedule, PassTimes(), lockstep=lockstep)


@pytest.mark.parametrize(
    "times, message",
    [
        (PassTimes(-1), "forward must be a finite time of at least 0; got -1"),
        (PassTimes(1, float("nan")), "backward must be a finite time of at least 0; got nan"),
        (PassTimes((1, 2, 3)), "forward must be one time or 2, one for each stage; got 3"),
        (PassTimes(1, 2, 2.5), "weights is a part of backward=2, so it must be at most that; got 2.5"),
        (PassTimes(overlapped=-3), "overlapped must be a finite time of at least 0; got -3"),
        (PassTimes(float("inf")), "forward must be a finite time of at least 0; got inf"),
        (PassTimes(overlapped=1e-3), "overlapped must be at least the longer of forward=1.0 and backward=2.0, .*; got 0.001"),
        (PassTimes((1, 3), 2, 1, (2, 2.5)), "at least the longer of forward=3 and backward=2, .*; got 2.5"),
        (PassTimes(1e308, 1e308), "the time of the step is too large for a float; give the times in a larger unit"),
    ],
)
def test_bad_times_are_refused(times, message):
    with pytest.raises(ValueError, match=message):
        simulate(one_f_one_b(2, 2), times)


def test_bad_options_are_refused():
    for hop in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"hop must be a finite time of at least 0; got {hop}"):
            simulate(one_f_one_b(2, 2), PassTimes(), hop=hop)
    for lockstep in (False, True):
        with pytest.raises(ValueError, match="the time of the step is too large for a float"):
            simulate(one_f_one_b(2, 2), PassTimes(), hop=1e308, lockstep=lockstep)
    with pytest.raises(ValueError, match="masked=True needs lockstep=True"):
        simulate(one_f_one_b(2, 2), PassTimes(), masked=True)


def test_formulas():
    """The four parts of DualPipe's bubble in the study notes sum to the published formula."""
    f, b, w, both = 1.1, 2.5, 0.7, 3.2
    times, schedule = PassTimes(f, b, w, both), pipelines.MAKE["dualpipe"](8, 1, 16)
    parts = (8 / 2 - 1) * (f + (b - w - f) + (both - b) + (b - 2 * w))
    assert bubble_formula(schedule, times) == pytest.approx(parts)
    assert bubble_formula(zb_h1(4, 4), times) == pytest.approx(3 * (f + b - 2 * w))
    with pytest.raises(ValueError, match="no formula for a schedule named 'mine'; there are: 1f1b"):
        bubble_formula(replace(schedule, name="mine"), times)
    with pytest.raises(ValueError, match="one time for every stage"):
        bubble_formula(schedule, PassTimes((1,) * 8))
