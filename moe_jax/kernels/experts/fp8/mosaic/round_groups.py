"""The rounding of a group of 128 numbers of a row inside a kernel: `quantise.py`'s rule, in registers."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float8e4m3fn

from moe_jax.kernels.experts.fp8.quantise import INVERSE_LARGEST, LEAST_MAXIMUM


def rounded_group(
    group: Float[Array, "rows 128"],
) -> tuple[Float8e4m3fn[Array, "rows 128"], Float[Array, "rows"]]:
    """Returns values and scales of rows of one group each, f32 in wgmma's layout."""
    largest = jnp.abs(group).max(axis=1)
    scales = jnp.maximum(largest, LEAST_MAXIMUM) * INVERSE_LARGEST
    inverse = lax.broadcast_in_dim(1 / scales, group.shape, [0])
    return (group * inverse).astype(jnp.float8_e4m3fn), scales
