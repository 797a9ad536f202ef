"""The executor of tables with a chain of numbers in place of a model: each pass counts once, in every schedule."""

from dataclasses import replace

import pytest
from jax import lax

from moe_jax.parallel.collectives.hops import hop
from tests.helpers import pipelines
from tests.helpers.toy_pipeline import assert_counts_once


@pytest.mark.parametrize(
    "name, ranks, chunks, micro_batches",
    [
        ("1f1b", 4, 1, 6),
        ("interleaved", 3, 2, 5),
        ("uniform", 2, 2, 3),
        ("uniform-w", 4, 1, 3),
        ("zb-h1", 3, 1, 2),
        ("zb-v", 4, 2, 7),
        ("dualpipe", 4, 1, 10),
        ("dualpipe-v", 3, 2, 7),
    ],
)
def test_each_stage_and_micro_batch_counts_once(name, ranks, chunks, micro_batches):
    assert_counts_once(pipelines.MAKE[name](ranks, chunks, micro_batches), micro_batches)


@pytest.mark.parametrize(
    "travel, message",
    [
        (lambda x: hop(x, "expert", 1), "a pass has the transfer ppermute over expert, which waits for all devices"),
        (lambda x: lax.cond(x > 0, lambda: hop(x, "expert", 1), lambda: x), "a pass has the transfer ppermute over expert"),
        (
            lambda x: lax.psum_scatter(lax.all_gather(x, "pipe"), "pipe") / 2,
            "a pass has the transfer all_gather over pipe, whose ranks",
        ),
    ],
)
def test_transfers_that_would_hang_are_refused(travel, message):
    with pytest.raises(ValueError, match=message):
        assert_counts_once(pipelines.MAKE["1f1b"](2, 1, 4), 4, travel, expert=2)


def test_stages_anywhere_on_the_ring():
    """Rank r has stage r + 1, and the last rank stage 0: parameters come from the next rank, and gradients go back to it."""
    schedule = pipelines.MAKE["1f1b"](3, 1, 4)
    turned = {
        name: (*of_ranks[1:], of_ranks[0]) for name in ("ranks", "stages", "in_flight") if (of_ranks := getattr(schedule, name))
    }
    assert_counts_once(replace(schedule, **turned), 4)
