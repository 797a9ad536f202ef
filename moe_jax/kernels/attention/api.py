"""Causal attention over packed segments with grouped queries: fused on Hopper, elsewhere in plain XLA, chunked over queries.

Cost in XLA for q [B,S,H,d] against N keys: 4*B*H*S*N*d FLOPs (masked keys are computed too), B*H*QUERY_CHUNK*N scores in
memory. `flash_attention` skips blocks of masked keys and holds no scores in memory.
"""

import functools
import logging
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Integer

from moe_jax.kernels.attention.online_softmax import PartialAttention
from moe_jax.kernels.backends import ENVIRONMENT_VARIABLE, is_interpreted, splitting_refusal

_logger = logging.getLogger(__name__)

ATTENTION_BACKENDS = ("mosaic", "xla")

QUERY_CHUNK = 1024
"""Queries per chunk: long enough for full-speed matmuls, short enough that 32 heads x 4096 keys of f32 scores are 0.5 GiB."""


def attention(
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    *,
    scale: float,
    query_segment_ids: Integer[Array, "batch queries"],
    key_segment_ids: Integer[Array, "batch keys"],
    query_offset: Int[Array, ""] | int = 0,
    window: Int[Array, ""] | int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Float[Array, "batch queries heads value_dim"] | PartialAttention:
    """Returns softmax(scale * q k^T + mask) v, with scores and softmax in f32 and the result in q's dtype.

    Query i is at key index query_offset + i. It sees key j if j is not after it and their segments are equal. With a window, j
    must also be one of the `window` keys that end with the query's own. Heads h*G .. h*G+G-1 share key head h, G = heads /
    kv_heads. A query that sees no key is padding, with an unspecified finite result. A traced window below 1 counts as 1.

    With `return_lse` the result is a pair (out, lse), both differentiable. A query's lse is the logsumexp of its masked scores
    [batch, heads, queries], in f32. A query that sees no key has some finite lse.

    `backend` "mosaic" is `flash_attention`, the default on a Hopper GPU in bf16 and f16 if queries and keys are the same
    tokens. They are if `key_segment_ids` is the same array object as `query_segment_ids`. A segment is then a run of equal ids.
    "xla" accepts every input: above QUERY_CHUNK queries, chunks run in turn and are recomputed in the backward pass.
    MOE_JAX_BACKEND=xla turns the kernel off.

    Raises:
        ValueError: shapes that do not match, a window below 1, an unknown backend, or one that does not support the input.
    """
    queries = q.shape[1]
    if k.shape[:3] != v.shape[:3] or q.shape[2] % k.shape[2] or q.shape[3] != k.shape[3] or q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q [batch, queries, heads, head_dim] must match k [batch, keys, kv_heads, head_dim] "
            f"and v [batch, keys, kv_heads, value_dim], heads a multiple of kv_heads; got q {q.shape}, k {k.shape}, v {v.shape}"
        )
    for name, ids, of in (("query_segment_ids", query_segment_ids, q), ("key_segment_ids", key_segment_ids, k)):
        if ids.shape != of.shape[:2]:
            raise ValueError(f"{name} must have shape {list(of.shape[:2])}, one id per token; got {list(ids.shape)}")
    if isinstance(window, int | np.integer) and window < 1:
        raise ValueError(f"window must be at least 1 or None; got {window}")

    def refusal() -> str | None:
        if key_segment_ids is not query_segment_ids or not isinstance(query_offset, int) or query_offset:
            return "queries and keys must be the same tokens: one array of segment ids, query_offset 0"
        return flash_refusal(q, k, v, scale, window)

    if resolve_attention_backend(backend, refusal) == "mosaic":
        from moe_jax.kernels.attention.mosaic.flash import flash_attention

        found = PartialAttention(*flash_attention(q, k, v, scale=scale, segment_ids=query_segment_ids, window=window))
        return found if return_lse else found.out

    def chunk(q: Array, segment_ids: Array, offset) -> tuple[Array, ...]:
        index = offset + jnp.arange(q.shape[1])
        keys = jnp.arange(k.shape[1])
        visible = keys[None, :] <= index[:, None]
        if window is not None:
            visible &= keys[None, :] > index[:, None] - jnp.maximum(window, 1)
        visible = visible & (segment_ids[:, :, None] == key_segment_ids[:, None, :])
        return _masked_attention(q, k, v, visible, scale, return_lse)

    if queries <= QUERY_CHUNK:
        out, *lse = chunk(q, query_segment_ids, query_offset)
        return PartialAttention(out, lse[0]) if lse else out

    num_chunks = -(-queries // QUERY_CHUNK)
    padding = num_chunks * QUERY_CHUNK - queries

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], num_chunks, QUERY_CHUNK, *x.shape[2:]), 1, 0)

    offsets = query_offset + jnp.arange(num_chunks) * QUERY_CHUNK
    out, *lse = jax.lax.map(jax.checkpoint(lambda xs: chunk(*xs)), (split(q), split(query_segment_ids), offsets))
    out = jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *out.shape[3:])[:, :queries]
    if not lse:
        return out
    return PartialAttention(out, jnp.moveaxis(lse[0], 0, 2).reshape(*lse[0].shape[1:3], -1)[:, :, :queries])


def flash_refusal(q: Array, k: Array, v: Array, scale: float, window: Array | int | None) -> str | None:
    """Returns why Hopper's flash attention cannot compute this attention; None if it can."""
    # Imports Pallas Mosaic GPU, a second of CPU time: called only where the kernels may run.
    from moe_jax.kernels.attention.mosaic.flash import refusal

    return refusal(q, k, v, scale, window)


def resolve_attention_backend(backend: str | None, refusal: Callable[[], str | None]) -> str:
    """Returns `backend` if given, else "mosaic" if supported, else "xla"; logs each choice once per process.

    `refusal` returns the reason why "mosaic" cannot compute the attention, None if it can. It is called only if the kernels
    might be chosen, because it imports them.

    Raises:
        ValueError: an unknown backend, or one that does not support the input.
    """
    if backend not in (None, *ATTENTION_BACKENDS):
        raise ValueError(
            f"argument backend: unknown backend {backend!r}; choose one of {', '.join(map(repr, ATTENTION_BACKENDS))}"
        )
    reason = None
    if backend == "mosaic" and (reason := refusal()) is not None:
        raise ValueError(f"argument backend: backend 'mosaic' does not support this input: {reason}")
    if backend is None:
        reason = _reason_against_fused() or refusal()
        backend = "mosaic" if reason is None else "xla"
    _announce(backend, reason)
    return backend


def _reason_against_fused() -> str | None:
    """Returns the reason not to use the kernel by default although it could run."""
    if os.environ.get(ENVIRONMENT_VARIABLE) == "xla":
        return f"{ENVIRONMENT_VARIABLE} is 'xla'"
    return "it is not written for this device" if is_interpreted() else splitting_refusal()


@functools.cache
def _announce(backend: str, reason: str | None) -> None:
    """Logs each choice once per process."""
    _logger.info("attention runs on backend %r%s", backend, f"; 'mosaic' not: {reason}" if reason else "")


def _masked_attention(q: Array, k: Array, v: Array, visible: Array, scale: float, return_lse: bool) -> tuple[Array, ...]:
    """Computes attention of all queries at once under `visible` [batch, queries, keys]: (out, lse) or (out,)."""
    kv_heads = k.shape[2]
    grouped = q.reshape(*q.shape[:2], kv_heads, q.shape[2] // kv_heads, q.shape[3])
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k, preferred_element_type=accumulate) * scale
    # A finite minimum, not -inf: a row with no visible key stays free of NaN in both passes.
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(accumulate).min)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bhgqk,bkhe->bqhge", probabilities, v).reshape(*q.shape[:3], v.shape[3]).astype(q.dtype)
    out = checkpoint_name(out, "attention")
    return (out, jax.nn.logsumexp(scores, axis=-1).reshape(len(q), q.shape[2], q.shape[1])) if return_lse else (out,)
