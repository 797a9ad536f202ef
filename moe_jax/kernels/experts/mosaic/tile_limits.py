"""Which tiles a pass can take: what its epilogue, the experts' matrices and a Hopper core's shared memory allow."""

import dataclasses
from typing import Literal, get_args

from jax.experimental.pallas import mosaic_gpu as plgpu

from moe_jax.kernels.experts.mosaic.by_rows import CHUNK
from moe_jax.kernels.hopper.mainloop import CONSUMERS, STEP, WGMMA_ROWS, Tile

Pass = Literal["gated_matmul", "grouped_matmul", "grouped_matmul_transposed", "gated_matmul_backward", "grouped_outer"]
"""The kernels by the names that profiles show, docs/kernels.md says what each computes."""

PASSES: tuple[Pass, ...] = get_args(Pass)

SHARED_MEMORY = 232448
"""Bytes that one block may use on compute capability 9.0: 227 KiB (CUDA C++ Programming Guide, table of technical
specifications)."""

ROWS, COLUMNS = (64, 128), (64, 128, 192, 256)
"""A plan keeps one block of 64 rows free behind the last expert's, so 128 rows at most; one wgmma takes 256 columns at most."""


def refusal(pass_name: Pass, matrix: tuple[int, int], tile: Tile) -> str | None:
    """Why a pass cannot take a tile and what would be right; None where it can.

    Args:
        matrix: of one expert, as stored: [2*inter, hidden] of w_gate_up or [hidden, inter] of w_down, whether the pass reads
            it or, as `grouped_outer`, writes its gradient.
    """
    heights = fitting_rows(pass_name, matrix)
    if tile.rows not in heights:
        return f"rows is {tile.rows}; it must be {_one_of(heights)}"
    by_turns = " by turns" if tile.by_turns else ""
    widths = fitting_columns(pass_name, matrix, tile.rows, tile.by_turns)
    if tile.columns not in widths:
        return f"columns is {tile.columns}; with {tile.rows} rows{by_turns} it must be {_one_of(widths)}"
    most = most_stages(pass_name, tile)
    if not 2 <= tile.stages <= most:
        return (
            f"stages is {tile.stages}; with tiles of {tile.rows} x {tile.columns}{by_turns} it must be 2 to {most}, "
            f"what {SHARED_MEMORY} bytes of shared memory hold"
        )
    return None


def candidates(pass_name: Pass, matrix: tuple[int, int]) -> list[Tile]:
    """The tiles worth measuring, at most 15: every shape that fits, with 3 stages and with as many as fit up to 8; by turns the
    two largest of 128 rows and 64 x 128 with as many as fit."""

    def filled(tile: Tile) -> Tile:
        return dataclasses.replace(tile, stages=min(most_stages(pass_name, tile), 8))

    tiles: list[Tile] = []
    for rows in fitting_rows(pass_name, matrix):
        for columns in fitting_columns(pass_name, matrix, rows):
            tiles += dict.fromkeys((Tile(rows, columns, 3), filled(Tile(rows, columns, 3))))
        by_turns = fitting_columns(pass_name, matrix, rows, by_turns=True)
        widths = by_turns[-2:] if rows == 128 else [columns for columns in by_turns if columns == 128]
        tiles += [filled(Tile(rows, columns, 3, by_turns=True)) for columns in widths]
    return tiles


def fitting_rows(pass_name: Pass, matrix: tuple[int, int]) -> list[int]:
    """Heights of tiles. Only in `grouped_outer` is a tile's height one of the matrix; elsewhere it is one of tokens."""
    return [rows for rows in ROWS if pass_name != "grouped_outer" or matrix[0] % rows == 0]


def fitting_columns(pass_name: Pass, matrix: tuple[int, int], rows: int, by_turns: bool = False) -> list[int]:
    """Widths that divide the pass's columns and leave each warpgroup whole chunks, `gated_matmul` of gate and of up each, and
    sums that its registers hold. Plain products by turns take any width up to their columns': 192 is the widest that fits."""
    total = matrix[0] if pass_name in ("gated_matmul", "grouped_matmul") else matrix[1]
    unit = 2 * CHUNK if pass_name == "gated_matmul" else CHUNK
    # A thread has 232 registers and holds a sum in 1 of them for every 128; the backward pass needs more for its epilogue.
    most_sums = 128 * (128 if pass_name == "gated_matmul_backward" else 192)

    takes_any = by_turns and not pass_name.startswith("gated")

    def fits(tile: Tile) -> bool:
        covers = total % tile.columns == 0 or (takes_any and tile.columns < total)
        return covers and tile.own_columns % unit == 0 and tile.own_rows * tile.own_columns <= most_sums

    return [columns for columns in COLUMNS if fits(Tile(rows, columns, 0, by_turns))]


def most_stages(pass_name: Pass, tile: Tile) -> int:
    """How many stages of a tile fit into shared memory."""
    none, one = (shared_memory(pass_name, dataclasses.replace(tile, stages=stages)) for stages in (0, 1))
    return (SHARED_MEMORY - none) // (one - none)


def shared_memory(pass_name: Pass, tile: Tile) -> int:
    """Bytes of shared memory that a pass allocates: its ring, chunks on their way to and from memory, barriers.

    Without the 1024 of `row_copies.landing_barriers`: a slot of gate_up's ring takes a multiple of 8192, which leaves 3072.
    """
    ring = tile.stages * (tile.rows + tile.columns) * STEP * 2
    chunk = WGMMA_ROWS * CHUNK * 2
    if pass_name == "gated_matmul_backward":
        # Of each warpgroup one chunk on its way out, two of gate and of up on their way in; and Pallas' scratch for a sum.
        rest = CONSUMERS * 5 * chunk + 8 * CONSUMERS * 2 + plgpu.CompilerParams().reduction_scratch_bytes
    else:
        rest = CONSUMERS * 2 * chunk
    barriers = (3 if tile.by_turns else 2) * tile.stages
    return ring + rest + 8 * barriers


def _one_of(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes)) if sizes else "another number: none fits this matrix"
