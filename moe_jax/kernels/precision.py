"""The precision of sums and scores, f32 or f64 for f64, and the order of sums."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array


def at_least_f32(dtype: jnp.dtype) -> jnp.dtype:
    """Returns f32 for narrower floats, else `dtype`."""
    return jnp.promote_types(dtype, jnp.float32)


def widened(a: Array) -> Array:
    """Casts `a` to float32, or keeps float64."""
    return a.astype(at_least_f32(a.dtype))


def sum_in_order(terms: Array, axis: int) -> Array:
    """Sums over a short axis from the first to the last term, so that the bits do not depend on the program.

    XLA has several orders for one reduction and chooses the fastest for the sizes and surrounding operations. The same numbers
    could have other sums in another program.
    """
    in_order = [jax.lax.index_in_dim(terms, i, axis, keepdims=False) for i in range(terms.shape[axis])]
    return functools.reduce(jnp.add, in_order) if in_order else jnp.sum(terms, axis)
