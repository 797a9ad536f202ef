"""Causal attention over packed segments, fused on Hopper: no [seq, seq] array in memory, forward or backward.

    lse[i] = log sum_j exp(scale * q[i] k[j])      out[i] = sum_j exp(scale * q[i] k[j] - lse[i]) v[j]

over the keys j that query i sees. Backward, with delta[i] = <dout[i], out[i]> - dlse[i]:

    p = exp(scale * q k^T - lse)    ds = p * (dout v^T - delta)    dq = scale * ds k    dk = scale * ds^T q    dv = p^T dout

Residuals: q, k, v, out, lse. (FlashAttention-3, https://arxiv.org/abs/2407.08608.)

The same kernels compute attention to a part of a sequence's keys for `kernels.attention.partial`: each query sees one interval
of them, or none. Results are then f32, except a last part's, which may be rounded. The kernels add the results of other parts.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention.mosaic.backward_keys import KeyGradients, backward_keys
from moe_jax.kernels.attention.mosaic.backward_queries import backward_queries
from moe_jax.kernels.attention.mosaic.forward import forward
from moe_jax.kernels.attention.mosaic.masks import TokenInterval, first_keys, last_queries, queries_of_keys
from moe_jax.kernels.attention.online_softmax import BackwardInputs, PartialAttention
from moe_jax.kernels.backends import compute_capability
from moe_jax.kernels.hopper.interpreter import is_interpreted
from moe_jax.kernels.shapes import check_shape, vary_alike


def flash_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads value_dim"],
    *,
    scale: float,
    segment_ids: Int[Array, "batch seq"],
    window: Int[Array, ""] | int | None = None,
) -> tuple[Float[Array, "batch seq heads value_dim"], Float[Array, "batch heads seq"]]:
    """Computes causal flash attention over packed segments; returns out in q's dtype and lse in f32, both differentiable.

    Query i sees key j if j is not after it and all tokens from j to i have one segment id. A segment is a run of equal ids.
    With a window, also i - window < j. Blocks of keys that no query of a block sees are skipped. Heads h*G .. h*G+G-1 share key
    head h, G = heads / kv_heads. Scores, softmax and all sums are f32; p is rounded to q's dtype before it multiplies v.
    Results and gradients are deterministic.

    Raises:
        ValueError: shapes that do not match, or an input that `refusal` refuses.
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
    """Returns why the kernels do not support this attention, with the supported sizes; None if they do."""
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
    out, lse = _forward(q, k, v, segment_ids, window, scale)
    # XLA lets a kernel write its result straight into a loop's stack of residuals. If the result has another reader, XLA runs
    # the kernel twice: once for each. The choice is always the same, but XLA cannot know it, and copies instead.
    out = jnp.where(segment_ids[0, 0] != jnp.iinfo(segment_ids.dtype).min, out, 0)
    result = checkpoint_name(PartialAttention(out, lse), "attention")
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


BLOCK = 128
"""A multiple of every kernel's blocks: sequences are padded to a multiple of it."""

Bounds = tuple[Int[Array, "batch queries"], Int[Array, "batch queries"]]
"""(first_key, last_key) of each query."""


def forward_of_interval(
    q: Array, k: Array, v: Array, bounds: Bounds, scale: float, previous: PartialAttention | None, out_dtype: jnp.dtype
) -> PartialAttention:
    """Computes attention of each query to the keys first_key .. last_key (`partial.forward`), on Hopper.

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
    """Computes dq from a part of the keys (`partial.gradient_of_queries`), on Hopper.

    arrays.lse covers all keys of the sequence, and arrays.delta[i] = <dout[i], out[i]> uses the whole `out`. The gradients from
    the sequence's parts then add up to the gradient.
    """
    queries = arrays.q.shape[1]
    arrays, in_sight = _pad_backward(arrays, *bounds)
    previous = None if previous is None else pad_to_block(previous)
    return backward_queries(arrays, in_sight, previous, float(scale), out_dtype)[:, :queries]


def gradients_of_keys(
    arrays: BackwardInputs, bounds: Bounds, scale: float, previous: tuple[Array, Array] | None
) -> tuple[Array, Array]:
    """Computes dk and dv of a part of the keys in f32, plus `previous` (`partial.gradients_of_keys`), on Hopper."""
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
    """Pads with queries that see nothing: their first key is after all keys, and neither bound decreases."""
    padding = (0, 0), (0, -first_key.shape[1] % BLOCK)
    first_key = jnp.pad(jnp.minimum(first_key, keys), padding, constant_values=keys)
    return TokenInterval(first_key.astype(jnp.int32), jnp.pad(last_key, padding, mode="edge").astype(jnp.int32))


def pad_to_block(a: Array, value: int = 0, axis: int = 1) -> Array:
    """Pads an axis at its end with `value`, up to a multiple of BLOCK."""
    padding = [(0, 0)] * a.ndim
    padding[axis] = 0, -a.shape[axis] % BLOCK
    return jnp.pad(a, padding, constant_values=value)
