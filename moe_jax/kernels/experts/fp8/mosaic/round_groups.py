"""The rounding of groups of 128 numbers of a row inside a kernel: `quantise.py`'s rule, in registers."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float8e4m3fn

from moe_jax.kernels.experts.fp8.quantise import GROUP, INVERSE_LARGEST, LEAST_MAXIMUM


def _layout():
    tiling = plgpu.Tiling(((8, GROUP), (2, GROUP), (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


GROUPS_LAYOUT = _layout()
"""The layout of groups in a warpgroup's registers, a multiple of 8: 16 lanes hold one, each 8 numbers that lie side by side."""


def rounded_group(
    group: Float[Array, "rows 128"],
) -> tuple[Float8e4m3fn[Array, "rows 128"], Float[Array, "rows"]]:
    """Returns values and scales of rows of one group each."""
    scales = scales_of(jnp.abs(group).max(axis=1))
    return (group * inverse_scales(scales, group.shape)).astype(jnp.float8_e4m3fn), scales


def scales_of(largest: Float[Array, "rows"]) -> Float[Array, "rows"]:
    """Returns the scales of groups whose largest numbers these are."""
    return jnp.maximum(largest, LEAST_MAXIMUM) * INVERSE_LARGEST


def inverse_scales(scales: Float[Array, "rows"], shape: tuple[int, ...]) -> Float[Array, "rows columns"]:
    """Returns 1 / scales for each number of an array of this shape."""
    return lax.broadcast_in_dim(1 / scales, shape, [0])
