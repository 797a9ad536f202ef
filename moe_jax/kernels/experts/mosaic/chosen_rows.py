"""Rows of few tokens, in blocks of 64 whose rows mostly have no token.

A matmul loads no row after the last token. It stores 8 rows at a time, if one of them has a token (`Plan.chosen_rows`). In
shared memory 8 rows are a tile, which one copy moves.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.experts.mosaic.tile_order import TileCoord
from moe_jax.kernels.experts.routing import ROWS_OF_A_BIT, Plan
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT


class ChosenRows(NamedTuple):
    """Bit masks from a plan that select which rows of a block are stored; None if all are."""

    bits: Any
    """`Plan.chosen_rows`. None: all rows of all blocks are stored."""
    offsets: Any
    """`Plan.offsets`. None: each expert has at most one block."""


def chosen_rows_of(plan: Plan) -> ChosenRows:
    """Returns the `ChosenRows` operands of a kernel for this plan."""
    one_block = plan.chosen_rows is None or plan.holds_all_tokens
    return ChosenRows(plan.chosen_rows, None if one_block else plan.offsets)


def stored_rows(chosen: ChosenRows, plan: Plan, coord: TileCoord, row) -> tuple[Any, int]:
    """Returns (bits, number of bits): which groups of 8 rows in the tile's block at `row` to store.

    Rows 8 i to 8 i + 7 are stored if bit i is set; all, if the bits are None. `chosen` has references.
    """
    num_bits = _rows_in_use(plan) // ROWS_OF_A_BIT
    if chosen.bits is None:
        return None, num_bits
    expert = lax.rem(coord.expert, jnp.int32(plan.num_experts))
    bits = chosen.bits[expert]
    if chosen.offsets is not None:
        # Blocks before the expert's last one are full.
        bits = jnp.where(row + ROW_ALIGNMENT == chosen.offsets[expert + 1], bits, -1)
    return bits, num_bits


def store_rows(chunk, output, row, column, stored: tuple[Any, int]) -> None:
    """Starts TMA stores of the selected rows of a 64-row chunk to output[row : row + 64, column : ...]."""

    def store(first, rows):
        target = output.at[pl.ds(row + first, rows), pl.ds(column, chunk.shape[1])]
        plgpu.copy_smem_to_gmem(chunk.at[pl.ds(first, rows)], target, commit_group=False)

    bits, num_bits = stored
    if bits is None:
        store(0, chunk.shape[0])
    else:
        # The barrier hides the number from the compiler: unrolled, the loop makes FP8 kernels spill 44 bytes.
        @pl.loop(0, lax.optimization_barrier(jnp.int32(num_bits)))
        def _rows(bit):
            first = pl.multiple_of(bit * ROWS_OF_A_BIT, ROWS_OF_A_BIT)
            pl.when((bits >> bit) & 1 != 0)(partial(store, first, ROWS_OF_A_BIT))

    plgpu.commit_smem_to_gmem_group()


class LoadedRows(NamedTuple):
    """Selects the rows of a that each tile loads, if a has fewer rows than the plan."""

    are_tokens: bool
    """True: they are the tokens, the same for all tiles. False: the rows of the tile's block."""
    number: int
    """Number of loaded rows, from the slot's first on. The others keep old data, and their sums are not stored."""

    def first_row(self, row: jax.Array) -> jax.Array:
        """Returns the first row of a for the tile whose block begins at `row`."""
        # Not a constant 0: JAX refuses constant slices past a's end, which TMA reads as zeros.
        return row * 0 if self.are_tokens else row


def loaded_rows(plan: Plan, height: int, num_sources: int) -> LoadedRows:
    """Returns the `LoadedRows` for tiles of `height` rows and an array of `num_sources` rows."""
    if not plan.holds_all_tokens:
        return LoadedRows(False, height)
    return LoadedRows(num_sources < plan.num_rows, _rows_in_use(plan))


def _rows_in_use(plan: Plan) -> int:
    """Returns the number of a block's rows, from its first on, that may have tokens."""
    tokens = plan.row_of_pair.shape[0]
    return -(-tokens // ROWS_OF_A_BIT) * ROWS_OF_A_BIT if plan.holds_all_tokens else ROW_ALIGNMENT
