"""The order of tiles: each comes once, and for large matrices neighbours in the order form nearly a square."""

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.kernels.experts.mosaic.tile_order import GROUP, coord_in_order, rows_in_group


def order(row_tiles, column_tiles, group=GROUP):
    """Returns (row, column) of the first 1024 tiles at most."""
    places = coord_in_order(jnp.arange(1024, dtype=jnp.int32), row_tiles, column_tiles, group)
    return list(zip(*(place.tolist() for place in places), strict=True))[: row_tiles * column_tiles]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3 * GROUP + 1), st.integers(1, 20), st.sampled_from([1, GROUP]))
def test_each_tile_once(row_tiles, column_tiles, group):
    assert sorted(order(row_tiles, column_tiles, group)) == [(i, j) for i in range(row_tiles) for j in range(column_tiles)]


def test_groups_of_rows():
    """A group of rows goes through the columns before the next group."""
    assert order(GROUP + 2, 3)[: 2 * GROUP : GROUP] == [(0, 0), (0, 1)]
    assert order(GROUP + 2, 3)[3 * GROUP :] == [(GROUP + i, j) for j in range(3) for i in range(2)]
    assert order(3, 2, group=1) == [(i, j) for i in range(3) for j in range(2)]


@pytest.mark.parametrize("row_tiles, column_tiles", [(5, 28), (64, 112), (512, 16)])
def test_rows_and_columns_of_128_tiles(row_tiles, column_tiles):
    """Covers DeepSeek-V3's and Mixtral's experts. Row after row, the first two have 28 and 112 columns at work."""
    at_work = order(row_tiles, column_tiles)[:128]
    needed = len({i for i, _ in at_work}) + len({j for _, j in at_work})
    assert needed <= max(GROUP + 128 // GROUP, row_tiles + -(-128 // row_tiles))


@pytest.mark.parametrize("matrix, group", [((1536, 2048), 1), ((4096, 1536), GROUP), ((7168, 4096), GROUP)])
def test_large_matrices_are_grouped(matrix, group):
    """Matrices larger than 8 MiB."""
    assert rows_in_group(matrix, jnp.dtype(jnp.bfloat16)) == group
