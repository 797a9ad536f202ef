"""Cuts the rows of a plan into tiles, each of one expert, and tells a kernel where each of its tiles lies."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moe_jax.kernels.experts.mosaic.tile_order import row_tile_in_order
from moe_jax.kernels.experts.routing import Plan, masked_sum
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT


@dataclass(frozen=True)
class Place:
    """Where a tile lies, and, in an epilogue, 64 rows of a warpgroup's share of it."""

    expert: jax.Array
    row: jax.Array
    num_rows: jax.Array | int
    """Rows from `row` on that are the expert's own: a tile may reach beyond its last block."""
    part: jax.Array
    """Which tile of columns; in an epilogue in units of the warpgroup's columns."""


@dataclass(frozen=True)
class RowTiles:
    """A kernel takes `arrays` among its inputs; both functions read the references of them."""

    arrays: tuple[Int[Array, "_"], ...]
    count: Callable[..., jax.Array]
    """(*references) -> how many tiles of rows there are."""
    find: Callable[..., Place]
    """(index, *references) -> where tile number `index` of rows and columns lies."""


def row_tiles(plan: Plan, height: int, column_tiles: int, group: int) -> RowTiles:
    """Tiles of `height` rows, in one or two small kernels: where few tokens are decoded each counts.

    Tiles go through the columns as `tile_order.row_tile_in_order` says.
    """
    return _blocks_as_tiles(plan, column_tiles) if plan.holds_all_tokens else _cut(plan, height, column_tiles, group)


def _cut(plan: Plan, height: int, column_tiles: int, group: int) -> RowTiles:
    first_row, end_row = plan.offsets[:-1], plan.offsets[1:]
    num_tiles = -(-(end_row - first_row) // height)
    expert = jnp.arange(plan.num_experts, dtype=jnp.int32)
    if height == ROW_ALIGNMENT:
        ends = end_row // height
    else:
        ends = masked_sum(expert <= expert[:, None], num_tiles[None])
    first_tile = ends - num_tiles
    # Each expert with rows ends with at most one tile that is not full.
    most = plan.num_rows // height + min(plan.num_experts, plan.num_rows // ROW_ALIGNMENT)
    tile = jnp.arange(most, dtype=jnp.int32)[:, None]
    row = first_row + (tile - first_tile) * height
    # Of the expert that owns a tile: the sum over experts of what is zero for all others.
    is_owner = (first_tile <= tile) & (tile < ends)
    values = expert, row, jnp.minimum(end_row - row, height), first_tile, num_tiles
    of_experts = tuple(jnp.where(is_owner, value, 0) for value in values)
    of_owner = lax.reduce(of_experts, (jnp.int32(0),) * len(values), lambda a, b: tuple(map(jnp.add, a, b)), (1,))

    def find(index, experts_ref, rows_ref, heights_ref, first_tiles_ref, num_tiles_ref, ends_ref):
        i, part = row_tile_in_order(index, first_tiles_ref, num_tiles_ref, column_tiles, group)
        return Place(experts_ref[i], rows_ref[i], heights_ref[i], part)

    return RowTiles((*of_owner, ends), lambda *references: references[-1][plan.num_experts - 1], find)


def _blocks_as_tiles(plan: Plan, column_tiles: int) -> RowTiles:
    """Where each expert has one block of rows or none: a block is a tile of any height, and in each order of tiles."""
    row = ROW_ALIGNMENT * jnp.arange(plan.num_rows // ROW_ALIGNMENT, dtype=jnp.int32)
    experts = masked_sum(plan.offsets[1:] <= row[:, None], jnp.ones_like(plan.offsets[1:]))

    def find(index, experts_ref, _):
        i, part = lax.div(index, jnp.int32(column_tiles)), lax.rem(index, jnp.int32(column_tiles))
        return Place(experts_ref[i], i * ROW_ALIGNMENT, ROW_ALIGNMENT, part)

    def count(_, offsets_ref):
        return lax.div(offsets_ref[plan.num_experts], jnp.int32(ROW_ALIGNMENT))

    return RowTiles((experts, plan.offsets), count, find)
