"""The next-token loss, chunked over tokens: the [tokens, vocab] logits never exist.

    loss = sum_t mask[t] * (logsumexp_v(h[t] . w[v]) - h[t] . w[label[t]])

The gradient of a sum is known up to its cotangent, a number, as soon as a chunk's logits are. So the forward pass of a
gradient makes each chunk's logits once and of them the loss and its gradients, and the backward pass only scales these: three
matmuls, where making the logits again takes four (the idea is that of the fused loss of Liger Kernel, Hsu et al., 2024,
https://arxiv.org/abs/2410.10989). FLOPs: 2*T*V*D for the loss alone, 6*T*V*D with its gradients.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.precision import at_least_f32
from moe_jax.kernels.varying import vary_alike, vary_as
from moe_jax.kernels.vocabulary import (
    CHUNK_TOKENS,
    check_vocabulary_arguments,
    error_of_logits,
    joined_chunks,
    logits_of_chunk,
    token_chunks,
)


def cross_entropy(
    hidden: Float[Array, "tokens hidden"],
    head_weight: Float[Array, "vocab hidden"],
    labels: Int[Array, "tokens"],
    mask: Bool[Array, "tokens"],
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The summed loss over masked-in tokens, and their number, f32 (f64 for f64); differentiable in hidden and head_weight.

    Matmuls take operands in hidden's dtype and accumulate in f32; head_weight's gradient is accumulated in f32 over all
    tokens and returned in its own dtype. Labels of masked-out tokens may be anything; with one
    of another token outside [0, vocab) the loss is NaN.

    Args:
      chunk_tokens: the most tokens whose logits exist at a time. With gradients a chunk takes 6 bytes a logit beside the 4*V*D
        of head_weight's gradient, which each chunk reads and writes: larger chunks take memory, smaller ones bandwidth.

    Raises:
      ValueError: shapes that do not fit, chunk_tokens < 1, or arrays split over mesh axes of type Explicit.
    """
    check_vocabulary_arguments(hidden, head_weight, chunk_tokens, labels=labels, mask=mask)
    mask = mask.astype(bool)
    total = _loss_sum(chunk_tokens, *vary_alike((hidden, head_weight, labels, mask)))
    return total, mask.sum().astype(total.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(chunk_tokens, hidden, head_weight, labels, mask):
    weight = head_weight.astype(hidden.dtype)

    def add_chunk(total, chunk):
        return total + _loss_of_chunk(weight, *chunk)[0], None

    start = vary_as(jnp.zeros((), at_least_f32(hidden.dtype)), hidden)
    return jax.lax.scan(add_chunk, start, token_chunks(chunk_tokens, hidden, labels, mask))[0]


def _forward(chunk_tokens, hidden, head_weight, labels, mask):
    """The loss and, in the accumulator's dtype, its gradients."""
    accumulator = at_least_f32(hidden.dtype)
    weight = head_weight.astype(hidden.dtype)

    def add_chunk(state, chunk):
        total, d_weight = state
        hidden, labels, mask = chunk
        loss, logits, logsumexp = _loss_of_chunk(weight, *chunk)
        d_logits = jnp.where(mask[:, None], error_of_logits(logits, logsumexp, labels), 0).astype(hidden.dtype)
        d_weight += jnp.einsum("tv,td->vd", d_logits, hidden, preferred_element_type=accumulator)
        return (total + loss, d_weight), jnp.einsum("tv,vd->td", d_logits, weight, preferred_element_type=accumulator)

    start = vary_as((jnp.zeros((), accumulator), jnp.zeros(head_weight.shape, accumulator)), hidden)
    (total, d_weight), d_hidden = jax.lax.scan(add_chunk, start, token_chunks(chunk_tokens, hidden, labels, mask))
    d_hidden = joined_chunks(d_hidden, len(hidden))
    # Empty arrays tell the backward pass the dtypes.
    return total, (d_hidden, d_weight, jnp.zeros(0, hidden.dtype), jnp.zeros(0, head_weight.dtype))


def _backward(chunk_tokens, kept, d_loss):
    d_hidden, d_weight, like_hidden, like_weight = kept
    return (d_hidden * d_loss).astype(like_hidden.dtype), (d_weight * d_loss).astype(like_weight.dtype), None, None


_loss_sum.defvjp(_forward, _backward)


def _loss_of_chunk(weight, hidden, labels, mask):
    """(the summed loss, logits, their logsumexp)"""
    label_logit, logits, logsumexp = logits_of_chunk(weight, hidden, labels)
    return jnp.where(mask, logsumexp - label_logit, 0).sum(), logits, logsumexp
