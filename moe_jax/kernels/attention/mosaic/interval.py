"""Fused attention to a part of a sequence's keys: each query sees one interval of them, or none.

The Hopper kernels behind `kernels.attention.partial`. Results are f32, except a last part's, which may be rounded. The kernels
add the results of other parts themselves.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Int

from moe_jax.kernels.attention.mosaic.backward_keys import KeyGradients, backward_keys
from moe_jax.kernels.attention.mosaic.backward_queries import backward_queries
from moe_jax.kernels.attention.mosaic.forward import forward
from moe_jax.kernels.attention.mosaic.masks import TokenInterval, queries_of_keys
from moe_jax.kernels.attention.online_softmax import BackwardInputs, PartialAttention

BLOCK = 128
"""A multiple of every kernel's blocks: sequences are padded to a multiple of it."""

Bounds = tuple[Int[Array, "batch queries"], Int[Array, "batch queries"]]
"""(first_key, last_key) of each query."""


def forward_of_interval(
    q: Array, k: Array, v: Array, bounds: Bounds, scale: float, previous: PartialAttention | None, out_dtype: jnp.dtype
) -> PartialAttention:
    """Computes `partial.forward`; 0 <= first_key, last_key < keys.

    Not differentiable: `gradient_of_queries` and `gradients_of_keys` are the other half.
    """
    queries, keys = q.shape[1], k.shape[1]
    q, k, v = (pad_to_block(a) for a in (q, k, v))
    if previous is not None:
        previous = PartialAttention(pad_to_block(previous[0]), pad_to_block(previous[1], axis=2))
    out, lse = forward(q, k, v, _pad_interval(*bounds, keys), previous, float(scale), out_dtype)
    return PartialAttention(out[:, :queries], lse[:, :, :queries])


def gradient_of_queries(
    arrays: BackwardInputs, bounds: Bounds, scale: float, previous: Array | None, out_dtype: jnp.dtype
) -> Array:
    """Computes `partial.gradient_of_queries`.

    arrays.lse is over all keys of the sequence, and arrays.delta[i] = <dout[i], out[i]> is of the whole `out`. The gradients by
    way of the sequence's parts then add up to the gradient.
    """
    queries = arrays.q.shape[1]
    arrays, in_sight = _pad_backward(arrays, *bounds)
    previous = None if previous is None else pad_to_block(previous)
    return backward_queries(arrays, in_sight, previous, float(scale), out_dtype)[:, :queries]


def gradients_of_keys(
    arrays: BackwardInputs, bounds: Bounds, scale: float, previous: tuple[Array, Array] | None
) -> tuple[Array, Array]:
    """Computes `partial.gradients_of_keys`, in f32."""
    keys = arrays.k.shape[1]
    arrays, in_sight = _pad_backward(arrays, *bounds)
    padded = None if previous is None else KeyGradients(*(pad_to_block(a) for a in previous))
    f32 = jnp.dtype(jnp.float32)
    dk, dv = backward_keys(arrays, queries_of_keys(in_sight, arrays.k.shape[1]), padded, float(scale), f32)
    return dk[:, :keys], dv[:, :keys]


def _pad_backward(arrays: BackwardInputs, first_key: Array, last_key: Array) -> tuple[BackwardInputs, TokenInterval]:
    """Pads all arrays, with lse in base 2 and dout in q's dtype; as queries, padding sees nothing."""
    q, k, v, dout, lse, delta = arrays
    keys = k.shape[1]
    lse_log2 = lse * math.log2(math.e)
    q, k, v, dout = (pad_to_block(a) for a in (q, k, v, dout.astype(q.dtype)))
    lse, delta = (pad_to_block(a, axis=2) for a in (lse_log2, delta))
    return BackwardInputs(q, k, v, dout, lse, delta), _pad_interval(first_key, last_key, keys)


def _pad_interval(first_key: Array, last_key: Array, keys: int) -> TokenInterval:
    """Pads with queries that see nothing: their first key is after all keys, and neither bound falls."""
    padding = (0, 0), (0, -first_key.shape[1] % BLOCK)
    first_key = jnp.pad(jnp.minimum(first_key, keys), padding, constant_values=keys)
    return TokenInterval(first_key.astype(jnp.int32), jnp.pad(last_key, padding, mode="edge").astype(jnp.int32))


def pad_to_block(a: Array, value: int = 0, axis: int = 1) -> Array:
    """Pads an axis at its end with `value`, up to a multiple of BLOCK."""
    padding = [(0, 0)] * a.ndim
    padding[axis] = 0, -a.shape[axis] % BLOCK
    return jnp.pad(a, padding, constant_values=value)
