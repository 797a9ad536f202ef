"""Attention of queries over a part of the keys, and the gradients by way of that part: what ring attention is made of.

Query i sees the keys first_key[i] .. last_key[i] of the part, or none. Neither bound falls from one query to the next. With
lse and out over the whole sequence and delta[i] = <dout[i], out[i]>, a part's gradients are

    p = exp(scale * q k^T - lse)    ds = p * (dout v^T - delta)    dq = scale * ds k    dk = scale * ds^T q    dv = p^T dout

and the parts' add up to the whole's. What is returned is f32, so that adding parts rounds nothing away; for a last part it may
be rounded. On Hopper each of the three functions is one kernel of `flash_attention` (backend "mosaic"), which skips what nobody
sees and adds inside the kernel; backend "xla" goes over chunks of queries and keys, and a pair of chunks that nobody sees costs
a branch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.attention.mosaic import flash
from moe_jax.kernels.attention.online_softmax import merge, softmax_sum
from moe_jax.kernels.precision import at_least_f32
from moe_jax.kernels.varying import vary_as

CHUNK = 1024
"""Queries, and keys, of a chunk in XLA: 32 heads of f32 scores are 128 MiB."""

Bounds = tuple[Int[Array, "batch queries"], Int[Array, "batch queries"]]
"""(first_key, last_key)."""


def forward(
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    bounds: Bounds,
    *,
    scale: float,
    backend: str,
    previous: tuple[Array, Array] | None = None,
    out_dtype: jnp.dtype | None = None,
) -> tuple[Float[Array, "batch queries heads value_dim"], Float[Array, "batch heads queries"]]:
    """(out, lse) over this part and, if given, the `previous` (out, lse) over other keys; 0 and -inf where no key is seen.

    out is f32 unless `out_dtype` says otherwise.
    """
    wide = at_least_f32(q.dtype)
    out_dtype = jnp.dtype(out_dtype or wide)
    if backend == "mosaic":
        return flash.forward_of_interval(q, k, v, *bounds, scale=scale, previous=previous, out_dtype=out_dtype)
    if previous is None:
        previous = jnp.zeros((*q.shape[:3], v.shape[3]), wide), jnp.full((q.shape[0], *q.shape[2:0:-1]), -jnp.inf, wide)

    def add_keys(queries, keys, sums):
        (q, *bounds), (k, v, number), (out, lse) = queries, keys, sums
        weights, part_lse = softmax_sum(_scores(q, k, bounds, number, scale))
        part = jnp.einsum("bhgqk,bkhe->bqhge", weights.astype(v.dtype), v, preferred_element_type=wide)
        out, lse = merge(out, lse.swapaxes(1, 2), part.reshape(out.shape), part_lse.reshape(lse.swapaxes(1, 2).shape))
        return out, lse.swapaxes(1, 2)

    start = previous[0], previous[1].swapaxes(1, 2)
    out, lse = _sums(add_keys, (q, *_half_open(bounds)), _keys(k, v), start, _pairs(bounds, k.shape[1]))
    return out.astype(out_dtype), lse.swapaxes(1, 2)


def gradient_of_queries(
    dout: Float[Array, "batch queries heads value_dim"],
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    lse: Float[Array, "batch heads queries"],
    delta: Float[Array, "batch heads queries"],
    bounds: Bounds,
    *,
    scale: float,
    backend: str,
    previous: Float[Array, "batch queries heads head_dim"] | None = None,
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "batch queries heads head_dim"]:
    """dq by way of this part, with `previous`, that by way of other parts, added; f32 unless `out_dtype` says otherwise."""
    wide = at_least_f32(q.dtype)
    out_dtype = jnp.dtype(out_dtype or wide)
    if backend == "mosaic":
        operands = dout, q, k, v, lse, delta, *bounds
        return flash.gradient_of_queries(*operands, scale=scale, previous=previous, out_dtype=out_dtype)

    def add_keys(queries, keys, dq):
        _, ds = _probabilities(queries, keys, scale)
        part = jnp.einsum("bhgqk,bkhd->bqhgd", ds.astype(q.dtype), keys[0], preferred_element_type=wide)
        return dq + scale * part.reshape(dq.shape)

    start = jnp.zeros(q.shape, wide) if previous is None else previous
    dq = _sums(add_keys, _queries(q, bounds, dout, lse, delta), _keys(k, v), start, _pairs(bounds, k.shape[1]))
    return dq.astype(out_dtype)


def gradients_of_keys(
    dout: Float[Array, "batch queries heads value_dim"],
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    lse: Float[Array, "batch heads queries"],
    delta: Float[Array, "batch heads queries"],
    bounds: Bounds,
    *,
    scale: float,
    backend: str,
    previous: tuple[Array, Array] | None = None,
) -> tuple[Float[Array, "batch keys kv_heads head_dim"], Float[Array, "batch keys kv_heads value_dim"]]:
    """(dk, dv) of this part by way of these queries, with `previous`, those by way of other queries, added."""
    if backend == "mosaic":
        return flash.gradients_of_keys(dout, q, k, v, lse, delta, *bounds, scale=scale, previous=previous)
    wide = at_least_f32(q.dtype)

    def add_queries(keys, queries, sums):
        (q, _, _, dout, _, _), (dk, dv) = queries, sums
        p, ds = _probabilities(queries, keys, scale)
        q, dout = (_by_key_head(a, dk.shape[2]) for a in (q, dout))
        dv += jnp.einsum("bhgqk,bqhge->bkhe", p.astype(q.dtype), dout, preferred_element_type=wide)
        dk += scale * jnp.einsum("bhgqk,bqhgd->bkhd", ds.astype(q.dtype), q, preferred_element_type=wide)
        return dk, dv

    start = (jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)) if previous is None else previous
    return _sums(add_queries, _keys(k, v), _queries(q, bounds, dout, lse, delta), start, _pairs(bounds, k.shape[1]).T)


def _half_open(bounds: Bounds) -> Bounds:
    """(keys before the first seen, keys up to the last seen): filled up with zeros it is empty."""
    return bounds[0], bounds[1] + 1


def _queries(q, bounds: Bounds, dout, lse, delta) -> tuple[Array, ...]:
    """What comes by queries, all [batch, queries, ...]."""
    return q, *_half_open(bounds), dout.astype(q.dtype), lse.swapaxes(1, 2), delta.swapaxes(1, 2)


def _keys(k, v) -> tuple[Array, Array, Array]:
    """What comes by keys; they are numbered from 1, and what fills up has number 0, which nobody sees."""
    return k, v, jnp.arange(1, k.shape[1] + 1, dtype=jnp.int32)[None]


def _pairs(bounds: Bounds, num_keys: int) -> Bool[Array, "query_chunks key_chunks"]:
    """Whether a query of the one chunk sees a key of the other."""
    before, end = (_split(a)[..., None] for a in _half_open(bounds))
    start = jnp.arange(0, num_keys, min(CHUNK, num_keys))
    return (jnp.maximum(before, start) < jnp.minimum(end, start + CHUNK)).any(axis=(1, 2))


def _sums(add, outer, inner, start, pairs):
    """For each chunk i of `outer`: start[i] folded with add(outer[i], inner[j], sum) over the chunks j with pairs[i, j]."""
    start = vary_as(start, (outer, inner, start))
    inner_chunks = jax.tree.map(_split, inner)

    def of_chunk(arguments):
        of_outer, start, row = arguments

        def step(total, arguments):
            of_inner, seen = arguments
            return jax.lax.cond(seen, lambda total: add(of_outer, of_inner, total), lambda total: total, total), None

        return jax.lax.scan(step, start, (inner_chunks, row))[0]

    chunks = jax.lax.map(of_chunk, (jax.tree.map(_split, outer), jax.tree.map(_split, start), pairs))

    def join(chunks, like):
        joined = jnp.moveaxis(chunks, 0, 1)
        return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, : like.shape[1]]

    return jax.tree.map(join, chunks, start)


def _split(a: Array) -> Array:
    """[batch, tokens, ...] -> [chunks, batch, CHUNK or all tokens, ...], filled up with zeros."""
    chunk = min(CHUNK, a.shape[1])
    a = jnp.pad(a, [(0, 0), (0, -a.shape[1] % chunk)] + [(0, 0)] * (a.ndim - 2))
    return jnp.moveaxis(a.reshape(a.shape[0], -1, chunk, *a.shape[2:]), 1, 0)


def _scores(q, k, half_open: Bounds, number, scale: float) -> Float[Array, "batch kv_heads group queries keys"]:
    """scale * q k^T, -inf where a query does not see the key."""
    scores = (
        jnp.einsum("bqhgd,bkhd->bhgqk", _by_key_head(q, k.shape[2]), k, preferred_element_type=at_least_f32(q.dtype)) * scale
    )
    before, end = (a[:, None, None, :, None] for a in half_open)
    number = number[:, None, None, None, :]
    return jnp.where((before < number) & (number <= end), scores, -jnp.inf)


def _probabilities(queries, keys, scale: float) -> tuple[Array, Array]:
    """p and ds [batch, kv_heads, group, queries, keys]."""
    (q, before, end, dout, lse, delta), (k, v, number) = queries, keys
    scores = _scores(q, k, (before, end), number, scale)
    lse, delta = (_by_key_head(a, k.shape[2]).transpose(0, 2, 3, 1)[..., None] for a in (lse, delta))
    p = jnp.where(jnp.isneginf(scores), 0, jnp.exp(scores - lse))
    dp = jnp.einsum("bqhge,bkhe->bhgqk", _by_key_head(dout, k.shape[2]), v, preferred_element_type=p.dtype)
    return p, p * (dp - delta)


def _by_key_head(a: Array, kv_heads: int) -> Array:
    """[batch, tokens, heads, ...] -> [batch, tokens, kv_heads, group, ...]."""
    return a.reshape(*a.shape[:2], kv_heads, -1, *a.shape[3:])
