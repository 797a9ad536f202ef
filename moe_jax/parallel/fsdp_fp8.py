"""Experts' matrices that are gathered in FP8: the device that keeps a part rounds it, so that half the bytes travel.

A block of 128 x 128 has its own scale. So rounded parts, gathered, are the bits of gathered matrices that are rounded then, as
long as no part's edge cuts a block. Gradients travel as of other matrices.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float

from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedMatrices, quantise_matrices
from moe_jax.kernels.varying import vary_as
from moe_jax.parallel.layout import gathered_axes, part_shape


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GatheredInFp8:
    """The matrices of a layer's experts behind a gather in FP8, in place of an array."""

    rounded: QuantisedMatrices
    like: Float[Array, "experts n k"]
    """NaN in the shape and dtype of the matrices: no pass reads it. Its gradient is the matrices' gradient."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrices."""
        return self.like.shape

    @classmethod
    def of(cls, rounded: QuantisedMatrices, dtype: jnp.dtype) -> "GatheredInFp8":
        """Returns matrices whose gradients have this dtype."""
        return cls(rounded, like_matrices(rounded, dtype, jnp.nan))


def like_matrices(rounded: QuantisedMatrices, dtype: jnp.dtype, fill: float) -> Float[Array, "experts n k"]:
    """Returns an array of one number in the shape of the matrices."""
    return vary_as(jnp.full(rounded.values.shape, fill, dtype), rounded.values)


def round_part(part: Float[Array, "*stack n k"], dtype: jnp.dtype) -> QuantisedMatrices:
    """Rounds a part to the dtype of the computation and then to FP8, as if it had travelled in that dtype."""
    # A cast to bf16 and back is one that XLA may leave out.
    info = jnp.finfo(dtype)
    return quantise_matrices(lax.reduce_precision(lax.stop_gradient(part), info.nexp, info.nmant))


def can_travel_in_fp8(path: tuple, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> bool:
    """Returns True for experts' matrices that are gathered, of which each device keeps whole blocks of 128 x 128."""
    if "experts" not in path or not gathered_axes(path, shape, mesh):
        return False
    return not any(size % GROUP for size in part_shape(path, shape, mesh)[-2:])
