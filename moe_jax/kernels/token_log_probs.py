"""The log-probability of each token's label, chunked over tokens: the [tokens, vocab] logits never exist.

    y[t] = h[t] . w[label[t]] - logsumexp_v(h[t] . w[v])

For your own losses: preferences (DPO), policy gradients (GRPO), distillation. The cotangent differs from token to token, so the
backward pass computes each chunk's logits again. Residuals: h and the logsumexp of each token. FLOPs: 2*T*V*D forward, 6*T*V*D
backward, 4*T*V*D if the weights are frozen. `cross_entropy`, where tokens share a cotangent, needs 6*T*V*D for both passes.
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
    is_frozen: tuple[()] | None
    """() if head_weight is not differentiated, else None: a structure, and no array."""


def _with_residuals(chunk_tokens, *arguments):
    """Arguments are `jax.custom_derivatives.CustomVJPPrimal`s, which say whether they are differentiated."""
    hidden, head_weight, labels = (argument.value for argument in arguments)
    log_probs, logsumexp = _forward(chunk_tokens, hidden, head_weight, labels)
    is_frozen = None if arguments[1].perturbed else ()
    return log_probs, _Residuals(hidden, head_weight, labels, logsumexp, is_frozen)


def _forward(chunk_tokens, hidden, head_weight, labels):
    weight = head_weight.astype(hidden.dtype)

    def of_chunk(_, chunk):
        label_logit, _, logsumexp = logits_of_chunk(weight, *chunk)
        return None, (label_logit - logsumexp, logsumexp)

    chunks = jax.lax.scan(of_chunk, None, token_chunks(chunk_tokens, hidden, labels))[1]
    log_probs, logsumexp = (joined_chunks(chunk, len(hidden)) for chunk in chunks)
    return log_probs, logsumexp


def _backward(chunk_tokens, residuals: _Residuals, d_log_probs):
    hidden, head_weight, labels, logsumexp, is_frozen = residuals
    accumulator = at_least_f32(hidden.dtype)
    weight = head_weight.astype(hidden.dtype)

    def add_chunk(d_weight, chunk):
        hidden, labels, logsumexp, d_log_probs = chunk
        logits = logits_of_chunk(weight, hidden, labels).logits
        d_logits = (-d_log_probs[:, None] * error_of_logits(logits, logsumexp, labels)).astype(hidden.dtype)
        if d_weight is not None:
            d_weight += jnp.einsum("tv,td->vd", d_logits, hidden, preferred_element_type=accumulator)
        return d_weight, jnp.einsum("tv,vd->td", d_logits, weight, preferred_element_type=accumulator).astype(hidden.dtype)

    start = vary_as(jnp.zeros(head_weight.shape, accumulator), hidden) if is_frozen is None else None
    d_weight, d_hidden = jax.lax.scan(add_chunk, start, token_chunks(chunk_tokens, hidden, labels, logsumexp, d_log_probs))
    d_weight = None if d_weight is None else d_weight.astype(head_weight.dtype)
    return joined_chunks(d_hidden, len(hidden)), d_weight, None


_log_probs.defvjp(_with_residuals, _backward, symbolic_zeros=True)
