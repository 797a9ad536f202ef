"""The next-token loss, chunked over tokens: the [tokens, vocab] logits never exist.

    loss = sum_t mask[t] * (logsumexp_v(h[t] . w[v]) - h[t] . w[label[t]])

A mask of floats holds a weight for each token.

Once a chunk's logits are known, the gradient of the sum is known up to its cotangent, a number. So the forward pass of a
gradient computes each chunk's logits once, and from them the loss and its gradients. The backward pass only scales these
gradients: three matmuls, where computing the logits again takes four. The fused loss of Liger Kernel has the same idea (Hsu et
al., 2024, https://arxiv.org/abs/2410.10989). FLOPs: 2*T*V*D for the loss alone, 6*T*V*D with its gradients, 4*T*V*D if the
weights are frozen.
"""

from functools import partial
from typing import NamedTuple

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
    mask: Bool[Array, "tokens"] | Float[Array, "tokens"],
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the loss summed over the tokens in the mask, and the number of these tokens, both f32 (f64 for f64).

    A mask of floats holds a weight for each token. Then the losses are multiplied by their weights, and the second value is the
    sum of weights. Weights are not negative, and are constants for derivatives.

    Differentiable in hidden and head_weight. Nothing is computed for the gradient of a head_weight that is not differentiated.
    Matmuls take operands in hidden's dtype and accumulate in f32. head_weight's gradient is accumulated in f32 over all tokens
    and returned in head_weight's dtype. Labels of tokens outside the mask may be anything; a token in the mask with a label
    outside [0, vocab) makes the loss NaN.

    Args:
        chunk_tokens: the most tokens whose logits exist at a time. With gradients a chunk takes 6 bytes a logit, beside the
            4*V*D bytes of head_weight's gradient, which each chunk reads and writes. Larger chunks take memory, smaller ones
            bandwidth.

    Raises:
        ValueError: shapes that do not fit, chunk_tokens < 1, or arrays split over mesh axes of type Explicit.
    """
    check_vocabulary_arguments(hidden, head_weight, chunk_tokens, labels=labels, mask=mask)
    is_weight = jnp.issubdtype(mask.dtype, jnp.floating)
    mask = jax.lax.stop_gradient(mask.astype(at_least_f32(hidden.dtype))) if is_weight else mask.astype(bool)
    total = _loss_sum(chunk_tokens, *vary_alike((hidden, head_weight, labels, mask)))
    return total, mask.sum().astype(total.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(chunk_tokens, hidden, head_weight, labels, mask):
    weight = head_weight.astype(hidden.dtype)

    def add_chunk(total, chunk):
        return total + _loss_of_chunk(weight, *chunk).loss, None

    start = vary_as(jnp.zeros((), at_least_f32(hidden.dtype)), hidden)
    return jax.lax.scan(add_chunk, start, token_chunks(chunk_tokens, hidden, labels, mask))[0]


class _Residuals(NamedTuple):
    d_hidden: Array
    d_weight: Array | None
    """None if head_weight is not differentiated."""
    like_hidden: Array
    """Empty: tells the backward pass the dtype."""
    like_weight: Array


def _forward(chunk_tokens, hidden, head_weight, labels, mask):
    """Returns the loss and the residuals: its gradients for a cotangent of 1, in the accumulator's dtype.

    Arguments are `jax.custom_derivatives.CustomVJPPrimal`s, which say whether they are differentiated.
    """
    is_trained = head_weight.perturbed
    hidden, head_weight, labels, mask = (argument.value for argument in (hidden, head_weight, labels, mask))
    accumulator = at_least_f32(hidden.dtype)
    weight = head_weight.astype(hidden.dtype)

    def add_chunk(state, chunk):
        total, d_weight = state
        hidden, labels, mask = chunk
        loss, logits, logsumexp = _loss_of_chunk(weight, *chunk)
        d_logits = _weighted(error_of_logits(logits, logsumexp, labels), mask[:, None]).astype(hidden.dtype)
        if is_trained:
            d_weight += jnp.einsum("tv,td->vd", d_logits, hidden, preferred_element_type=accumulator)
        return (total + loss, d_weight), jnp.einsum("tv,vd->td", d_logits, weight, preferred_element_type=accumulator)

    no_gradient = jnp.zeros(head_weight.shape, accumulator) if is_trained else None
    start = vary_as((jnp.zeros((), accumulator), no_gradient), hidden)
    (total, d_weight), d_hidden = jax.lax.scan(add_chunk, start, token_chunks(chunk_tokens, hidden, labels, mask))
    d_hidden = joined_chunks(d_hidden, len(hidden))
    return total, _Residuals(d_hidden, d_weight, jnp.zeros(0, hidden.dtype), jnp.zeros(0, head_weight.dtype))


def _backward(chunk_tokens, residuals: _Residuals, d_loss):
    d_hidden = (residuals.d_hidden * d_loss).astype(residuals.like_hidden.dtype)
    d_weight = residuals.d_weight
    if d_weight is not None:
        d_weight = (d_weight * d_loss).astype(residuals.like_weight.dtype)
    return d_hidden, d_weight, None, None


_loss_sum.defvjp(_forward, _backward, symbolic_zeros=True)


class _ChunkLoss(NamedTuple):
    loss: Array
    logits: Array
    logsumexp: Array


def _loss_of_chunk(weight, hidden, labels, mask) -> _ChunkLoss:
    label_logit, logits, logsumexp = logits_of_chunk(weight, hidden, labels)
    return _ChunkLoss(_weighted(logsumexp - label_logit, mask).sum(), logits, logsumexp)


def _weighted(values, mask):
    """Returns the values times their weights; 0 outside the mask, where values may be NaN."""
    return jnp.where(mask, values, 0) if mask.dtype == bool else jnp.where(mask != 0, mask * values, 0)
