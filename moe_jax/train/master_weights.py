"""f32 master weights for bf16 parameters, at 2 extra bytes per weight: the parameter is the upper half of the master's bits.

    master bits = (parameter bits << 16) + low half, a signed 16-bit number

The model uses the parameter without a cast: the master rounded to the nearest bf16, halfway cases away from zero. No pass of a
step casts billions of weights, and no part of an update is lost. Everything is exact except NaN, which stays NaN.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32, Int16, PyTree


def initial_low_halves(params: PyTree, shardings: PyTree | None = None) -> PyTree | None:
    """Returns the low halves of f32 masters that equal their bf16 parameters; None for f32 parameters.

    `shardings` is their layout; default: the parameters'.

    Raises:
      ValueError: parameters of other dtypes, or of both dtypes.
    """
    dtypes = sorted({p.dtype.name for p in jax.tree.leaves(params)})
    if dtypes == ["float32"]:
        return None
    if dtypes != ["bfloat16"]:
        raise ValueError(f"parameters must be all float32 or all bfloat16 to be trained; there are {' and '.join(dtypes)}")
    if shardings is None:
        return jax.tree.map(lambda p: jnp.zeros_like(p, jnp.int16), params)
    return jax.tree.map(lambda p, sharding: jnp.zeros_like(p, jnp.int16, device=sharding), params, shardings)


def join(params: PyTree, low_halves: PyTree) -> PyTree:
    """Returns the f32 masters: master bits = (parameter bits << 16) + low half."""
    return jax.tree.map(_join, params, low_halves)


def split(masters: PyTree) -> tuple[PyTree, PyTree]:
    """Splits f32 masters into (bf16 parameters, low halves): the inverse of `join`."""
    return jax.tree.map(_upper_half, masters), jax.tree.map(_low_half, masters)


def _join(parameter: BFloat16[Array, "..."], low: Int16[Array, "..."]) -> Float32[Array, "..."]:
    upper = lax.bitcast_convert_type(parameter, jnp.int16).astype(jnp.int32) << 16
    return lax.bitcast_convert_type(upper + low.astype(jnp.int32), jnp.float32)


def _upper_half(master: Float32[Array, "..."]) -> BFloat16[Array, "..."]:
    bits = lax.bitcast_convert_type(master, jnp.int32)
    nearest = lax.bitcast_convert_type(((bits + 0x8000) >> 16).astype(jnp.int16), jnp.bfloat16)
    # Rounding up carries a NaN with the highest bits, 0x7FFF8000, into the sign: the number -0.
    return jnp.where(jnp.isnan(master), jnp.bfloat16(jnp.nan), nearest)


def _low_half(master: Float32[Array, "..."]) -> Int16[Array, "..."]:
    return lax.bitcast_convert_type(master, jnp.int32).astype(jnp.int16)
