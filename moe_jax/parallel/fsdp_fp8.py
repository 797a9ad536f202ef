"""Experts' matrices that are gathered in FP8: the device that keeps a part rounds it, so that half the bytes travel.

A block of 128 x 128 has its own scale. So rounded parts, gathered, are the bits of gathered matrices that are rounded then, as
long as no part's edge cuts a block. Gradients travel as of other matrices.
"""

import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, UInt8

from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedMatrices, quantise_matrices
from moe_jax.parallel.layout import gathered_axes, part_shape


def round_part(part: Float[Array, "*stack n k"], dtype: jnp.dtype) -> QuantisedMatrices:
    """Rounds a part to the dtype of the computation and then to FP8, as if it had travelled in that dtype."""
    # A cast to bf16 and back is one that XLA may leave out.
    info = jnp.finfo(dtype)
    return quantise_matrices(lax.reduce_precision(lax.stop_gradient(part), info.nexp, info.nmant))


def to_bytes(rounded: QuantisedMatrices) -> tuple[UInt8[Array, "*stack n k"], Float[Array, "*stack n/128 k/128"]]:
    """Returns the values' bytes, and the scales. XLA may widen a transfer of FP8 to 16 bits, but none of bytes."""
    return lax.bitcast_convert_type(rounded.values, jnp.uint8), rounded.scales


def of_bytes(values: UInt8[Array, "*stack n k"], scales: Float[Array, "*stack n/128 k/128"]) -> QuantisedMatrices:
    """Undoes `to_bytes`."""
    return QuantisedMatrices(lax.bitcast_convert_type(values, jnp.float8_e4m3fn), scales)


def can_travel_in_fp8(path: tuple, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> bool:
    """Returns True for experts' matrices that are gathered, of which each device keeps whole blocks of 128 x 128."""
    if "experts" not in path or not gathered_axes(path, shape, mesh):
        return False
    return not any(size % GROUP for size in part_shape(path, shape, mesh)[-2:])
