"""The log-probability of each token's label, chunked over tokens: the [tokens, vocab] logits never exist.

    y[t] = h[t] . w[label[t]] - logsumexp_v(h[t] . w[v])

For your own losses: preferences (DPO), policy gradients (GRPO), distillation. The cotangent differs from token to token, so the
backward pass computes each chunk's logits again. Residuals: h and the logsumexp of each token. FLOPs: 2*T*V*D forward and
6*T*V*D backward. `cross_entropy`, where tokens share a cotangent, needs 6*T*V*D for both passes.

Where the weights are frozen, a token's cotangent is a factor on its own gradient dy[t]/dh[t]. The forward pass computes these
gradients beside the logits, and the backward pass scales them: 4*T*V*D for both. Residuals: these gradients, in f32.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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


def token_log_probs(
    hidden: Float[Array, "tokens hidden"],
    head_weight: Float[Array, "vocab hidden"],
    labels: Int[Array, "tokens"],
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Float[Array, "tokens"]:
    """Returns log softmax(hidden head_weight^T)[t, labels[t]] in f32 (f64 for f64).

    Differentiable once, in hidden and head_weight. Matmuls take operands in hidden's dtype and accumulate in f32, and
    head_weight's gradient accumulates in f32 over all tokens. A label outside [0, vocab) gives NaN for its own token; if
    `jnp.where` masks that token out, all gradients are finite.

    Args:
        chunk_tokens: the most tokens whose logits exist at a time, at 4 bytes a logit, and 6 in the backward pass.

    Raises:
        ValueError: shapes that do not fit, chunk_tokens < 1, or arrays split over mesh axes of type Explicit.
    """
    check_vocabulary_arguments(hidden, head_weight, chunk_tokens, labels=labels)
    return _log_probs(chunk_tokens, *vary_alike((hidden, head_weight, labels)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_probs(chunk_tokens, hidden, head_weight, labels):
    return _forward(chunk_tokens, hidden, head_weight, labels)[0]


class _Residuals(NamedTuple):
    hidden: Array
    head_weight: Array
    labels: Array
    logsumexp: Array


class _FrozenResiduals(NamedTuple):
    """The residuals where head_weight is not differentiated."""

    gradients: Array
    """dy[t]/dh[t] of each token, in the accumulator's dtype."""
    like_hidden: Array
    """Empty: tells the backward pass the dtype."""


def _with_residuals(chunk_tokens, *arguments):
    """Arguments are `jax.custom_derivatives.CustomVJPPrimal`s, which say whether they are differentiated."""
    hidden, head_weight, labels = (argument.value for argument in arguments)
    if arguments[1].perturbed:
        log_probs, logsumexp = _forward(chunk_tokens, hidden, head_weight, labels)
        return log_probs, _Residuals(hidden, head_weight, labels, logsumexp)
    weight = head_weight.astype(hidden.dtype)

    def of_chunk(_, chunk):
        label_logit, logits, logsumexp = logits_of_chunk(weight, *chunk)
        d_logits = -error_of_logits(logits, logsumexp, chunk[1]).astype(hidden.dtype)
        gradients = jnp.einsum("tv,vd->td", d_logits, weight, preferred_element_type=at_least_f32(hidden.dtype))
        return None, (label_logit - logsumexp, gradients)

    chunks = jax.lax.scan(of_chunk, None, token_chunks(chunk_tokens, hidden, labels))[1]
    log_probs, gradients = (joined_chunks(chunk, len(hidden)) for chunk in chunks)
    return log_probs, _FrozenResiduals(gradients, jnp.zeros(0, hidden.dtype))


def _forward(chunk_tokens, hidden, head_weight, labels):
    weight = head_weight.astype(hidden.dtype)

    def of_chunk(_, chunk):
        label_logit, _, logsumexp = logits_of_chunk(weight, *chunk)
        return None, (label_logit - logsumexp, logsumexp)

    chunks = jax.lax.scan(of_chunk, None, token_chunks(chunk_tokens, hidden, labels))[1]
    log_probs, logsumexp = (joined_chunks(chunk, len(hidden)) for chunk in chunks)
    return log_probs, logsumexp


def _backward(chunk_tokens, residuals: _Residuals | _FrozenResiduals, d_log_probs):
    if isinstance(residuals, _FrozenResiduals):
        return (d_log_probs[:, None] * residuals.gradients).astype(residuals.like_hidden.dtype), None, None
    hidden, head_weight, labels, logsumexp = residuals
    accumulator = at_least_f32(hidden.dtype)
    weight = head_weight.astype(hidden.dtype)

    def add_chunk(d_weight, chunk):
        hidden, labels, logsumexp, d_log_probs = chunk
        logits = logits_of_chunk(weight, hidden, labels).logits
        d_logits = (-d_log_probs[:, None] * error_of_logits(logits, logsumexp, labels)).astype(hidden.dtype)
        d_weight += jnp.einsum("tv,td->vd", d_logits, hidden, preferred_element_type=accumulator)
        return d_weight, jnp.einsum("tv,vd->td", d_logits, weight, preferred_element_type=accumulator).astype(hidden.dtype)

    start = vary_as(jnp.zeros(head_weight.shape, accumulator), hidden)
    d_weight, d_hidden = jax.lax.scan(add_chunk, start, token_chunks(chunk_tokens, hidden, labels, logsumexp, d_log_probs))
    return joined_chunks(d_hidden, len(hidden)), d_weight.astype(head_weight.dtype), None


_log_probs.defvjp(_with_residuals, _backward, symbolic_zeros=True)
