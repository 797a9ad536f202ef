"""Tables of schedules: replayed on numbers, each pass finds its inputs in its slot, and each happens once."""

from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import example, given, settings

from moe_jax.parallel.choices import UNIFORM
from moe_jax.parallel.pipeline import verify
from moe_jax.parallel.pipeline.table import lockstep_table, undivided
from tests.helpers import pipelines


def replay(schedule, table):
    """Runs a table as the executor does, with names in place of arrays; returns how often each pass ran."""
    num_ranks, last, sizes = len(schedule.ranks), schedule.num_stages - 1, table.sizes
    inputs, gradients, saved, products = ([[None] * (n + 1) for _ in range(num_ranks)] for n in sizes.values())
    output, dx = [None] * num_ranks, [None] * num_ranks
    passes = Counter()

    def at(columns, tick, rank):
        return type(columns)(*(column[tick, rank] for column in columns))

    def place(rank, row):
        direction = schedule.directions[row.chunk]
        assert row.micro_batch // schedule.micro_batches == direction
        return schedule.stages[rank][row.chunk], row.micro_batch

    for tick, span in [(tick, each) for each in table.spans for tick in range(each.begins, each.ends)]:
        for losses, slots, last_rank in zip(table.losses, table.rows.losses, table.last_ranks, strict=True):
            if losses[tick] >= 0:
                assert span.has_losses
                assert output[last_rank] == (last, losses[tick])
                for rank in range(num_ranks):
                    gradients[rank][slots[tick, rank]] = ("loss", losses[tick]) if rank == last_rank else None
        before = [list(slots) for slots in saved]
        for rank in range(num_ranks):
            for kind in span.kinds[table.rows.branch[tick, rank]]:
                row = at({"F": table.rows.forward, "W": table.rows.weights}.get(kind, table.rows.backward), tick, rank)
                if not row.exists:
                    assert len(span.kinds) == 1
                    (output if kind == "F" else dx)[rank] = "masked"
                    if kind != "B":
                        (saved if kind == "F" else products)[rank][row.saved if kind == "F" else row.product] = "masked"
                elif kind == "F":
                    stage, micro_batch = found = place(rank, row)
                    assert row.is_first == (stage == 0)
                    assert stage == 0 or inputs[rank][row.arrived] == (stage - 1, micro_batch)
                    output[rank] = saved[rank][row.saved] = found
                elif kind == "W":
                    found = place(rank, row)
                    assert products[rank][row.product] == found
                else:
                    stage, micro_batch = found = place(rank, row)
                    assert row.is_first == (stage == 0)
                    assert before[rank][row.saved] == found
                    assert gradients[rank][row.arrived] == (("loss" if stage == last else stage + 1), micro_batch)
                    dx[rank] = found
                    if kind == "b":
                        products[rank][row.product] = found
                    else:
                        passes["W", *found] += 1
                if row.exists:
                    passes[kind.lower() if kind == "B" else kind, *found] += 1
        for kinds, hops, columns, sent, slots in (
            ("F", table.forward_hops, table.rows.inputs, output, inputs),
            ("Bb", table.backward_hops, table.rows.gradients, dx, gradients),
        ):
            if not set(kinds) & set(chain(*span.kinds)):
                continue
            for distance, column in zip(hops, columns, strict=True):
                for rank in range(num_ranks):
                    slots[rank][column[tick, rank]] = sent[(rank - distance) % num_ranks]
    return passes


def assert_complete(schedule):
    table = lockstep_table(schedule)
    streams = len(set(schedule.directions))
    stages, micro_batches = range(schedule.num_stages), range(streams * schedule.micro_batches)
    assert replay(schedule, table) == {(kind, s, i): 1 for kind in "FbW" for s in stages for i in micro_batches}
    masked = int(schedule.name in UNIFORM)
    assert table.sizes["saved"] <= max(schedule.in_flight) + masked
    assert table.sizes["product"] <= max(schedule.weights_queue)


@settings(max_examples=60, deadline=None)
@given(pipelines.schedules())
@example(pipelines.MAKE["dualpipe"](4, 1, 8))
@example(pipelines.MAKE["dualpipe-v"](3, 1, 7))
@example(pipelines.MAKE["interleaved"](2, 3, 5))
@example(pipelines.MAKE["uniform"](4, 2, 3))
@example(pipelines.MAKE["uniform-w"](5, 2, 2))
def test_each_pass_finds_its_arrays(schedule):
    assert_complete(schedule)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v", "zb-h1"])
def test_undivided(name):
    """Whole backward passes in place of b are a schedule too, with no pass W and nothing put off."""
    schedule = undivided(pipelines.MAKE[name](4, 1, 10))
    verify(schedule)
    assert_complete(schedule)
    assert {part.kind for slots in schedule.ranks for slot in slots for part in slot} == {"F", "B"}
    assert lockstep_table(schedule).sizes["product"] == 0


def test_a_schedule_that_would_hang_is_refused():
    """Rank 1 computes all its forward passes first, and rank 0 wants a gradient before it sends the next micro-batch."""
    schedule = pipelines.MAKE["1f1b"](2, 1, 4)
    waiting = tuple(sorted(pipelines.MAKE["1f1b"](1, 1, 4).ranks[0], key=lambda slot: slot[0].kind == "B"))
    with pytest.raises(ValueError, match="the ranks wait for each other: slot 1 of rank 0"):
        lockstep_table(replace(schedule, ranks=(pipelines.with_swapped(schedule, 0, 1, 2).ranks[0], waiting)))
