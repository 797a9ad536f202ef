"""Projections of a step's tokens, x W^T, as partial sums that the next kernel adds: by a kernel on Hopper, else by XLA."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.kernels import backends
from moe_jax.kernels.hopper.mainloop import TileShape
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS
from moe_jax.kernels.split_matmul import refusal, split_matmul, stages_of

WIDTHS = 128, 64
"""Columns of a tile."""

SUMMANDS_PER_ROW = 8
"""Minimum summands of a part for each row of its tile. Partial sums then have at most a quarter of the weights' bytes."""

FEWEST_CORES = 1 / 3
"""Minimum share of cores with a tile. Fewer cores cannot read the weights at the memory's full rate."""

FEWEST_CORES_OF_ONE_MATRIX = 2 / 3
"""The same for one matrix and several tiles of rows. XLA is slower for several matrices, which it first copies into one."""

MOST_TOKENS = 256
"""Maximum tokens of a projection with more tiles than cores: more were not timed."""

TILES_AT_A_TIME = 330
"""Tiles up to 128 x 64 on the 132 cores of a Hopper GPU. XLA would split the sums itself, and add them in another kernel."""

SHORTEST_SUM = 256
"""Minimum summands of a part: more parts cost more additions than they save."""


class Parts(NamedTuple):
    """The tile of a projection, and the number of splits of its contracted axis (split-K)."""

    tile: TileShape
    splits: int


@jax.jit
def project(x: Float[Array, "tokens in"], *weights: Float[Array, "_ in"]) -> Float[Array, "splits tokens out"]:
    """Computes x W^T as f32 partial sums over splits of the contracted axis (split-K); W stacks the weights' rows.

    Operands and sizes that the kernel does not support go to `matmul_in_splits`.
    """
    heights = tuple(len(w) for w in weights)
    is_taken = backends.compute_capability() == "9.0" and refusal(x, weights) is None
    is_taken = is_taken and not any(height % max(WIDTHS) for height in heights[:-1])
    parts = parts_of(len(x), heights, x.shape[1]) if is_taken else None
    if parts is None:
        return matmul_in_splits(x, *weights)
    return split_matmul("project_tokens", x, weights, parts.tile, parts.splits)


def parts_of(tokens: int, heights: tuple[int, ...], summands: int) -> Parts | None:
    """Returns the tile and number of splits that keep the most cores busy; among equals, the fewest splits.

    Several matrices may have more tiles than cores, if rows have two tiles. None leaves the projection to XLA, if that is
    faster (docs/log/engine.md) or the sizes were not timed. For one token a reduction reads the weights once.

    Args:
        heights: rows of each matrix, which are columns of the result.
    """
    if tokens == 1:
        return None
    rows = WGMMA_ROWS if tokens <= WGMMA_ROWS else 2 * WGMMA_ROWS
    most_splits = max(summands // (SUMMANDS_PER_ROW * rows), 1)
    # If rows have several tiles, narrow ones would read all of x and w too often.
    widths = WIDTHS if tokens <= rows else WIDTHS[:1]
    cores, columns = backends.num_cores(), sum(heights)
    has_one_matrix, has_row_tiles = len(heights) == 1, tokens > rows
    # No part at all leaves more tiles than cores to XLA.
    fewest_splits = 1 if not has_one_matrix and has_row_tiles and tokens <= MOST_TOKENS else 0
    tiles = {width: -(-tokens // rows) * -(-columns // width) for width in widths}
    splits = {width: max(min(cores // tiles[width], most_splits), fewest_splits) for width in widths}
    width = max(widths, key=lambda width: (splits[width] * tiles[width], -splits[width], width))
    fewest_cores = FEWEST_CORES_OF_ONE_MATRIX if has_one_matrix and has_row_tiles else FEWEST_CORES
    if splits[width] * tiles[width] < fewest_cores * cores:
        return None
    return Parts(TileShape(rows, width, stages_of(rows, width)), splits[width])


def matmul_in_splits(x: Float[Array, "tokens in"], *weights: Float[Array, "_ in"]) -> Float[Array, "splits tokens out"]:
    """Computes `project` in XLA, with equal splits.

    The kernel that reads the result adds the parts. A matmul of few tokens has too few tiles of columns for all cores.
    """
    w = weights[0] if len(weights) == 1 else jnp.concatenate(weights)
    splits = _splits(len(x), *w.shape)
    x, w = (a.reshape(len(a), splits, -1) for a in (x, w))
    return jnp.einsum("nsk,osk->sno", x, w, preferred_element_type=jnp.float32)


def _splits(tokens: int, columns: int, summands: int) -> int:
    """Returns the number of parts with which the number of tiles is about the number that a GPU computes at a time."""
    tiles, splits = -(-tokens // 128) * -(-columns // 64), 1
    while 2 * splits * tiles <= TILES_AT_A_TIME and summands % (2 * splits * SHORTEST_SUM) == 0:
        splits *= 2
    return splits
