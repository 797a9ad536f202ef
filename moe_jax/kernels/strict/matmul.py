"""Rows times a matrix, x @ w.T, on Hopper: a row's bits depend only on that row and the matrix.

A result is the sum in f32 of parts, from the first to the last. Their number depends only on the matrix's shape. Each part is
one sum over its share of k in order, in steps of 64, by consecutive wgmmas (`split_matmul`). A sum of wgmma depends only on its
operands (docs/log/kernels.md), so tiles may be chosen by the number of rows.

Few rows have few tiles. Their parts are computed on separate cores, and the kernel that reads the result adds them
(`decode.rows.sum_of_splits`). Partial sums of many rows would fill memory: they are added in registers. The bits are the same.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.kernels import backends
from moe_jax.kernels.hopper.interpreter import is_interpreted
from moe_jax.kernels.hopper.mainloop import TileShape
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS
from moe_jax.kernels.split_matmul import WIDTHS, refusal, split_matmul, stages_of

PART_CORES, PART_WIDTHS = 132, (128, 64)
"""Cores that the parts of 64 rows should occupy, and columns of their tiles, the same on every GPU."""

SHORTEST_PART = 256
"""Summands of a part, at least: further parts cost more additions than they save."""

WIDEST_OF_PARTS = 128
"""Maximum columns of a tile whose parts are added in registers, which hold its sums twice."""


@jax.jit
def matmul(x: Float[Array, "rows k"], *weights: Float[Array, "_ k"]) -> Float[Array, "rows n"]:
    """Computes x @ w.T in f32, where a row's bits do not depend on other rows; w stacks the weights' rows.

    Raises:
        ValueError: operands that are not 16-bit floats of one dtype, k not a multiple of 64 or a matrix's n not a multiple of
            16.
    """
    return _sums(x, weights, in_parts=False)[0]


@jax.jit
def matmul_in_parts(x: Float[Array, "rows k"], *weights: Float[Array, "_ k"]) -> Float[Array, "parts rows n"]:
    """Computes `matmul` as [parts, rows, n] partial sums, which the caller adds in order; many rows yield one sum.

    Partial sums need at most 8.3 MiB: PART_CORES tiles of 128 x 128.
    """
    return _sums(x, weights, in_parts=True)


def _sums(
    x: Float[Array, "rows k"], weights: tuple[Float[Array, "_ k"], ...], *, in_parts: bool
) -> Float[Array, "parts rows n"]:
    reason = refusal(x, weights)
    if reason:
        raise ValueError(reason)
    heights = tuple(len(w) for w in weights)
    if not len(x):
        return jnp.zeros((1, 0, sum(heights)), jnp.float32)
    parts = parts_of(sum(heights), x.shape[1])
    apart = in_parts and is_apart(len(x), heights, parts)
    tile = tile_of(len(x), heights, parts, apart=apart)
    return split_matmul("strict_matmul", x, weights, tile, parts, adds_splits=not apart)


def parts_of(n: int, k: int) -> int:
    """Returns the number of splits of k (split-K), from the matrix's shape alone.

    It is the smallest number with which 64 rows occupy the most of PART_CORES. Another number would change the bits.
    """

    def usage(width: int) -> tuple[int, int]:
        tiles = -(-n // width)
        parts = max(min(PART_CORES // tiles, k // SHORTEST_PART), 1)
        return min(tiles * parts, PART_CORES), -parts

    return -max(map(usage, PART_WIDTHS))[1]


def is_apart(rows: int, heights: tuple[int, ...], parts: int) -> bool:
    """Returns True if partial sums are written separately: for at most PART_CORES parts over all tiles."""
    if is_interpreted():
        return rows <= WGMMA_ROWS
    return _count(rows, heights, parts, tile_of(rows, heights, parts, apart=True)) <= PART_CORES


def tile_of(rows: int, heights: tuple[int, ...], parts: int, *, apart: bool) -> TileShape:
    """Returns the tile and stages with which the busiest core loads the fewest operand rows.

    Args:
        heights: rows of each matrix. No tile reads two matrices.
    """
    height = WGMMA_ROWS if rows <= WGMMA_ROWS or is_interpreted() else 2 * WGMMA_ROWS
    fitting = [width for width in WIDTHS if not any(n % width for n in heights[:-1])]
    if parts > 1 or is_interpreted():
        fitting = [width for width in fitting if width <= WIDEST_OF_PARTS]
    if is_interpreted():
        # One tile for any number of rows: a CPU may sum products of another shape in another order.
        return TileShape(height, fitting[0], 2)

    def loaded(tile: TileShape) -> int:
        return -(-_count(rows, heights, parts if apart else 1, tile) // backends.num_cores()) * (tile.rows + tile.columns)

    return min((TileShape(height, width, stages_of(height, width)) for width in fitting), key=loaded)


def _count(rows: int, heights: tuple[int, ...], parts: int, tile: TileShape) -> int:
    return -(-rows // tile.rows) * -(-sum(heights) // tile.columns) * parts
