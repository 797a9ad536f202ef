"""Fused attention to a part of a sequence's keys: each query sees one interval of them, or none.

The Hopper kernels behind `kernels.attention.partial`. Results are f32, except a last part's, which may be rounded. The kernels
add the results of other parts themselves.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention.mosaic.backward_keys import KeyGradients, backward_keys
from moe_jax.kernels.attention.mosaic.backward_queries import backward_queries
from moe_jax.kernels.attention.mosaic.forward import forward
from moe_jax.kernels.attention.mosaic.masks import TokenInterval, queries_of_keys
from moe_jax.kernels.attention.online_softmax import BackwardInputs, PartialAttention

BLOCK = 128
"""A multiple of every kernel's blocks: sequences are padded to a multiple of it."""

F32 = jnp.dtype(jnp.float32)


def forward_of_interval(
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    first_key: Int[Array, "batch queries"],
    last_key: Int[Array, "batch queries"],
    *,
    scale: float,
    previous: PartialAttention | None = None,
    out_dtype: jnp.dtype = F32,
) -> PartialAttention:
    """Returns attention to the keys first_key[i] .. last_key[i] of each query; out 0 and lse -inf where there is none.

    With `previous`, the attention of the same queries over other keys, the result is over both parts. Neither bound may fall
    from one query to the next, and 0 <= first_key, last_key < keys. Not differentiable: `gradient_of_queries` and
    `gradients_of_keys` are the other half.
    """
    queries, keys = q.shape[1], k.shape[1]
    q, k, v = (pad_to_block(a) for a in (q, k, v))
    if previous is not None:
        previous = PartialAttention(pad_to_block(previous[0]), pad_to_block(previous[1], axis=2))
    in_sight = _pad_interval(first_key, last_key, keys)
    out, lse = forward(q, k, v, in_sight, previous, float(scale), out_dtype)
    return PartialAttention(out[:, :queries], lse[:, :, :queries])


def gradient_of_queries(
    arrays: BackwardInputs,
    first_key: Int[Array, "batch queries"],
    last_key: Int[Array, "batch queries"],
    *,
    scale: float,
    previous: Float[Array, "batch queries heads head_dim"] | None = None,
    out_dtype: jnp.dtype = F32,
) -> Float[Array, "batch queries heads head_dim"]:
    """Returns dq by way of the pairs (query, key) of `forward_of_interval`, plus `previous`.

    arrays.lse is over all keys of the sequence, and arrays.delta[i] = <dout[i], out[i]> is of the whole `out`. The gradients by
    way of the sequence's parts then add up to the gradient.
    """
    queries = arrays.q.shape[1]
    arrays, in_sight = _pad_backward(arrays, first_key, last_key)
    previous = None if previous is None else pad_to_block(previous)
    return backward_queries(arrays, in_sight, previous, float(scale), out_dtype)[:, :queries]


def gradients_of_keys(
    arrays: BackwardInputs,
    first_key: Int[Array, "batch queries"],
    last_key: Int[Array, "batch queries"],
    *,
    scale: float,
    previous: tuple[Array, Array] | None = None,
) -> tuple[Float[Array, "batch keys kv_heads head_dim"], Float[Array, "batch keys kv_heads value_dim"]]:
    """Returns dk and dv, both f32, by way of the pairs of `gradient_of_queries`, plus `previous`."""
    keys = arrays.k.shape[1]
    arrays, in_sight = _pad_backward(arrays, first_key, last_key)
    padded = None if previous is None else KeyGradients(*(pad_to_block(a) for a in previous))
    dk, dv = backward_keys(arrays, queries_of_keys(in_sight, arrays.k.shape[1]), padded, float(scale), F32)
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
