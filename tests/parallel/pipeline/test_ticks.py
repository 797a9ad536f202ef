"""The arithmetic of uniform ticks, on numbers and on arrays, and the slots of inputs."""

import numpy as np
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
                chunk, micro_batch, exists = at(tick, rank, *sizes)
                if exists:
                    assert (chunk, micro_batch) not in found
                    found[chunk, micro_batch] = tick
        expected = {(c, i): i // ranks * chunks * ranks + i % ranks for c in range(chunks) for i in range(micro_batches)}
        assert forward == {(c, i): start + rank + c * ranks for (c, i), start in expected.items()}
        late = chunks * ranks + ranks - 1 - rank
        assert backward == {(c, i): start + late + (chunks - 1 - c) * ranks for (c, i), start in expected.items()}


@pytest.mark.parametrize("sizes", SIZES)
def test_ends_of_a_step(sizes):
    """The first v p ticks have no backward pass, the last v p no forward pass, and all passes lie within the ticks."""
    ranks, chunks, micro_batches = sizes
    total, warm_up = ticks.num_ticks(*sizes), chunks * ranks
    assert total == -(-micro_batches // ranks) * ranks * chunks + ranks - 1 + chunks * ranks
    for rank in range(ranks):
        assert not any(ticks.backward_at(tick, rank, *sizes).exists for tick in range(warm_up))
        assert not any(ticks.forward_at(tick, rank, *sizes).exists for tick in range(total - warm_up, total))


def test_arithmetic_of_arrays():
    """Arrays of ticks and ranks give what numbers give: nothing branches on a value."""
    sizes = (3, 2, 7)
    tick, rank = np.meshgrid(np.arange(ticks.num_ticks(*sizes)), np.arange(3), indexing="ij")
    for at in (ticks.forward_at, ticks.backward_at):
        of_arrays = at(tick, rank, *sizes)
        for index in np.ndindex(tick.shape):
            assert tuple(part[index] for part in of_arrays) == tuple(at(*map(int, index), *sizes))


@pytest.mark.parametrize(
    "ranks, chunks, slots", [(2, 2, 6), (2, 4, 10), (4, 2, 12), (1, 1, 2), (8, 1, 16), (3, 3, 12), (8, 6, 56)]
)
def test_number_of_input_slots(ranks, chunks, slots):
    """(v + 1) p, however long the step is."""
    for micro_batches in (2 * ranks, 5 * ranks, 5 * ranks + 1):
        assert 1 + max(ticks.input_slots(ranks, chunks, micro_batches)) == slots == (chunks + 1) * ranks


@pytest.mark.parametrize("sizes", SIZES)
def test_no_input_is_overwritten(sizes):
    """On every rank a slot has one input from its forward pass to its backward pass, both ticks included."""
    ranks, chunks, _ = sizes
    slots = ticks.input_slots(*sizes)
    assert len(slots) == ticks.num_passes(*sizes)
    for rank in range(ranks):
        holder = {}
        for tick in range(ticks.num_ticks(*sizes)):
            forward, backward = ticks.forward_at(tick, rank, *sizes), ticks.backward_at(tick, rank, *sizes)
            if forward.exists:
                slot = slots[ticks.pass_number(forward.chunk, forward.micro_batch, ranks, chunks)]
                assert slot not in holder
                holder[slot] = (forward.chunk, forward.micro_batch)
            if backward.exists:
                slot = slots[ticks.pass_number(backward.chunk, backward.micro_batch, ranks, chunks)]
                assert holder.pop(slot) == (backward.chunk, backward.micro_batch)
        assert not holder
