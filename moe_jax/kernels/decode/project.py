"""Projections of a step's tokens, x W^T, as partial sums that the kernel behind adds: by a kernel on Hopper, else by XLA."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.kernels.decode.rows import matmul_in_splits
from moe_jax.kernels.hopper import target
from moe_jax.kernels.hopper.mainloop import TileShape
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS
from moe_jax.kernels.split_matmul import refusal, split_matmul, stages_of

WIDTHS = 128, 64
"""Columns of a tile."""

SUMMANDS_PER_ROW = 8
"""Summands of a part for each row of its tile, at least. Partial sums have then at most a quarter of the weights' bytes."""

FEWEST_CORES = 1 / 3
"""Share of the cores that have a tile, at least. Fewer cores cannot read the weights at the memory's full rate."""


class Parts(NamedTuple):
    """The tiles of a projection, and the number of parts that a tile's sums are split into."""

    tile: TileShape
    splits: int


@jax.jit
def project(x: Float[Array, "tokens in"], *weights: Float[Array, "_ in"]) -> Float[Array, "splits tokens out"]:
    """Returns x W^T as partial sums over parts of the summands, in f32; W is the weights, one below the other.

    Operands and sizes that the kernel does not take are left to `matmul_in_splits`.
    """
    heights = [len(w) for w in weights]
    is_taken = target.compute_capability() == "9.0" and refusal(x, weights) is None
    is_taken = is_taken and not any(height % max(WIDTHS) for height in heights[:-1])
    parts = parts_of(len(x), sum(heights), x.shape[1]) if is_taken else None
    if parts is None:
        return matmul_in_splits(x, *weights)
    return split_matmul("project_tokens", x, weights, jnp.float32, parts.tile, parts.splits)


def parts_of(tokens: int, columns: int, summands: int) -> Parts | None:
    """Returns the tiles and parts with which the most cores have one part of one tile; of equals, the fewest parts.

    None leaves the projection to XLA. For one token it is as fast or faster: a reduction reads the weights once
    (docs/performance.md). More tiles than cores, or far fewer, were not timed.
    """
    rows = WGMMA_ROWS if tokens <= WGMMA_ROWS else 2 * WGMMA_ROWS
    most_splits = max(summands // (SUMMANDS_PER_ROW * rows), 1)

    def usage(width: int) -> tuple[int, int, int]:
        tiles = -(-tokens // rows) * -(-columns // width)
        splits = min(target.num_cores() // tiles, most_splits)
        return splits * tiles, -splits, width

    # Where rows have several tiles, narrow ones would read all of x and w too often.
    used, negative_splits, width = max(map(usage, WIDTHS if tokens <= rows else WIDTHS[:1]))
    if tokens == 1 or used < FEWEST_CORES * target.num_cores():
        return None
    return Parts(TileShape(rows, width, stages_of(rows, width)), -negative_splits)
