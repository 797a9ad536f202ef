"""Cuts the rows of a plan into tiles, each of one expert, and orders them so that concurrent cores read the same data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from moe_jax.kernels.experts.routing import Plan, masked_sum
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT

GROUP = 16
"""Rows of tiles that advance through the columns together. 16 tiles of 128 rows and 8 tiles of 256 columns form a square, with
about one tile for each core of a Hopper GPU."""

SMALL_MATRIX_BYTES = 8 * 2**20
"""An expert's matrix up to this size stays in the L2 cache (50 MiB), along with other matrices in use, in any order."""


def rows_in_group(matrix: tuple[int, int], dtype: DTypeLike) -> int:
    """Returns how many row tiles to process column by column before the next group, for L2 reuse; 1 is row by row."""
    return GROUP if matrix[0] * matrix[1] * jnp.dtype(dtype).itemsize > SMALL_MATRIX_BYTES else 1


def coord_in_order(index: jax.Array, row_tiles: jax.Array | int, column_tiles: int, group: int) -> tuple[jax.Array, jax.Array]:
    """Returns (row, column) of tile number `index` of row_tiles x column_tiles: `group` rows, column by column, then the next.

    Cores process tiles in this order. Concurrent cores then share few rows of one operand and few columns of the other. An
    expert's matrix larger than the L2 cache is read from memory once per group. (Row by row, it would be read once for every
    one or two rows of tiles. Triton's matrix multiplication tutorial calls this grouped ordering.)
    """
    first_row = lax.div(index, jnp.int32(group * column_tiles)) * group
    in_group = index - first_row * column_tiles
    height = jnp.minimum(row_tiles - first_row, group)
    return first_row + lax.rem(in_group, height), lax.div(in_group, height)


def row_tile_in_order(
    index: jax.Array, first_tiles_ref, num_tiles_ref, column_tiles: int, group: int
) -> tuple[jax.Array, jax.Array]:
    """Returns (row tile, column) of tile number `index`, counted over all experts in order.

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


class TileCoord(NamedTuple):
    """The position of an output tile: rows, columns and expert."""

    expert: jax.Array
    """The index of the matrix in the kernel's input."""
    row: jax.Array
    """The tile's first row of the whole array."""
    num_rows: jax.Array | int
    """Rows of the expert from `row` on. A tile may extend past the expert's last block."""
    column_tile: jax.Array
    """Number of the tile's block of columns, in units of the tile's columns."""


@dataclass(frozen=True)
class RowTiles:
    """The row tiles of a plan and their order. Pass `arrays` to the kernel; `count` and `find` read their references."""

    arrays: tuple[Int[Array, "_"], ...]
    count: Callable[..., jax.Array]
    """(*references) -> number of tiles of rows."""
    find: Callable[..., TileCoord]
    """(index, *references) -> coordinates of tile number `index` of rows and columns."""


def row_tiles(plan: Plan, height: int, column_tiles: int, group: int) -> RowTiles:
    """Cuts the rows of a plan into tiles of `height` rows, in one or two small XLA kernels.

    `tile_order.row_tile_in_order` defines the order of the tiles.
    """
    blocks_are_tiles = plan.expert_of_block is not None and height == ROW_ALIGNMENT and group == 1
    if plan.holds_all_tokens or blocks_are_tiles:
        return _blocks_as_tiles(plan, column_tiles)
    return _cut(plan, height, column_tiles, group)


def _cut(plan: Plan, height: int, column_tiles: int, group: int) -> RowTiles:
    first_row, end_row = plan.offsets[: plan.num_experts], plan.offsets[1 : plan.num_experts + 1]
    num_tiles = -(-(end_row - first_row) // height)
    expert = jnp.arange(plan.num_experts, dtype=jnp.int32)
    if height == ROW_ALIGNMENT:
        ends = end_row // height
    else:
        ends = masked_sum(expert <= expert[:, None], num_tiles[None])
    first_tile = ends - num_tiles
    # Each expert with rows has at most one tile that is not full.
    most = plan.num_rows // height + min(plan.num_experts, plan.num_rows // ROW_ALIGNMENT)
    tile = jnp.arange(most, dtype=jnp.int32)[:, None]
    row = first_row + (tile - first_tile) * height
    # The values of the expert that owns a tile: a sum over experts in which all others are zero.
    is_owner = (first_tile <= tile) & (tile < ends)
    values = plan.in_stack(expert), row, jnp.minimum(end_row - row, height), first_tile, num_tiles
    of_experts = tuple(jnp.where(is_owner, value, 0) for value in values)
    of_owner = lax.reduce(of_experts, (jnp.int32(0),) * len(values), lambda a, b: tuple(map(jnp.add, a, b)), (1,))

    def find(index, experts_ref, rows_ref, heights_ref, first_tiles_ref, num_tiles_ref, ends_ref):
        i, column_tile = row_tile_in_order(index, first_tiles_ref, num_tiles_ref, column_tiles, group)
        return TileCoord(experts_ref[i], rows_ref[i], heights_ref[i], column_tile)

    return RowTiles((*of_owner, ends), lambda *references: references[-1][plan.num_experts - 1], find)


def _blocks_as_tiles(plan: Plan, column_tiles: int) -> RowTiles:
    """Uses each block of rows as a tile: valid for every height and order if experts have at most one block of rows, and for
    tiles of a block's height row by row."""
    if plan.expert_of_block is None:
        row = ROW_ALIGNMENT * jnp.arange(plan.num_rows // ROW_ALIGNMENT, dtype=jnp.int32)
        experts = plan.in_stack(masked_sum(plan.offsets[1:] <= row[:, None], jnp.ones_like(plan.offsets[1:])))
    else:
        experts = plan.expert_of_block

    def find(index, experts_ref, _):
        i, column_tile = lax.div(index, jnp.int32(column_tiles)), lax.rem(index, jnp.int32(column_tiles))
        return TileCoord(experts_ref[i], i * ROW_ALIGNMENT, ROW_ALIGNMENT, column_tile)

    def count(_, offsets_ref):
        return lax.div(offsets_ref[plan.num_experts], jnp.int32(ROW_ALIGNMENT))

    return RowTiles((experts, plan.offsets), count, find)
