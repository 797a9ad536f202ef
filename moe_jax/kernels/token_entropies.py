"""The log-probability of each token's label beside the entropy of the token's distribution, chunked over tokens.

    l[v] = h . w[v] - logsumexp_u(h . w[u]),  y = l[label],  entropy = -sum_v exp(l[v]) l[v]

For policy gradients with a bonus on entropy, and to watch how sure a model becomes. The [tokens, vocab] logits never exist.
Residuals: h, and two numbers a token. FLOPs: 2*T*V*D forward, 6*T*V*D backward, 4*T*V*D if the weights are frozen.
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


class TokenScores(NamedTuple):
    """Two numbers of each token, in f32 (f64 for f64)."""

    log_probs: Float[Array, "*tokens"]
    """The label's log-probability."""
    entropies: Float[Array, "*tokens"]
    """The entropy of the distribution over the vocabulary, in nats."""


def token_log_probs_and_entropies(
    hidden: Float[Array, "tokens hidden"],
    head_weight: Float[Array, "vocab hidden"],
    labels: Int[Array, "tokens"],
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenScores:
    """Returns `token_log_probs` and the entropies of log softmax(hidden head_weight^T), both differentiable once.

    Dtypes, labels outside the vocabulary, arguments and errors are as in `token_log_probs`.
    """
    check_vocabulary_arguments(hidden, head_weight, chunk_tokens, labels=labels)
    return _scores(chunk_tokens, *vary_alike((hidden, head_weight, labels)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(chunk_tokens, hidden, head_weight, labels):
    return _forward(chunk_tokens, hidden, head_weight, labels)[0]


class _Residuals(NamedTuple):
    hidden: Array
    head_weight: Array
    labels: Array
    logsumexp: Array
    entropies: Array
    is_frozen: tuple[()] | None
    """() if head_weight is not differentiated, else None: a structure, and no array."""


def _with_residuals(chunk_tokens, *arguments):
    """Arguments are `jax.custom_derivatives.CustomVJPPrimal`s, which say whether they are differentiated."""
    hidden, head_weight, labels = (argument.value for argument in arguments)
    scores, logsumexp = _forward(chunk_tokens, hidden, head_weight, labels)
    is_frozen = None if arguments[1].perturbed else ()
    return scores, _Residuals(hidden, head_weight, labels, logsumexp, scores.entropies, is_frozen)


def _forward(chunk_tokens, hidden, head_weight, labels):
    weight = head_weight.astype(hidden.dtype)

    def of_chunk(_, chunk):
        label_logit, logits, logsumexp = logits_of_chunk(weight, *chunk)
        log_probs = logits - logsumexp[:, None]
        # All terms have one sign. logsumexp minus the mean logit would cancel where the model is sure.
        entropies = -(jnp.exp(log_probs) * log_probs).sum(axis=1)
        return None, (label_logit - logsumexp, entropies, logsumexp)

    chunks = jax.lax.scan(of_chunk, None, token_chunks(chunk_tokens, hidden, labels))[1]
    log_probs, entropies, logsumexp = (joined_chunks(chunk, len(hidden)) for chunk in chunks)
    return TokenScores(log_probs, entropies), logsumexp


def _backward(chunk_tokens, residuals: _Residuals, d_scores):
    hidden, head_weight, labels, logsumexp, entropies, is_frozen = residuals
    d_log_probs, d_entropies = (
        jnp.zeros_like(of) if isinstance(d, jax.custom_derivatives.SymbolicZero) else d
        for d, of in zip(d_scores, (logsumexp, entropies), strict=True)
    )
    accumulator = at_least_f32(hidden.dtype)
    weight = head_weight.astype(hidden.dtype)

    def add_chunk(d_weight, chunk):
        hidden, labels, logsumexp, entropies, d_log_probs, d_entropies = chunk
        logits = logits_of_chunk(weight, hidden, labels).logits
        log_probs = logits - logsumexp[:, None]
        d_logits = -d_log_probs[:, None] * error_of_logits(logits, logsumexp, labels)
        d_logits -= d_entropies[:, None] * jnp.exp(log_probs) * (log_probs + entropies[:, None])
        d_logits = d_logits.astype(hidden.dtype)
        if d_weight is not None:
            d_weight += jnp.einsum("tv,td->vd", d_logits, hidden, preferred_element_type=accumulator)
        return d_weight, jnp.einsum("tv,vd->td", d_logits, weight, preferred_element_type=accumulator).astype(hidden.dtype)

    start = vary_as(jnp.zeros(head_weight.shape, accumulator), hidden) if is_frozen is None else None
    of_tokens = token_chunks(chunk_tokens, hidden, labels, logsumexp, entropies, d_log_probs, d_entropies)
    d_weight, d_hidden = jax.lax.scan(add_chunk, start, of_tokens)
    d_weight = None if d_weight is None else d_weight.astype(head_weight.dtype)
    return joined_chunks(d_hidden, len(hidden)), d_weight, None


_scores.defvjp(_with_residuals, _backward, symbolic_zeros=True)
