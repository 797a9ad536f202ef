"""Losses over the vocabulary, chunked over tokens: the [tokens, vocab] logits never exist.

    l[t, v] = h[t] . w[v] - logsumexp_u(h[t] . w[u])
    log_probs[t] = l[t, label[t]],  entropies[t] = -sum_v exp(l[t, v]) l[t, v],  cross_entropy = -sum_t mask[t] log_probs[t]

With T tokens, V words and D channels, the results without gradients cost 2*T*V*D FLOPs. Gradients have one of two forms:

    made with the logits      `cross_entropy`, and `token_log_probs` of a frozen head. The cotangent is a factor of the sum, or
                              of each token's own gradient dy[t]/dh[t]. The forward pass computes gradients for a factor of 1,
                              and the backward pass scales them: 6*T*V*D for both, 4*T*V*D if the weights are frozen. Liger
                              Kernel has the same idea (Hsu et al., 2024, https://arxiv.org/abs/2410.10989). Residuals: the
                              gradients.
    made from logits again    The cotangent differs from token to token: 2*T*V*D forward, and 6*T*V*D backward, or 4*T*V*D if
                              the weights are frozen. Residuals: h, and the logsumexp and entropy of each token.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.kernels.precision import at_least_f32
from moe_jax.kernels.shapes import refuse_explicit_axes, vary_alike, vary_as

CHUNK_TOKENS = 2048
"""Maximum tokens whose logits exist at a time: 1.2 GB in f32 for a vocabulary of 152k."""


class TokenScores(NamedTuple):
    """Per-token results, in f32 (f64 for f64)."""

    log_probs: Float[Array, "*tokens"]
    """The label's log-probability."""
    entropies: Float[Array, "*tokens"]
    """The entropy of the distribution over the vocabulary, in nats."""


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
    sum of weights. Weights must not be negative, and are constants for derivatives.

    Differentiable in hidden and head_weight. Nothing is computed for the gradient of a head_weight that is not differentiated.
    Matmuls use operands in hidden's dtype and accumulate in f32. head_weight's gradient is accumulated in f32 over all tokens
    and returned in head_weight's dtype. Labels of tokens outside the mask may be anything; a token in the mask with a label
    outside [0, vocab) makes the loss NaN.

    Args:
        chunk_tokens: maximum tokens whose logits exist at a time. With gradients a chunk needs 6 bytes per logit, plus the
            4*V*D bytes of head_weight's gradient, which each chunk reads and writes. Larger chunks cost memory, smaller ones
            bandwidth.

    Raises:
        ValueError: shapes that do not match, chunk_tokens < 1, or arrays split over mesh axes of type Explicit.
    """
    _check(hidden, head_weight, chunk_tokens, labels=labels, mask=mask)
    is_weight = jnp.issubdtype(mask.dtype, jnp.floating)
    mask = jax.lax.stop_gradient(mask.astype(at_least_f32(hidden.dtype))) if is_weight else mask.astype(bool)
    total = _loss_sum(chunk_tokens, *vary_alike((hidden, head_weight, labels, mask)))
    return total, mask.sum().astype(total.dtype)


def token_log_probs(
    hidden: Float[Array, "tokens hidden"],
    head_weight: Float[Array, "vocab hidden"],
    labels: Int[Array, "tokens"],
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Float[Array, "tokens"]:
    """Returns log softmax(hidden head_weight^T)[t, labels[t]] in f32 (f64 for f64).

    For your own losses: preferences (DPO), policy gradients (GRPO), distillation. Differentiable once, in hidden and
    head_weight. Matmuls use operands in hidden's dtype and accumulate in f32, and head_weight's gradient accumulates in f32
    over all tokens. A label outside [0, vocab) yields NaN for its own token; if `jnp.where` masks that token out, all gradients
    are finite.

    Args:
        chunk_tokens: maximum tokens whose logits exist at a time, at 4 bytes per logit, and 6 in the backward pass.

    Raises:
        ValueError: shapes that do not match, chunk_tokens < 1, or arrays split over mesh axes of type Explicit.
    """
    _check(hidden, head_weight, chunk_tokens, labels=labels)
    return _scores(chunk_tokens, False, *vary_alike((hidden, head_weight, labels)))[0]


def token_log_probs_and_entropies(
    hidden: Float[Array, "tokens hidden"],
    head_weight: Float[Array, "vocab hidden"],
    labels: Int[Array, "tokens"],
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenScores:
    """Returns `token_log_probs` and the entropies of log softmax(hidden head_weight^T), both differentiable once.

    For policy gradients with a bonus on entropy, and to watch how sure a model becomes. Dtypes, labels outside the vocabulary,
    arguments and errors are as in `token_log_probs`.
    """
    _check(hidden, head_weight, chunk_tokens, labels=labels)
    return TokenScores(*_scores(chunk_tokens, True, *vary_alike((hidden, head_weight, labels))))


def _check(hidden: Array, head_weight: Array, chunk_tokens: int, **of_tokens: Array) -> None:
    tokens = hidden.shape[:1]
    if hidden.ndim != 2 or head_weight.ndim != 2 or hidden.shape[1] != head_weight.shape[1]:
        raise ValueError(f"hidden must be [tokens, D] and head_weight [vocab, D]; got {hidden.shape} and {head_weight.shape}")
    if any(array.shape != tokens for array in of_tokens.values()):
        found = " and ".join(str(array.shape) for array in of_tokens.values())
        raise ValueError(f"{' and '.join(of_tokens)} must have shape {tokens}; got {found}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1; got {chunk_tokens}")
    refuse_explicit_axes(hidden=hidden, head_weight=head_weight, **of_tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(chunk_tokens, hidden, head_weight, labels, mask):
    weight = head_weight.astype(hidden.dtype)

    def add_chunk(total, chunk):
        *chunk, mask = chunk
        label_logit, _, logsumexp = _logits(weight, *chunk)
        return total + _weighted(logsumexp - label_logit, mask).sum(), None

    start = vary_as(jnp.zeros((), at_least_f32(hidden.dtype)), hidden)
    return jax.lax.scan(add_chunk, start, _chunks(chunk_tokens, hidden, labels, mask))[0]


def _loss_forward(chunk_tokens, *arguments):
    """Returns the loss and its gradients in hidden and head_weight for a cotangent of 1, in the accumulator's dtype.

    Arguments are `jax.custom_derivatives.CustomVJPPrimal`s, which record whether they are differentiated.
    """
    hidden, head_weight, labels, mask = (argument.value for argument in arguments)
    accumulator = at_least_f32(hidden.dtype)
    weight = head_weight.astype(hidden.dtype)

    def add_chunk(state, chunk):
        total, d_weight = state
        hidden, labels, mask = chunk
        label_logit, logits, logsumexp = _logits(weight, hidden, labels)
        loss = _weighted(logsumexp - label_logit, mask).sum()
        d_logits = _weighted(_error(logits, logsumexp, labels), mask[:, None]).astype(hidden.dtype)
        d_weight = _add_weight_gradient(d_weight, d_logits, hidden)
        return (total + loss, d_weight), _hidden_gradient(d_logits, weight)

    no_gradient = jnp.zeros(head_weight.shape, accumulator) if arguments[1].perturbed else None
    start = vary_as((jnp.zeros((), accumulator), no_gradient), hidden)
    (total, d_weight), d_hidden = jax.lax.scan(add_chunk, start, _chunks(chunk_tokens, hidden, labels, mask))
    # The empty arrays tell the backward pass the dtypes.
    return total, ((_joined(d_hidden, len(hidden)), jnp.zeros(0, hidden.dtype)), (d_weight, jnp.zeros(0, head_weight.dtype)))


def _loss_backward(chunk_tokens, residuals, d_loss):
    return *(None if d is None else (d * d_loss).astype(like.dtype) for d, like in residuals), None, None


_loss_sum.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scores(chunk_tokens, has_entropies, hidden, head_weight, labels):
    """Returns the log-probabilities, and the entropies or None."""
    return _scores_of_chunks(chunk_tokens, has_entropies, False, hidden, head_weight, labels)[:2]


def _scores_forward(chunk_tokens, has_entropies, *arguments):
    hidden, head_weight, labels = (argument.value for argument in arguments)
    is_frozen = not arguments[1].perturbed
    keeps_gradients = is_frozen and not has_entropies
    found = _scores_of_chunks(chunk_tokens, has_entropies, keeps_gradients, hidden, head_weight, labels)
    log_probs, entropies, logsumexp, gradients = found
    if keeps_gradients:
        return (log_probs, None), (gradients, jnp.zeros(0, hidden.dtype))
    of_tokens = (hidden, labels, logsumexp, *([entropies] if has_entropies else []))
    # () or None: only a tree structure, without an array.
    return (log_probs, entropies), (of_tokens, head_weight, () if is_frozen else None)


def _scores_of_chunks(chunk_tokens, has_entropies, keeps_gradients, hidden, head_weight, labels):
    """Returns log-probabilities, entropies, logsumexp, and the gradients dy[t]/dh[t]: None for those not requested."""
    weight = head_weight.astype(hidden.dtype)

    def of_chunk(_, chunk):
        label_logit, logits, logsumexp = _logits(weight, *chunk)
        entropies = gradients = None
        if has_entropies:
            log_probs = logits - logsumexp[:, None]
            # All terms have one sign. logsumexp minus the mean logit would cancel if the model is confident.
            entropies = -(jnp.exp(log_probs) * log_probs).sum(axis=1)
        if keeps_gradients:
            gradients = _hidden_gradient(-_error(logits, logsumexp, chunk[1]).astype(hidden.dtype), weight)
        return None, (label_logit - logsumexp, entropies, None if keeps_gradients else logsumexp, gradients)

    chunks = jax.lax.scan(of_chunk, None, _chunks(chunk_tokens, hidden, labels))[1]
    return jax.tree.map(lambda chunk: _joined(chunk, len(hidden)), chunks)


def _scores_backward(chunk_tokens, has_entropies, residuals, d_scores):
    if len(residuals) == 2:
        gradients, like_hidden = residuals
        return (d_scores[0][:, None] * gradients).astype(like_hidden.dtype), None, None
    of_tokens, head_weight, is_frozen = residuals
    hidden = of_tokens[0]
    d_scores = [
        jnp.zeros_like(of_tokens[2]) if isinstance(d, jax.custom_derivatives.SymbolicZero) else d
        for d in d_scores[: 1 + has_entropies]
    ]
    weight = head_weight.astype(hidden.dtype)

    def add_chunk(d_weight, chunk):
        (hidden, labels, logsumexp, *entropies), (d_log_probs, *d_entropies) = chunk
        logits = _logits(weight, hidden, labels)[1]
        d_logits = -d_log_probs[:, None] * _error(logits, logsumexp, labels)
        if has_entropies:
            log_probs = logits - logsumexp[:, None]
            d_logits -= d_entropies[0][:, None] * jnp.exp(log_probs) * (log_probs + entropies[0][:, None])
        d_logits = d_logits.astype(hidden.dtype)
        return _add_weight_gradient(d_weight, d_logits, hidden), _hidden_gradient(d_logits, weight).astype(hidden.dtype)

    start = None if is_frozen is not None else vary_as(jnp.zeros(head_weight.shape, at_least_f32(hidden.dtype)), hidden)
    chunks = _chunks(chunk_tokens, *of_tokens), _chunks(chunk_tokens, *d_scores)
    d_weight, d_hidden = jax.lax.scan(add_chunk, start, chunks)
    return _joined(d_hidden, len(hidden)), None if d_weight is None else d_weight.astype(head_weight.dtype), None


_scores.defvjp(_scores_forward, _scores_backward, symbolic_zeros=True)


def _logits(weight, hidden, labels):
    """Returns the label's logit (NaN for a label outside [0, vocab)), hidden weight^T and its logsumexp, in at least f32."""
    logits = jnp.einsum("td,vd->tv", hidden, weight, preferred_element_type=at_least_f32(hidden.dtype))
    logsumexp = jax.nn.logsumexp(logits, axis=1)
    # A negative index would count from the end; an index outside the axis gives NaN.
    labels = jnp.where(labels < 0, logits.shape[1], labels)
    return jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0], logits, logsumexp


def _error(logits, logsumexp, labels):
    """Returns softmax(logits) - onehot(label): the gradient of -log p[label] in the logits."""
    return jnp.exp(logits - logsumexp[:, None]) - (labels[:, None] == jnp.arange(logits.shape[1]))


def _add_weight_gradient(d_weight, d_logits, hidden):
    """Returns d_weight plus a chunk's part; None if d_weight is None, for a frozen weight."""
    if d_weight is None:
        return None
    return d_weight + jnp.einsum("tv,td->vd", d_logits, hidden, preferred_element_type=d_weight.dtype)


def _hidden_gradient(d_logits, weight):
    return jnp.einsum("tv,vd->td", d_logits, weight, preferred_element_type=at_least_f32(weight.dtype))


def _weighted(values, mask):
    """Returns the values times their weights; 0 outside the mask, where values may be NaN."""
    return jnp.where(mask, values, 0) if mask.dtype == bool else jnp.where(mask != 0, mask * values, 0)


def _chunks(chunk_tokens, *arrays):
    """Returns the arrays as [chunks, tokens of a chunk, ...], in equal chunks padded with 0, or False in a mask.

    Chunk i of n has the tokens i, i + n, ...: if XLA splits tokens over devices, each chunk is split evenly.
    """
    tokens = arrays[0].shape[0]
    number = max(1, -(-tokens // chunk_tokens))
    size = -(-tokens // number)

    def strided(array):
        padded = jnp.pad(array, [(0, number * size - tokens), *[(0, 0)] * (array.ndim - 1)])
        return padded.reshape(size, number, *array.shape[1:]).swapaxes(0, 1)

    return tuple(strided(array) for array in arrays)


def _joined(chunks: Array, tokens: int) -> Array:
    """Inverts `_chunks` for one array: [chunks, tokens of a chunk, ...] -> [tokens, ...]."""
    return chunks.swapaxes(0, 1).reshape(-1, *chunks.shape[2:])[:tokens]
