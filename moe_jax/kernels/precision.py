"""What sums and scores are formed in: f32, or f64 for f64."""

import jax.numpy as jnp
from jaxtyping import Array


def at_least_f32(dtype: jnp.dtype) -> jnp.dtype:
    """f32 for narrower floats, else `dtype`."""
    return jnp.promote_types(dtype, jnp.float32)


def widened(a: Array) -> Array:
    """The array in that."""
    return a.astype(at_least_f32(a.dtype))
