"""Rows of tokens in registers: one warpgroup works on a token's row, whose columns are dealt out to its threads."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.hopper.launch import WARPGROUP_THREADS

WIDEST_VECTOR = 8
"""Elements that a thread loads at once, at most."""

BLOCKS_PER_CORE = 8
"""Thread blocks a core, of one warpgroup each: rows wait for memory, and other rows' blocks then have the core. With several
warpgroups a block, sums over a row would go through one scratch memory."""

TILES_AT_A_TIME = 330
"""Tiles of up to 128 x 64 on the 132 cores of a Hopper GPU. XLA would split the sums itself, and add them in a kernel more."""

SHORTEST_SUM = 256
"""Summands of a part, at least: further parts cost more additions than they save."""


def row_layout(columns: int) -> Any:
    """Returns the layout of a row's columns in registers. `columns` is a multiple of 128."""
    return plgpu.Layout.WG_STRIDED((columns,), vec_size=math.gcd(columns // WARPGROUP_THREADS, WIDEST_VECTOR))


def load_row(reference: Any) -> Array:
    """Loads a row; wide rows of 16 bits by 16 bytes a thread."""
    return plgpu.load(reference, layout=row_layout(reference.shape[0]), optimized=False)


def sum_of_splits(splits_ref: Any, token: Any, columns: Any) -> Float[Array, "columns"]:
    """Returns the sum of a matmul's partial sums [splits, tokens, columns], from the first split to the last."""
    total = load_row(splits_ref.at[0, token, columns])
    for split in range(1, splits_ref.shape[0]):
        total = total + load_row(splits_ref.at[split, token, columns])
    return total


def normalized(
    row: Float[Array, "columns"], weight: Float[Array, "columns"], eps: float, dtype: Any
) -> Float[Array, "columns"]:
    """Returns weight * row / sqrt(mean(row^2) + eps) of an f32 row, rounded where `layers.norm.RMSNorm` rounds."""
    scale = lax.rsqrt(jnp.sum(row * row) / row.shape[0] + eps)
    return weight * (row * scale).astype(dtype)


def matmul_in_splits(x: Float[Array, "tokens in"], *weights: Float[Array, "_ in"]) -> Float[Array, "splits tokens out"]:
    """Returns x W^T as partial sums over equal parts of the summands, in f32; W is the weights, one below the other.

    The kernel that reads the result adds the parts. A matmul of few tokens has too few tiles of columns for all cores.
    """
    w = weights[0] if len(weights) == 1 else jnp.concatenate(weights)
    splits = _splits(len(x), *w.shape)
    x, w = (a.reshape(len(a), splits, -1) for a in (x, w))
    return jnp.einsum("nsk,osk->sno", x, w, preferred_element_type=jnp.float32)


def _splits(tokens: int, columns: int, summands: int) -> int:
    """Returns the number of parts with which tiles are about as many as a GPU computes at a time."""
    tiles, splits = -(-tokens // 128) * -(-columns // 64), 1
    while 2 * splits * tiles <= TILES_AT_A_TIME and summands % (2 * splits * SHORTEST_SUM) == 0:
        splits *= 2
    return splits
