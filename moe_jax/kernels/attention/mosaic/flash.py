"""Causal attention over packed segments, fused on Hopper: no [seq, seq] array in memory, forward or backward.

    lse[i] = log sum_j exp(scale * q[i] k[j])      out[i] = sum_j exp(scale * q[i] k[j] - lse[i]) v[j]

over the keys j that query i sees. Backward, with delta[i] = <dout[i], out[i]> - dlse[i]:

    p = exp(scale * q k^T - lse)    ds = p * (dout v^T - delta)    dq = scale * ds k    dk = scale * ds^T q    dv = p^T dout

Residuals: q, k, v, out, lse. (FlashAttention-3, https://arxiv.org/abs/2407.08608.)
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention.mosaic.backward_keys import backward_keys
from moe_jax.kernels.attention.mosaic.backward_queries import backward_queries
from moe_jax.kernels.attention.mosaic.forward import forward
from moe_jax.kernels.attention.mosaic.interval import pad_to_block
from moe_jax.kernels.attention.mosaic.masks import TokenInterval, first_keys, last_queries
from moe_jax.kernels.attention.online_softmax import BackwardInputs, PartialAttention
from moe_jax.kernels.hopper.interpreter import is_interpreted
from moe_jax.kernels.shapes import check_shape, vary_alike
from moe_jax.kernels.target import compute_capability


def flash_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads value_dim"],
    *,
    scale: float,
    segment_ids: Int[Array, "batch seq"],
    window: Int[Array, ""] | int | None = None,
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch heads seq"]]:
    """Returns out in q's dtype and lse in f32, both differentiable in q, k and v.

    Query i sees key j if j is not after it and all tokens from j to i have one segment id. A segment is a run of equal ids.
    With a window, also i - window < j. Blocks of keys that no query of a block sees cost nothing. Heads h*G .. h*G+G-1 share
    key head h, G = heads / kv_heads. Scores, softmax and all sums are f32; p is rounded to q's dtype before it multiplies v.
    Two runs give the same bits, gradients too.

    Raises:
        ValueError: shapes that do not fit together, or an input that `refusal` refuses.
    """
    sizes: dict[str, int] = {}
    check_shape("q", q, "batch seq heads head_dim", sizes)
    check_shape("k", k, "batch seq kv_heads head_dim", sizes)
    check_shape("v", v, "batch seq kv_heads value_dim", sizes)
    check_shape("segment_ids", segment_ids, "batch seq", sizes)
    reason = refusal(q, k, v, scale, window)
    if reason is not None:
        raise ValueError(reason)
    out, lse = _flash_attention(*vary_alike((q, k, v, segment_ids, window)), float(scale))
    return out, lse


def refusal(q: Array, k: Array, v: Array, scale: float, window: Array | int | None) -> str | None:
    """Returns the reason why the kernels cannot compute this attention, with what they take; None where they can."""
    if not is_interpreted() and compute_capability() != "9.0":
        return f"it needs a Hopper GPU (compute capability 9.0); this is {compute_capability() or 'no NVIDIA GPU'}"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v must all be bfloat16 or all float16; got {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[2] % k.shape[2]:
        return f"heads must be a multiple of kv_heads; got {q.shape[2]} and {k.shape[2]}"
    if not q.size:
        return f"q must have at least one batch, token and head; got shape {q.shape}"
    for name, width in (("head_dim", q.shape[3]), ("value_dim", v.shape[3])):
        if width not in (64, 128, 192, 256):
            return f"{name} must be 64, 128, 192 or 256; got {width}"
    if isinstance(scale, jax.core.Tracer):
        return "scale must be a number that is known while the program is traced"
    if not scale > 0:
        return f"scale must be positive; got {scale}"
    if isinstance(window, int | np.integer) and window < 1:
        return f"window must be at least 1 or None; got {window}"
    return None


def _forward(q: Array, k: Array, v: Array, segment_ids: Array, window: Array | int | None, scale: float) -> PartialAttention:
    seq, dtype = q.shape[1], q.dtype
    q, k, v = (pad_to_block(a) for a in (q, k, v))
    in_sight = TokenInterval(first_keys(pad_to_block(segment_ids, -1), window), None)
    out, lse = forward(q, k, v, in_sight, None, scale, dtype)
    return PartialAttention(out[:, :seq], lse[:, :, :seq])


def _forward_for_backward(q, k, v, segment_ids, window, scale: float) -> tuple[PartialAttention, tuple]:
    result = _forward(q, k, v, segment_ids, window, scale)
    return result, (q, k, v, segment_ids, window, *result)


def _backward(scale: float, residuals: tuple, gradients: PartialAttention) -> tuple:
    q, k, v, segment_ids, window, out, lse = residuals
    dout, dlse = gradients
    seq = q.shape[1]
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=3).swapaxes(1, 2) - dlse
    segment_ids = pad_to_block(segment_ids, -1)
    # Padding comes last, where no query sees it; as queries, with q, dout and delta zero, it adds nothing.
    q, k, v, dout = (pad_to_block(a) for a in (q, k, v, dout.astype(q.dtype)))
    lse, delta = (jnp.pad(a, ((0, 0), (0, 0), (0, q.shape[1] - seq))) for a in (lse * math.log2(math.e), delta))
    arrays = BackwardInputs(q, k, v, dout, lse, delta)
    dq = backward_queries(arrays, TokenInterval(first_keys(segment_ids, window), None), None, scale, q.dtype)
    dk, dv = backward_keys(arrays, TokenInterval(None, last_queries(segment_ids, window)), None, scale, q.dtype)
    return dq[:, :seq], dk[:, :seq], dv[:, :seq], None, None


_op = jax.custom_vjp(_forward, nondiff_argnums=(5,))
_op.defvjp(_forward_for_backward, _backward)
_flash_attention = functools.partial(jax.jit, static_argnums=5)(_op)
