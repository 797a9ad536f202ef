"""ZB-H1 and ZB-V: orders, bubbles, memory."""

import pytest

from moe_jax.parallel.pipeline import PassTimes, simulate, zb_h1, zb_v
from tests.helpers import pipelines


def test_order_of_zb_h1():
    schedule = zb_h1(3, 5)
    assert pipelines.listing(schedule.ranks[0]) == (
        "F0.0 F0.1 F0.2 b0.0 W0.0 F0.3 b0.1 W0.1 F0.4 b0.2 W0.2 b0.3 W0.3 b0.4 W0.4"
    )
    assert pipelines.listing(schedule.ranks[2]) == (
        "F0.0 b0.0 F0.1 b0.1 F0.2 b0.2 W0.0 F0.3 b0.3 W0.1 F0.4 b0.4 W0.2 W0.3 W0.4"
    )


@pytest.mark.parametrize("ranks, micro_batches", [(1, 3), (2, 2), (4, 8), (4, 17), (8, 8), (8, 32)])
@pytest.mark.parametrize("times", [pipelines.UNIT, PassTimes(1, 3, 0.8, 4)], ids=["plain", "remat"])
def test_bubble_of_zb_h1(ranks, micro_batches, times):
    """(p - 1) (F + B - 2 W); every rank holds p inputs, and rank r puts off r + 1 passes W."""
    timeline = simulate(zb_h1(ranks, micro_batches), times)
    assert timeline.idle == pytest.approx(((ranks - 1) * (times.forward + times.backward - 2 * times.weights),) * ranks)
    assert timeline.peak_in_flight == (ranks,) * ranks
    assert timeline.peak_weights_queue == tuple(min(rank + 1, micro_batches) for rank in range(ranks))


def test_order_of_zb_v():
    schedule = zb_v(2, 3)
    assert schedule.stages == ((0, 3), (1, 2))
    assert pipelines.listing(schedule.ranks[0]) == (
        "F0.0 F0.1 F0.2 F1.0 b1.0 W1.0 F1.1 b1.1 W1.1 b0.0 W0.0 F1.2 b1.2 W1.2 b0.1 W0.1 b0.2 W0.2"
    )
    assert pipelines.listing(schedule.ranks[1]) == (
        "F0.0 F1.0 F0.1 F1.1 b1.0 W1.0 F0.2 b0.0 W0.0 F1.2 b1.1 W1.1 b0.1 b1.2 b0.2 W0.1 W1.2 W0.2"
    )


@pytest.mark.parametrize("ranks, micro_batches", [(1, 1), (2, 3), (4, 7), (4, 16), (8, 15), (8, 40)])
def test_bubble_of_zb_v(ranks, micro_batches):
    """No rank waits between its passes if F = b = W. They begin one F after another, so each is idle for (p - 1) F."""
    timeline = simulate(zb_v(ranks, micro_batches), pipelines.UNIT)
    assert timeline.waiting == (0,) * ranks
    assert timeline.idle == (ranks - 1,) * ranks
    assert timeline.peak_in_flight == (2 * ranks,) * ranks
    assert timeline.peak_weights_queue == tuple(2 * rank + 1 for rank in range(ranks))


def test_few_micro_batches():
    """With m < p, ZB-H1's bubble is p - m units longer than its formula; ZB-V leaves micro-batches out."""
    for ranks in range(2, 9):
        for micro_batches in range(1, ranks):
            over = simulate(zb_h1(ranks, micro_batches), pipelines.UNIT).bubble - (ranks - 1)
            assert over == ranks - micro_batches
    assert pipelines.listing(zb_v(2, 1).ranks[0]) == "F0.0 F1.0 b1.0 W1.0 b0.0 W0.0"
