"""In which order the tiles of an expert's result are computed, so that what cores read at one time is little and alike."""

import jax
import jax.numpy as jnp
from jax import lax

GROUP = 16
"""Rows of tiles that go through the columns together. 16 tiles of 128 rows and 8 of 256 columns beside them are a square, and
about as many as a Hopper GPU has cores."""

SMALL_MATRIX_BYTES = 8 * 2**20
"""An expert's matrix up to this size stays in the L2 cache (50 MiB) beside those of other experts at work, in any order."""


def rows_in_group(matrix: tuple[int, int], dtype: jnp.dtype) -> int:
    """How many rows of tiles of an expert with such a matrix go through the columns together; 1: row after row."""
    return GROUP if matrix[0] * matrix[1] * jnp.dtype(dtype).itemsize > SMALL_MATRIX_BYTES else 1


def place_in_order(index: jax.Array, row_tiles: jax.Array | int, column_tiles: int, group: int) -> tuple[jax.Array, jax.Array]:
    """Row and column of tile number `index` of row_tiles x column_tiles: `group` rows, column after column, then the next.

    Cores take tiles in this order. Those at work at one time then share few rows of one operand and few columns of the other,
    and an expert's matrix that is larger than the L2 cache is read from memory once a group. (Row after row, it is read once
    for every one or two rows of tiles. Triton's tutorial on matrix multiplication calls this grouped ordering.)
    """
    first_row = lax.div(index, jnp.int32(group * column_tiles)) * group
    in_group = index - first_row * column_tiles
    height = jnp.minimum(row_tiles - first_row, group)
    return first_row + lax.rem(in_group, height), lax.div(in_group, height)


def row_tile_in_order(
    index: jax.Array, first_tiles_ref, num_tiles_ref, column_tiles: int, group: int
) -> tuple[jax.Array, jax.Array]:
    """Row tile and column of tile number `index` of all experts', each expert's in the order of `place_in_order`.

    Args:
        first_tiles_ref, num_tiles_ref: of each row tile, the first of the same expert and how many that has.
    """
    row, column = lax.div(index, jnp.int32(column_tiles)), lax.rem(index, jnp.int32(column_tiles))
    if group == 1:
        return row, column
    first = first_tiles_ref[row]
    row, column = place_in_order(index - first * column_tiles, num_tiles_ref[row], column_tiles, group)
    return first + row, column
