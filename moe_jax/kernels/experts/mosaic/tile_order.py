"""Orders the tiles of an expert's result, so that cores at work together read little data and the same data."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

GROUP = 16
"""Rows of tiles that go through the columns together. 16 tiles of 128 rows and 8 tiles of 256 columns make a square, with about
one tile for each core of a Hopper GPU."""

SMALL_MATRIX_BYTES = 8 * 2**20
"""An expert's matrix up to this size stays in the L2 cache (50 MiB) beside other experts' matrices at work, in any order."""


def rows_in_group(matrix: tuple[int, int], dtype: DTypeLike) -> int:
    """Returns the number of rows of tiles that go through the columns of this matrix together; 1 means row after row."""
    return GROUP if matrix[0] * matrix[1] * jnp.dtype(dtype).itemsize > SMALL_MATRIX_BYTES else 1


def coord_in_order(index: jax.Array, row_tiles: jax.Array | int, column_tiles: int, group: int) -> tuple[jax.Array, jax.Array]:
    """Returns (row, column) of tile number `index` of row_tiles x column_tiles: `group` rows, column by column, then the next.

    Cores take tiles in this order. Cores at work at one time then share few rows of one operand and few columns of the other.
    An expert's matrix that is larger than the L2 cache is read from memory once a group. (Row after row, it is read once for
    every one or two rows of tiles. Triton's tutorial on matrix multiplication calls this grouped ordering.)
    """
    first_row = lax.div(index, jnp.int32(group * column_tiles)) * group
    in_group = index - first_row * column_tiles
    height = jnp.minimum(row_tiles - first_row, group)
    return first_row + lax.rem(in_group, height), lax.div(in_group, height)


def row_tile_in_order(
    index: jax.Array, first_tiles_ref, num_tiles_ref, column_tiles: int, group: int
) -> tuple[jax.Array, jax.Array]:
    """Returns (row tile, column) of tile number `index` of all experts. Tiles of one expert follow `coord_in_order`.

    Args:
        first_tiles_ref: for each row tile, the first row tile of the same expert.
        num_tiles_ref: for each row tile, the number of row tiles of the same expert.
    """
    row, column = lax.div(index, jnp.int32(column_tiles)), lax.rem(index, jnp.int32(column_tiles))
    if group == 1:
        return row, column
    first = first_tiles_ref[row]
    row, column = coord_in_order(index - first * column_tiles, num_tiles_ref[row], column_tiles, group)
    return first + row, column
