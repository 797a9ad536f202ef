"""Tiles of rows: they cover every expert's blocks once, and loads stay inside the arrays."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.kernels.experts.mosaic.tile_order import row_tiles
from moe_jax.kernels.experts.routing import plan, plan_of_few
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT
from tests.helpers.expert_layers import chosen_so_often

COLUMN_TILES = 3


def places(plan, height, group):
    """Returns (expert, row, rows of the expert, column) of each tile. The references read like arrays."""
    tiles = row_tiles(plan, height, COLUMN_TILES, group)
    found = (tiles.find(jnp.int32(i), *tiles.arrays) for i in range(int(tiles.count(*tiles.arrays)) * COLUMN_TILES))
    return [tuple(map(int, coord)) for coord in found]


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.integers(0, 400), min_size=4, max_size=4),
    st.sampled_from([64, 128]),
    st.sampled_from([1, 16]),
)
def test_each_row_once(counts, height, group):
    """Each expert's rows are cut once for each column of tiles."""
    rows = plan(chosen_so_often(counts, 1600), len(counts), ROW_ALIGNMENT)
    check(rows, places(rows, height, group), height)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.lists(st.integers(-1, 6), min_size=3, max_size=3), min_size=1, max_size=20),
    st.sampled_from([64, 128]),
)
def test_few_tokens(chosen, height):
    """A block of a few tokens is one tile for each column of tiles."""
    rows = plan_of_few(jnp.asarray(chosen), 6, ROW_ALIGNMENT)
    found = places(rows, height, 1)
    check(rows, found, height)
    assert {expert for expert, *_ in found} == {e for ids in chosen for e in ids if 0 <= e < 6}


def check(rows, found, height):
    offsets = np.asarray(rows.offsets)
    for column in range(COLUMN_TILES):
        covered = [
            (e, row) for e, first, own, part in found if part == column for row in range(first, first + min(own, height))
        ]
        assert sorted(covered) == [(e, row) for e in range(rows.num_experts) for row in range(offsets[e], offsets[e + 1])]
    assert all(first + height <= rows.num_rows for _, first, *_ in found), "loads stay inside the array"


@pytest.mark.parametrize("group, columns_first", [(1, True), (16, False)])
def test_group_order(group, columns_first):
    """Rows of a group go through a column together."""
    rows = plan(chosen_so_often([200, 10], 210), 2, ROW_ALIGNMENT)
    (_, row, _, part), (_, next_row, _, next_part) = places(rows, 64, group)[:2]
    assert ((next_row == row, next_part == part) == (True, False)) is columns_first
