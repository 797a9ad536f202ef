"""The arithmetic of uniform ticks."""

import pytest

from moe_jax.parallel.pipeline import ticks

SIZES = [(1, 1, 3), (2, 1, 4), (2, 2, 4), (4, 2, 8), (3, 3, 7), (4, 2, 3), (5, 1, 1), (2, 6, 9)]


@pytest.mark.parametrize("sizes", SIZES)
def test_each_pass_has_one_tick(sizes):
    """The tick of a pass is the formula's, and no other tick has it."""
    ranks, chunks, micro_batches = sizes
    for rank in range(ranks):
        forward, backward = {}, {}
        for tick in range(-2, ticks.num_ticks(*sizes) + 3):
            for found, at in ((forward, ticks.forward_at), (backward, ticks.backward_at)):
                if place := at(tick, rank, *sizes):
                    assert place not in found
                    found[place] = tick
        expected = {(c, i): i // ranks * chunks * ranks + i % ranks for c in range(chunks) for i in range(micro_batches)}
        assert forward == {(c, i): start + rank + c * ranks for (c, i), start in expected.items()}
        late = chunks * ranks + ranks - 1 - rank
        assert backward == {(c, i): start + late + (chunks - 1 - c) * ranks for (c, i), start in expected.items()}


@pytest.mark.parametrize("sizes", SIZES)
def test_ends_of_a_step(sizes):
    """The first v p ticks have no backward pass, the last v p no forward pass, and all passes are within the ticks."""
    ranks, chunks, micro_batches = sizes
    total, warm_up = ticks.num_ticks(*sizes), chunks * ranks
    assert total == -(-micro_batches // ranks) * ranks * chunks + ranks - 1 + chunks * ranks
    for rank in range(ranks):
        assert not any(ticks.backward_at(tick, rank, *sizes) for tick in range(warm_up))
        assert not any(ticks.forward_at(tick, rank, *sizes) for tick in range(total - warm_up, total))
