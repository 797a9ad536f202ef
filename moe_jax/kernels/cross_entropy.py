"""The next-token loss, chunked over the vocabulary: the [tokens, vocab] logits never exist.

    loss = sum_t mask[t] * (logsumexp_v(h[t] . w[v]) - h[t] . w[label[t]])

The logsumexp runs over chunks of the vocabulary with a running maximum (Milakov and Gimelshein, 2018,
https://arxiv.org/abs/1805.02867); the backward pass makes each chunk's logits again. FLOPs: 2*T*V*D forward, 6*T*V*D backward.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.varying import vary_alike, vary_as


def cross_entropy(
    hidden: Float[Array, "tokens hidden"],
    head_weight: Float[Array, "vocab hidden"],
    labels: Int[Array, "tokens"],
    mask: Bool[Array, "tokens"],
    *,
    chunk_vocab: int = 16384,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The summed loss over masked-in tokens, and their number, f32 (f64 for f64); differentiable in hidden and head_weight.

    Matmuls take operands in hidden's dtype and accumulate in f32; head_weight's gradient is accumulated in f32 over all
    tokens and returned in its own dtype. Labels of masked-out tokens may be anything.

    Raises:
      ValueError: shapes that do not fit, or chunk_vocab < 1.
    """
    tokens = hidden.shape[:1]
    if hidden.ndim != 2 or head_weight.ndim != 2 or hidden.shape[1] != head_weight.shape[1]:
        raise ValueError(f"hidden must be [tokens, D] and head_weight [vocab, D]; got {hidden.shape} and {head_weight.shape}")
    if labels.shape != tokens or mask.shape != tokens:
        raise ValueError(f"labels and mask must have shape {tokens}; got {labels.shape} and {mask.shape}")
    if chunk_vocab < 1:
        raise ValueError(f"chunk_vocab must be at least 1; got {chunk_vocab}")
    mask = mask.astype(bool)
    arrays = vary_alike((hidden, head_weight, labels, mask))
    total = _loss_sum(min(chunk_vocab, head_weight.shape[0]), *arrays)
    return total, mask.sum().astype(total.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(chunk_vocab, hidden, head_weight, labels, mask):
    return _forward(chunk_vocab, hidden, head_weight, labels, mask)[0]


def _forward(chunk_vocab, hidden, head_weight, labels, mask):
    accumulate = jnp.promote_types(hidden.dtype, jnp.float32)
    tokens = hidden.shape[0]

    def add_chunk(state, start, size):
        maximum, total, picked = state
        logits = _logits(hidden, head_weight, start, size)
        peak = jnp.maximum(maximum, logits.max(axis=1))
        total = total * jnp.exp(maximum - peak) + jnp.exp(logits - peak[:, None]).sum(axis=1)
        column = labels - start
        inside = (column >= 0) & (column < size)
        label_logit = jnp.take_along_axis(logits, jnp.clip(column, 0, size - 1)[:, None], axis=1)[:, 0]
        return peak, total, jnp.where(inside, label_logit, picked)

    start = jnp.full(tokens, -jnp.inf, accumulate), jnp.zeros(tokens, accumulate), jnp.zeros(tokens, accumulate)
    peak, total, picked = _over_chunks(add_chunk, vary_as(start, hidden), head_weight.shape[0], chunk_vocab)
    logsumexp = peak + jnp.log(total)
    return jnp.where(mask, logsumexp - picked, 0).sum(), (hidden, head_weight, labels, mask, logsumexp)


def _backward(chunk_vocab, kept, d_loss):
    hidden, head_weight, labels, mask, logsumexp = kept
    accumulate = logsumexp.dtype

    def add_chunk(state, start, size):
        d_hidden, d_weight = state
        probabilities = jnp.exp(_logits(hidden, head_weight, start, size) - logsumexp[:, None])
        is_label = (labels - start)[:, None] == jnp.arange(size)
        d_logits = jnp.where(mask[:, None], probabilities - is_label, 0) * d_loss
        d_logits = d_logits.astype(hidden.dtype)
        weight = jax.lax.dynamic_slice_in_dim(head_weight, start, size).astype(hidden.dtype)
        d_hidden += jnp.einsum("tv,vd->td", d_logits, weight, preferred_element_type=accumulate)
        d_rows = jnp.einsum("tv,td->vd", d_logits, hidden, preferred_element_type=accumulate).astype(head_weight.dtype)
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_weight, d_rows, start, axis=0)

    start = jnp.zeros(hidden.shape, accumulate), jnp.zeros_like(head_weight)
    d_hidden, d_weight = _over_chunks(add_chunk, vary_as(start, hidden), head_weight.shape[0], chunk_vocab)
    return d_hidden.astype(hidden.dtype), d_weight, None, None


_loss_sum.defvjp(_forward, _backward)


def _logits(hidden, head_weight, start, size):
    weight = jax.lax.dynamic_slice_in_dim(head_weight, start, size).astype(hidden.dtype)
    accumulate = jnp.promote_types(hidden.dtype, jnp.float32)
    return jnp.einsum("td,vd->tv", hidden, weight, preferred_element_type=accumulate)


def _over_chunks(add_chunk, state, vocab: int, chunk: int):
    """Folds `add_chunk(state, start, size)` over the whole chunks by a scan, then over the shorter last one."""
    whole = vocab // chunk

    def step(state, start):
        return add_chunk(state, start, chunk), None

    state, _ = jax.lax.scan(step, state, jnp.arange(whole) * chunk)
    return add_chunk(state, whole * chunk, vocab - whole * chunk) if vocab % chunk else state
