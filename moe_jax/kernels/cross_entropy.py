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
from moe_jax.kernels.varying import refuse_explicit_axes, vary_alike, vary_as

CHUNK_TOKENS = 2048


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
    tokens = hidden.shape[:1]
    if hidden.ndim != 2 or head_weight.ndim != 2 or hidden.shape[1] != head_weight.shape[1]:
        raise ValueError(f"hidden must be [tokens, D] and head_weight [vocab, D]; got {hidden.shape} and {head_weight.shape}")
    if labels.shape != tokens or mask.shape != tokens:
        raise ValueError(f"labels and mask must have shape {tokens}; got {labels.shape} and {mask.shape}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1; got {chunk_tokens}")
    refuse_explicit_axes(hidden=hidden, head_weight=head_weight, labels=labels, mask=mask)
    mask = mask.astype(bool)
    total = _loss_sum(chunk_tokens, *vary_alike((hidden, head_weight, labels, mask)))
    return total, mask.sum().astype(total.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(chunk_tokens, hidden, head_weight, labels, mask):
    weight = head_weight.astype(hidden.dtype)

    def add_chunk(total, chunk):
        return total + _loss_of_chunk(weight, *chunk)[0], None

    start = vary_as(jnp.zeros((), at_least_f32(hidden.dtype)), hidden)
    return jax.lax.scan(add_chunk, start, _chunks(chunk_tokens, hidden, labels, mask))[0]


def _forward(chunk_tokens, hidden, head_weight, labels, mask):
    """The loss and, in the accumulator's dtype, its gradients."""
    accumulator = at_least_f32(hidden.dtype)
    weight = head_weight.astype(hidden.dtype)

    def add_chunk(state, chunk):
        total, d_weight = state
        hidden, labels, mask = chunk
        loss, logits, logsumexp = _loss_of_chunk(weight, *chunk)
        is_label = labels[:, None] == jnp.arange(logits.shape[1])
        d_logits = jnp.where(mask[:, None], jnp.exp(logits - logsumexp[:, None]) - is_label, 0).astype(hidden.dtype)
        d_weight += jnp.einsum("tv,td->vd", d_logits, hidden, preferred_element_type=accumulator)
        return (total + loss, d_weight), jnp.einsum("tv,vd->td", d_logits, weight, preferred_element_type=accumulator)

    start = vary_as((jnp.zeros((), accumulator), jnp.zeros(head_weight.shape, accumulator)), hidden)
    (total, d_weight), d_hidden = jax.lax.scan(add_chunk, start, _chunks(chunk_tokens, hidden, labels, mask))
    d_hidden = d_hidden.swapaxes(0, 1).reshape(-1, hidden.shape[1])[: hidden.shape[0]]
    # Empty arrays tell the backward pass the dtypes.
    return total, (d_hidden, d_weight, jnp.zeros(0, hidden.dtype), jnp.zeros(0, head_weight.dtype))


def _backward(chunk_tokens, kept, d_loss):
    d_hidden, d_weight, like_hidden, like_weight = kept
    return (d_hidden * d_loss).astype(like_hidden.dtype), (d_weight * d_loss).astype(like_weight.dtype), None, None


_loss_sum.defvjp(_forward, _backward)


def _loss_of_chunk(weight, hidden, labels, mask):
    """(the summed loss, logits, their logsumexp)"""
    logits = jnp.einsum("td,vd->tv", hidden, weight, preferred_element_type=at_least_f32(hidden.dtype))
    logsumexp = jax.nn.logsumexp(logits, axis=1)
    # Negative indices would count from the end; what lies outside is filled with NaN.
    labels = jnp.where(labels < 0, logits.shape[1], labels)
    label_logit = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.where(mask, logsumexp - label_logit, 0).sum(), logits, logsumexp


def _chunks(chunk_tokens, *arrays):
    """The arrays as [chunks, tokens of a chunk, ...], of equal chunks; what fills the last is masked out, as False is 0.

    Chunk i has the tokens i, i + n, ...: where XLA splits tokens over devices, each chunk is split as they are.
    """
    tokens = arrays[0].shape[0]
    number = max(1, -(-tokens // chunk_tokens))
    size = -(-tokens // number)

    def strided(array):
        padded = jnp.pad(array, [(0, number * size - tokens), *[(0, 0)] * (array.ndim - 1)])
        return padded.reshape(size, number, *array.shape[1:]).swapaxes(0, 1)

    return tuple(strided(array) for array in arrays)
