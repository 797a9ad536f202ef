"""The tiles that a pass supports, limited by its epilogue, the experts' matrices and a Hopper core's shared memory."""

import dataclasses
from typing import Literal, get_args

from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.experts.mosaic.by_rows import CHUNK
from moe_jax.kernels.hopper.mainloop import STEP, TileShape
from moe_jax.kernels.hopper.pipeline import CONSUMERS, SHARED_MEMORY, WGMMA_ROWS

Pass = Literal["gated_matmul", "grouped_matmul", "grouped_matmul_transposed", "gated_matmul_backward", "grouped_outer"]
"""The kernels' names in profiles; docs/kernels.md describes what each computes."""

PASSES: tuple[Pass, ...] = get_args(Pass)

ROWS, COLUMNS = (64, 128), (64, 128, 192, 256)
"""A plan has one spare block of 64 rows after the last expert, so at most 128 rows; one wgmma has at most 256 columns."""


def refusal(pass_name: Pass, matrix: tuple[int, int], tile: TileShape) -> str | None:
    """Returns why a pass cannot use a tile, with the supported values; None if it can.

    Args:
        matrix: shape of one expert's matrix as stored: [2*inter, hidden] of w_gate_up or [hidden, inter] of w_down. The pass
            reads it or, like `grouped_outer`, writes its gradient.
    """
    heights = fitting_rows(pass_name, matrix)
    if tile.rows not in heights:
        return f"rows is {tile.rows}; it must be {_one_of(heights)}"
    ping_pong = " by turns" if tile.ping_pong else ""
    widths = fitting_columns(pass_name, matrix, tile.rows, tile.ping_pong)
    if tile.columns not in widths:
        return f"columns is {tile.columns}; with {tile.rows} rows{ping_pong} it must be {_one_of(widths)}"
    most = most_stages(pass_name, tile)
    if not 2 <= tile.stages <= most:
        return (
            f"stages is {tile.stages}; with tiles of {tile.rows} x {tile.columns}{ping_pong} it must be 2 to {most}, "
            f"what {SHARED_MEMORY} bytes of shared memory hold"
        )
    return None


def candidates(pass_name: Pass, matrix: tuple[int, int]) -> list[TileShape]:
    """Returns the tiles worth measuring, at most 15.

    Every shape that fits, with 3 stages and with the most stages that fit up to 8. With ping-pong, the two largest of 128 rows
    and 64 x 128, with the most stages that fit. If no other tile of 64 rows fits, the two largest of these.
    """

    def filled(tile: TileShape) -> TileShape:
        return dataclasses.replace(tile, stages=min(most_stages(pass_name, tile), 8))

    tiles: list[TileShape] = []
    for rows in fitting_rows(pass_name, matrix):
        shared = fitting_columns(pass_name, matrix, rows)
        for columns in shared:
            tiles += dict.fromkeys((TileShape(rows, columns, 3), filled(TileShape(rows, columns, 3))))
        fitting = fitting_columns(pass_name, matrix, rows, ping_pong=True)
        widths = fitting[-2:] if rows == 128 or not shared else [columns for columns in fitting if columns == 128]
        tiles += [filled(TileShape(rows, columns, 3, ping_pong=True)) for columns in widths]
    return tiles


def fitting_rows(pass_name: Pass, matrix: tuple[int, int]) -> list[int]:
    """Returns the supported tile heights: rows of the matrix for `grouped_outer`, of tokens for other passes."""
    return [rows for rows in ROWS if pass_name != "grouped_outer" or matrix[0] % rows == 0]


def fitting_columns(pass_name: Pass, matrix: tuple[int, int], rows: int, ping_pong: bool = False) -> list[int]:
    """Returns the supported tile widths.

    They divide the pass's columns, leave each warpgroup whole chunks (`gated_matmul`: of gate and of up each), and its sums fit
    the registers. Plain products with ping-pong support any width up to the number of columns: 192 is the widest that fits.
    """
    total = matrix[0] if pass_name in ("gated_matmul", "grouped_matmul") else matrix[1]
    unit = 2 * CHUNK if pass_name == "gated_matmul" else CHUNK
    # A thread has 232 registers; 128 sums of a warpgroup need one in each thread. The backward epilogue needs more for itself.
    most_sums = 128 * (128 if pass_name == "gated_matmul_backward" else 192)
    takes_any = ping_pong and not pass_name.startswith("gated")

    def fits(tile: TileShape) -> bool:
        covers = total % tile.columns == 0 or (takes_any and tile.columns < total)
        return covers and tile.warpgroup_columns % unit == 0 and tile.warpgroup_rows * tile.warpgroup_columns <= most_sums

    return [columns for columns in COLUMNS if fits(TileShape(rows, columns, 0, ping_pong))]


def most_stages(pass_name: Pass, tile: TileShape) -> int:
    """Returns the largest number of pipeline stages with which a tile fits into shared memory."""
    none, one = (shared_memory(pass_name, dataclasses.replace(tile, stages=stages)) for stages in (0, 1))
    return (SHARED_MEMORY - none) // (one - none)


def shared_memory(pass_name: Pass, tile: TileShape) -> int:
    """Returns the bytes of shared memory of a pass: pipeline slots, chunks in flight, and barriers.

    The 1024 bytes of `row_copies.landing_barriers` are left out: a slot of gate_up has a multiple of 8192 bytes, which leaves
    3072.
    """
    slots = tile.stages * (tile.rows + tile.columns) * STEP * 2
    chunk = WGMMA_ROWS * CHUNK * 2
    if pass_name == "gated_matmul_backward":
        # Per consumer: one outgoing chunk, two incoming chunks each of gate and up; and Pallas' scratch for a sum.
        rest = CONSUMERS * 5 * chunk + 8 * CONSUMERS * 2 + plgpu.CompilerParams().reduction_scratch_bytes
    else:
        rest = CONSUMERS * 2 * chunk
    barriers = (3 if tile.ping_pong else 2) * tile.stages
    return slots + rest + 8 * barriers


def _one_of(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes)) if sizes else "another number: none fits this matrix"
