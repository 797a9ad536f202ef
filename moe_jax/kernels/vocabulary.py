"""Logits over the vocabulary, a chunk of tokens at a time: shared by cross_entropy and token_log_probs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.precision import at_least_f32
from moe_jax.kernels.varying import refuse_explicit_axes

CHUNK_TOKENS = 2048
"""The most tokens whose logits exist at a time: 1.2 GB in f32 for a vocabulary of 152k."""


def check_vocabulary_arguments(hidden: Array, head_weight: Array, chunk_tokens: int, **of_tokens: Array) -> None:
    """Checks hidden [tokens, D], head_weight [vocab, D] and the arrays [tokens] beside them.

    Raises:
        ValueError: shapes that do not fit, chunk_tokens < 1, or arrays split over mesh axes of type Explicit.
    """
    tokens = hidden.shape[:1]
    if hidden.ndim != 2 or head_weight.ndim != 2 or hidden.shape[1] != head_weight.shape[1]:
        raise ValueError(f"hidden must be [tokens, D] and head_weight [vocab, D]; got {hidden.shape} and {head_weight.shape}")
    if any(array.shape != tokens for array in of_tokens.values()):
        found = " and ".join(str(array.shape) for array in of_tokens.values())
        raise ValueError(f"{' and '.join(of_tokens)} must have shape {tokens}; got {found}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1; got {chunk_tokens}")
    refuse_explicit_axes(hidden=hidden, head_weight=head_weight, **of_tokens)


class ChunkLogits(NamedTuple):
    """The logits of a chunk of tokens, in at least f32."""

    label_logit: Float[Array, "tokens"]
    """NaN for a label outside [0, vocab)."""
    logits: Float[Array, "tokens vocab"]
    logsumexp: Float[Array, "tokens"]


def logits_of_chunk(
    weight: Float[Array, "vocab hidden"], hidden: Float[Array, "tokens hidden"], labels: Int[Array, "tokens"]
) -> ChunkLogits:
    """Returns hidden weight^T of a chunk of tokens."""
    logits = jnp.einsum("td,vd->tv", hidden, weight, preferred_element_type=at_least_f32(hidden.dtype))
    logsumexp = jax.nn.logsumexp(logits, axis=1)
    # A negative index would count from the end; an index outside the axis gives NaN.
    labels = jnp.where(labels < 0, logits.shape[1], labels)
    return ChunkLogits(jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0], logits, logsumexp)


def error_of_logits(
    logits: Float[Array, "tokens vocab"], logsumexp: Float[Array, "tokens"], labels: Int[Array, "tokens"]
) -> Float[Array, "tokens vocab"]:
    """Returns softmax(logits) - onehot(label): the gradient of -log p[label] in the logits."""
    return jnp.exp(logits - logsumexp[:, None]) - (labels[:, None] == jnp.arange(logits.shape[1]))


def token_chunks(chunk_tokens, *arrays):
    """Returns the arrays as [chunks, tokens of a chunk, ...], in equal chunks padded with 0, or False in a mask.

    Chunk i of n has the tokens i, i + n, ...: where XLA splits tokens over devices, each chunk is split alike.
    """
    tokens = arrays[0].shape[0]
    number = max(1, -(-tokens // chunk_tokens))
    size = -(-tokens // number)

    def strided(array):
        padded = jnp.pad(array, [(0, number * size - tokens), *[(0, 0)] * (array.ndim - 1)])
        return padded.reshape(size, number, *array.shape[1:]).swapaxes(0, 1)

    return tuple(strided(array) for array in arrays)


def joined_chunks(chunks: Array, tokens: int) -> Array:
    """Inverts `token_chunks` for one array: [chunks, tokens of a chunk, ...] -> [tokens, ...]."""
    return chunks.swapaxes(0, 1).reshape(-1, *chunks.shape[2:])[:tokens]
