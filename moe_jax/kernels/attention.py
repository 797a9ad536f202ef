"""Causal attention over packed segments with grouped queries, in plain XLA, chunked so that no [seq, seq] array is large.

Cost for q [B,S,H,d] against N keys: 4*B*H*S*N*d FLOPs (masked keys are computed too), B*H*QUERY_CHUNK*N scores in memory.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

QUERY_CHUNK = 1024
"""Queries per chunk: long enough for full-speed matmuls, short enough that 32 heads x 4096 keys of f32 scores are 0.5 GiB."""


def attention(
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    *,
    scale: float,
    query_segment_ids: Int[Array, "batch queries"],
    key_segment_ids: Int[Array, "batch keys"],
    query_offset: Int[Array, ""] | int = 0,
    window: Int[Array, ""] | int | None = None,
) -> Float[Array, "batch queries heads head_dim"]:
    """softmax(scale * q k^T + mask) v, scores and softmax in f32, the result in q's dtype.

    Query i stands at key index query_offset + i. It sees key j if j is not after it, their segments are equal, and, with a
    window, j is one of the `window` keys that end with it. Heads h*G .. h*G+G-1 share key head h, G = heads / kv_heads.
    A query that sees no key gives some finite average: it is padding, which nobody reads.

    Above QUERY_CHUNK queries, chunks run one after the other and are recomputed in the backward pass.
    """
    queries = q.shape[1]
    if k.shape != v.shape or q.shape[2] % k.shape[2] or q.shape[3] != k.shape[3] or q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q [batch, queries, heads, head_dim] must match k and v [batch, keys, kv_heads, head_dim], "
            f"heads a multiple of kv_heads; got q {q.shape}, k {k.shape}, v {v.shape}"
        )

    def chunk(q: Array, segment_ids: Array, offset) -> Array:
        index = offset + jnp.arange(q.shape[1])
        keys = jnp.arange(k.shape[1])
        visible = keys[None, :] <= index[:, None]
        if window is not None:
            visible &= keys[None, :] > index[:, None] - window
        visible = visible & (segment_ids[:, :, None] == key_segment_ids[:, None, :])
        return _masked_attention(q, k, v, visible, scale)

    if queries <= QUERY_CHUNK:
        return chunk(q, query_segment_ids, query_offset)

    num_chunks = -(-queries // QUERY_CHUNK)
    padding = num_chunks * QUERY_CHUNK - queries

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], num_chunks, QUERY_CHUNK, *x.shape[2:]), 1, 0)

    offsets = query_offset + jnp.arange(num_chunks) * QUERY_CHUNK
    out = jax.lax.map(jax.checkpoint(lambda xs: chunk(*xs)), (split(q), split(query_segment_ids), offsets))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, :queries]


def _masked_attention(q: Array, k: Array, v: Array, visible: Array, scale: float) -> Array:
    """Attention of all queries at once under `visible` [batch, queries, keys]."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k, preferred_element_type=accumulate) * scale
    # A finite minimum, not -inf: a row with no visible key stays free of NaN in both passes.
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(accumulate).min)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhgqk,bkhd->bqhgd", probabilities, v).reshape(q.shape)
