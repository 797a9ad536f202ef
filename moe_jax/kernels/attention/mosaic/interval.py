"""Fused attention to a part of a sequence's keys: each query sees one interval of them, or none.

The three functions that attention over keys which come in parts is made of (`kernels.attention.partial`). Results are f32, but
for those of a last part, and sums over parts are formed inside the kernels.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention.mosaic.backward_keys import backward_keys, keys_ring
from moe_jax.kernels.attention.mosaic.backward_queries import backward_queries, queries_ring
from moe_jax.kernels.attention.mosaic.forward import forward, forward_ring
from moe_jax.kernels.attention.mosaic.masks import queries_of_keys

BLOCK = 128
"""Every kernel's blocks divide it: sequences are filled up to a multiple."""

F32 = jnp.dtype(jnp.float32)


def forward_of_interval(
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    first_key: Int[Array, "batch queries"],
    last_key: Int[Array, "batch queries"],
    *,
    scale: float,
    previous: tuple[Array, Array] | None = None,
    out_dtype: jnp.dtype = F32,
) -> tuple[Float[Array, "batch queries heads value_dim"], Float[Array, "batch heads queries"]]:
    """out and lse (f32) of queries that see the keys first_key[i] .. last_key[i]; 0 and -inf where these are none.

    For keys that are a part of the sequence. With `previous`, the (out, lse) of the same queries over other keys, the result
    is over both parts. Neither bound may fall from one query to the next, and 0 <= first_key, last_key < keys. Not
    differentiable: `gradient_of_queries` and `gradients_of_keys` are the other half.
    """
    queries, keys = q.shape[1], k.shape[1]
    q, k, v = (fill_up(a) for a in (q, k, v))
    if previous is not None:
        previous = fill_up(previous[0]), fill_up(previous[1], axis=2)
    ring = forward_ring(q.shape[3], v.shape[3])
    bounds = _fill_up_bounds(first_key, last_key, keys)
    out, lse = forward(q, k, v, *bounds, previous, float(scale), ring, out_dtype)
    return out[:, :queries], lse[:, :, :queries]


def gradient_of_queries(
    dout: Float[Array, "batch queries heads value_dim"],
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    lse: Float[Array, "batch heads queries"],
    delta: Float[Array, "batch heads queries"],
    first_key: Int[Array, "batch queries"],
    last_key: Int[Array, "batch queries"],
    *,
    scale: float,
    previous: Float[Array, "batch queries heads head_dim"] | None = None,
    out_dtype: jnp.dtype = F32,
) -> Float[Array, "batch queries heads head_dim"]:
    """dq by way of the pairs (query, key) of `forward_of_interval`, `previous` added.

    `lse` is over all keys of the sequence and delta[i] = <dout[i], out[i]> with the whole `out`: so the gradients by way of
    the parts of the sequence add up to the whole's.
    """
    queries = q.shape[1]
    q, k, v, dout, lse, delta, first_key, last_key = _fill_up_backward(dout, q, k, v, lse, delta, first_key, last_key)
    previous = None if previous is None else fill_up(previous)
    ring = queries_ring(q.shape[3], v.shape[3])
    dq = backward_queries(q, k, v, dout, lse, delta, first_key, last_key, previous, float(scale), ring, out_dtype)
    return dq[:, :queries]


def gradients_of_keys(
    dout: Float[Array, "batch queries heads value_dim"],
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    lse: Float[Array, "batch heads queries"],
    delta: Float[Array, "batch heads queries"],
    first_key: Int[Array, "batch queries"],
    last_key: Int[Array, "batch queries"],
    *,
    scale: float,
    previous: tuple[Array, Array] | None = None,
) -> tuple[Float[Array, "batch keys kv_heads head_dim"], Float[Array, "batch keys kv_heads value_dim"]]:
    """(dk, dv), both f32, as `gradient_of_queries`; `previous`, those by way of other queries, added."""
    keys = k.shape[1]
    q, k, v, dout, lse, delta, first_key, last_key = _fill_up_backward(dout, q, k, v, lse, delta, first_key, last_key)
    previous = None if previous is None else (fill_up(previous[0]), fill_up(previous[1]))
    first_query, last_query = queries_of_keys(first_key, last_key, k.shape[1])
    ring = keys_ring(q.shape[3], v.shape[3])
    dk, dv = backward_keys(q, k, v, dout, lse, delta, first_query, last_query, previous, float(scale), ring, F32)
    return dk[:, :keys], dv[:, :keys]


def _fill_up_backward(dout, q, k, v, lse, delta, first_key, last_key) -> tuple:
    """(q, k, v, dout, lse in base 2, delta, first_key, last_key); as queries, the tokens that fill up see nothing."""
    tokens = (fill_up(a) for a in (q, k, v, dout.astype(q.dtype)))
    rows = (fill_up(a, axis=2) for a in (lse * math.log2(math.e), delta))
    return *tokens, *rows, *_fill_up_bounds(first_key, last_key, k.shape[1])


def _fill_up_bounds(first_key: Array, last_key: Array, keys: int) -> tuple[Array, Array]:
    """The queries that fill up see nothing: their first key is behind all, and neither bound falls."""
    padding = (0, 0), (0, -first_key.shape[1] % BLOCK)
    first_key = jnp.pad(jnp.minimum(first_key, keys), padding, constant_values=keys)
    return first_key.astype(jnp.int32), jnp.pad(last_key, padding, mode="edge").astype(jnp.int32)


def fill_up(a: Array, value: int = 0, axis: int = 1) -> Array:
    """The array with `value` behind it up to a multiple of BLOCK."""
    padding = [(0, 0)] * a.ndim
    padding[axis] = 0, -a.shape[axis] % BLOCK
    return jnp.pad(a, padding, constant_values=value)
