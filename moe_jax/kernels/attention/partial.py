"""Attention of queries to a part of the keys, and the gradients from that part: the steps of ring attention.

Query i sees the keys first_key[i] .. last_key[i] of the part, or none. Neither bound decreases from one query to the next. With
lse and out over the whole sequence and delta[i] = <dout[i], out[i]>, a part's gradients are

    p = exp(scale * q k^T - lse)    ds = p * (dout v^T - delta)    dq = scale * ds k    dk = scale * ds^T q    dv = p^T dout

and the parts' gradients add up to the whole sequence's. Results are f32, so that adding parts rounds nothing away; the last
part's result may be rounded. On Hopper each of the three functions is one kernel of `flash_attention` (backend "mosaic"). It
skips blocks that no query sees and adds inside the kernel. Backend "xla" loops over chunks of queries and keys; a pair of
chunks without a visible pair costs only a branch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.attention.online_softmax import BackwardInputs, PartialAttention, merge, softmax_sum
from moe_jax.kernels.precision import at_least_f32
from moe_jax.kernels.shapes import vary_as

CHUNK = 1024
"""Queries, and keys, of a chunk in XLA: f32 scores of 32 heads are 128 MiB."""

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
    previous: PartialAttention | None = None,
    out_dtype: jnp.dtype | None = None,
) -> PartialAttention:
    """Returns attention over this part and, if given, the `previous` attention over other keys.

    out is f32 unless `out_dtype` is given. A query that sees no key has out 0 and lse -inf.
    """
    wide = at_least_f32(q.dtype)
    out_dtype = jnp.dtype(out_dtype or wide)
    if backend == "mosaic":
        from moe_jax.kernels.attention.mosaic.flash import forward_of_interval

        return forward_of_interval(q, k, v, bounds, scale, previous, out_dtype)
    if previous is None:
        none_yet = jnp.full((q.shape[0], *q.shape[2:0:-1]), -jnp.inf, wide)
        previous = PartialAttention(jnp.zeros((*q.shape[:3], v.shape[3]), wide), none_yet)

    def add_keys(queries: _Queries, keys: _Keys, sums: PartialAttention) -> PartialAttention:
        weights, part_lse = softmax_sum(_scores(queries, keys, scale))
        part = jnp.einsum("bhgqk,bkhe->bqhge", weights.astype(keys.v.dtype), keys.v, preferred_element_type=wide)
        lse = sums.lse.swapaxes(1, 2)
        new = PartialAttention(part.reshape(sums.out.shape), part_lse.reshape(lse.shape))
        out, lse = merge(PartialAttention(sums.out, lse), new)
        return PartialAttention(out, lse.swapaxes(1, 2))

    start = PartialAttention(previous[0], previous[1].swapaxes(1, 2))
    queries = _Queries(q, *_half_open(bounds))
    out, lse = _sums(add_keys, queries, _numbered(k, v), start, _pairs(bounds, k.shape[1]))
    return PartialAttention(out.astype(out_dtype), lse.swapaxes(1, 2))


def gradient_of_queries(
    arrays: BackwardInputs,
    bounds: Bounds,
    *,
    scale: float,
    backend: str,
    previous: Float[Array, "batch queries heads head_dim"] | None = None,
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "batch queries heads head_dim"]:
    """Returns dq from this part plus `previous`, the dq from other parts; f32 unless `out_dtype` is given."""
    q, k = arrays.q, arrays.k
    wide = at_least_f32(q.dtype)
    out_dtype = jnp.dtype(out_dtype or wide)
    if backend == "mosaic":
        from moe_jax.kernels.attention.mosaic.flash import gradient_of_queries

        return gradient_of_queries(arrays, bounds, scale, previous, out_dtype)

    def add_keys(queries: _Queries, keys: _Keys, dq: Array) -> Array:
        _, ds = _probabilities(queries, keys, scale)
        part = jnp.einsum("bhgqk,bkhd->bqhgd", ds.astype(q.dtype), keys.k, preferred_element_type=wide)
        return dq + scale * part.reshape(dq.shape)

    start = jnp.zeros(q.shape, wide) if previous is None else previous
    queries, keys = _queries(arrays, bounds), _numbered(k, arrays.v)
    return _sums(add_keys, queries, keys, start, _pairs(bounds, k.shape[1])).astype(out_dtype)


def gradients_of_keys(
    arrays: BackwardInputs, bounds: Bounds, *, scale: float, backend: str, previous: tuple[Array, Array] | None = None
) -> tuple[Float[Array, "batch keys kv_heads head_dim"], Float[Array, "batch keys kv_heads value_dim"]]:
    """Returns (dk, dv) of this part from these queries plus `previous`, the gradients from other queries."""
    if backend == "mosaic":
        from moe_jax.kernels.attention.mosaic.flash import gradients_of_keys

        return gradients_of_keys(arrays, bounds, scale, previous)
    k, v = arrays.k, arrays.v
    wide = at_least_f32(arrays.q.dtype)

    def add_queries(keys: _Keys, queries: _Queries, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = sums
        p, ds = _probabilities(queries, keys, scale)
        assert queries.dout is not None
        q, dout = (_by_key_head(a, dk.shape[2]) for a in (queries.q, queries.dout))
        dv += jnp.einsum("bhgqk,bqhge->bkhe", p.astype(q.dtype), dout, preferred_element_type=wide)
        dk += scale * jnp.einsum("bhgqk,bqhgd->bkhd", ds.astype(q.dtype), q, preferred_element_type=wide)
        return dk, dv

    start = (jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)) if previous is None else previous
    return _sums(add_queries, _numbered(k, v), _queries(arrays, bounds), start, _pairs(bounds, k.shape[1]).T)


class _Queries(NamedTuple):
    """Arrays [batch, queries, ...] that are split into chunks; the last three are for gradients."""

    q: Array
    before: Array
    """Keys before the first that a query sees."""
    end: Array
    """Keys up to the last that a query sees: not above `before` for a query that sees none."""
    dout: Array | None = None
    lse: Array | None = None
    delta: Array | None = None


class _Keys(NamedTuple):
    """Arrays [batch, keys, ...] that are split into chunks."""

    k: Array
    v: Array
    number: Array
    """Keys are numbered from 1: padding has number 0, which no query sees."""


def _half_open(bounds: Bounds) -> Bounds:
    """Returns (keys before the first seen, keys up to the last seen): an interval that is empty when padded with zeros."""
    return bounds[0], bounds[1] + 1


def _queries(arrays: BackwardInputs, bounds: Bounds) -> _Queries:
    q, lse, delta = arrays.q, arrays.lse, arrays.delta
    return _Queries(q, *_half_open(bounds), arrays.dout.astype(q.dtype), lse.swapaxes(1, 2), delta.swapaxes(1, 2))


def _numbered(k: Array, v: Array) -> _Keys:
    return _Keys(k, v, jnp.arange(1, k.shape[1] + 1, dtype=jnp.int32)[None])


def _pairs(bounds: Bounds, num_keys: int) -> Bool[Array, "query_chunks key_chunks"]:
    """Returns True for each pair of chunks in which a query of one sees a key of the other."""
    before, end = (_split(a)[..., None] for a in _half_open(bounds))
    start = jnp.arange(0, num_keys, min(CHUNK, num_keys))
    return (jnp.maximum(before, start) < jnp.minimum(end, start + CHUNK)).any(axis=(1, 2))


def _sums(add, outer, inner, start, pairs):
    """Folds, for each chunk i of `outer`, start[i] with add(outer[i], inner[j], sum) over the chunks j with pairs[i, j]."""
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
    """[batch, tokens, ...] -> [chunks, batch, CHUNK or all tokens, ...], padded with zeros."""
    chunk = min(CHUNK, a.shape[1])
    a = jnp.pad(a, [(0, 0), (0, -a.shape[1] % chunk)] + [(0, 0)] * (a.ndim - 2))
    return jnp.moveaxis(a.reshape(a.shape[0], -1, chunk, *a.shape[2:]), 1, 0)


def _scores(queries: _Queries, keys: _Keys, scale: float) -> Float[Array, "batch kv_heads group queries keys"]:
    """Returns scale * q k^T, -inf if a query does not see the key."""
    q, k = queries.q, keys.k
    scores = (
        jnp.einsum("bqhgd,bkhd->bhgqk", _by_key_head(q, k.shape[2]), k, preferred_element_type=at_least_f32(q.dtype)) * scale
    )
    before, end = (a[:, None, None, :, None] for a in (queries.before, queries.end))
    number = keys.number[:, None, None, None, :]
    return jnp.where((before < number) & (number <= end), scores, -jnp.inf)


def _probabilities(queries: _Queries, keys: _Keys, scale: float) -> tuple[Array, Array]:
    """Returns p and ds [batch, kv_heads, group, queries, keys]."""
    assert queries.dout is not None and queries.lse is not None and queries.delta is not None
    kv_heads, row_arrays = keys.k.shape[2], (queries.lse, queries.delta)
    scores = _scores(queries, keys, scale)
    lse, delta = (_by_key_head(a, kv_heads).transpose(0, 2, 3, 1)[..., None] for a in row_arrays if a is not None)
    p = jnp.where(jnp.isneginf(scores), 0, jnp.exp(scores - lse))
    dp = jnp.einsum("bqhge,bkhe->bhgqk", _by_key_head(queries.dout, kv_heads), keys.v, preferred_element_type=p.dtype)
    return p, p * (dp - delta)


def _by_key_head(a: Array, kv_heads: int) -> Array:
    """[batch, tokens, heads, ...] -> [batch, tokens, kv_heads, group, ...]."""
    return a.reshape(*a.shape[:2], kv_heads, -1, *a.shape[3:])
