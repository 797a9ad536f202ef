"""Rows times a matrix, x @ w.T, on Hopper: a row's bits depend on that row and the matrix alone.

Each result is one sum in f32 over k in order, in steps of 64, by one wgmma after the other (`split_matmul`). No sum is split. A
sum of wgmma depends on its operands alone (docs/performance.md), so tiles may be chosen by the number of rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.kernels.hopper import target
from moe_jax.kernels.hopper.interpreter import is_interpreted
from moe_jax.kernels.hopper.mainloop import TileShape
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS
from moe_jax.kernels.split_matmul import WIDTHS, refusal, split_matmul, stages_of


@partial(jax.jit, static_argnames="out_dtype")
def matmul(x: Float[Array, "rows k"], *weights: Float[Array, "_ k"], out_dtype: DTypeLike) -> Float[Array, "rows n"]:
    """Returns x @ w.T, summed in f32 and rounded once to `out_dtype`; w is the weights, one below the other.

    Raises:
        ValueError: operands that are not 16-bit floats of one dtype, k no multiple of 64 or a matrix's n no multiple of 16.
    """
    reason = refusal(x, weights)
    if reason:
        raise ValueError(reason)
    heights = tuple(len(w) for w in weights)
    if not len(x):
        return jnp.zeros((0, sum(heights)), out_dtype)
    return split_matmul("strict_matmul", x, weights, out_dtype, tile_of(len(x), heights), 1)[0]


def tile_of(rows: int, heights: tuple[int, ...]) -> TileShape:
    """Returns the widest tile of which every core has one, or else the narrowest, with the stages that fit.

    Args:
        heights: rows of each matrix. No tile reads two matrices.
    """
    height = WGMMA_ROWS if rows <= WGMMA_ROWS or is_interpreted() else 2 * WGMMA_ROWS
    row_tiles = -(-rows // height)
    fitting = [width for width in WIDTHS if not any(n % width for n in heights[:-1])]
    if is_interpreted():
        # One tile for any number of rows: a CPU may sum products of another shape in another order.
        return TileShape(height, min(fitting[0], 128), 2)
    columns = next((width for width in fitting if row_tiles * -(-sum(heights) // width) >= target.num_cores()), fitting[-1])
    return TileShape(height, columns, stages_of(height, columns))
