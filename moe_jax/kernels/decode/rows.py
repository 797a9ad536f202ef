"""Rows of tokens in registers: one warpgroup processes a token's row, whose columns are distributed over its threads."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.hopper.launch import WARPGROUP_THREADS

WIDEST_VECTOR = 8
"""Maximum elements that a thread loads at once."""

BLOCKS_PER_CORE = 8
"""Thread blocks per core, of one warpgroup each: while a row waits for memory, other blocks use the core. With several
warpgroups per block, sums over rows would share one scratch memory."""


def row_layout(columns: int) -> Any:
    """Returns the register layout of one row over a warpgroup; `columns` is a multiple of 128."""
    return plgpu.Layout.WG_STRIDED((columns,), vec_size=math.gcd(columns // WARPGROUP_THREADS, WIDEST_VECTOR))


def load_row(reference: Any) -> Array:
    """Loads a row from global memory into registers; wide 16-bit rows in 16 bytes per thread."""
    return plgpu.load(reference, layout=row_layout(reference.shape[0]), optimized=False)


def sum_of_splits(splits_ref: Any, token: Any, columns: Any) -> Float[Array, "columns"]:
    """Adds a matmul's partial sums [splits, tokens, columns] of one token, from the first split to the last.

    With `TileProgram.parts` the matmul adds them in the same order: strict bits depend on it.
    """
    total = load_row(splits_ref.at[0, token, columns])
    for split in range(1, splits_ref.shape[0]):
        total = total + load_row(splits_ref.at[split, token, columns])
    return total


def normalized(
    row: Float[Array, "columns"], weight: Float[Array, "columns"], eps: float, dtype: Any
) -> Float[Array, "columns"]:
    """Returns weight * row / sqrt(mean(row^2) + eps) of an f32 row, rounded like `layers.linear.RMSNorm`."""
    scale = lax.rsqrt(jnp.sum(row * row) / row.shape[0] + eps)
    return weight * (row * scale).astype(dtype)
