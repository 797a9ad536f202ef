"""Softmax over keys in parts: each part has its own attention and logsumexp, and parts merge in any order.

    lse = log(exp(lse_a) + exp(lse_b))      out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

(Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867.) A part without keys has logsumexp -inf and attention 0, and
merging it changes nothing. No step forms inf - inf or 0 / 0, in values or gradients.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class PartialAttention(NamedTuple):
    """Attention over a subset of the keys: normalized out, and lse."""

    out: Float[Array, "batch queries heads value_dim"]
    lse: Float[Array, "batch heads queries"]
    """At least f32, natural; -inf where a query sees none of these keys."""


class BackwardInputs(NamedTuple):
    """Operands of both backward passes: q, k, v, dout, lse and delta."""

    q: Float[Array, "batch queries heads head_dim"]
    k: Float[Array, "batch keys kv_heads head_dim"]
    v: Float[Array, "batch keys kv_heads value_dim"]
    dout: Float[Array, "batch queries heads value_dim"]
    lse: Float[Array, "batch heads queries"]
    """f32, over every key of the sequence; -inf where a query sees none."""
    delta: Float[Array, "batch heads queries"]
    """f32: <dout[i], out[i]>, minus the gradient of lse[i], if any."""


def merge(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Combines attention over two disjoint sets of keys, in the wider of their dtypes.

    Commutative, and associative up to rounding.
    """
    largest = jax.lax.stop_gradient(jnp.maximum(a.lse, b.lse))
    # If neither part has a key, any finite number works.
    largest = jnp.where(jnp.isneginf(largest), 0, largest)
    weight_a, weight_b = jnp.exp(a.lse - largest), jnp.exp(b.lse - largest)
    total = weight_a + weight_b
    positive = jnp.where(total > 0, total, 1)
    out = a.out * _of_rows(weight_a / positive) + b.out * _of_rows(weight_b / positive)
    return PartialAttention(out, jnp.where(total > 0, largest + jnp.log(positive), -jnp.inf))


def softmax_sum(scores: Float[Array, "*rows keys"]) -> tuple[Float[Array, "*rows keys"], Float[Array, "*rows"]]:
    """Returns (softmax(scores), logsumexp) over the last axis; a row of only -inf yields zeros and -inf."""
    largest = jax.lax.stop_gradient(scores.max(axis=-1))
    largest = jnp.where(jnp.isneginf(largest), 0, largest)
    weights = jnp.exp(scores - largest[..., None])
    total = weights.sum(axis=-1)
    positive = jnp.where(total > 0, total, 1)
    return weights / positive[..., None], jnp.where(total > 0, largest + jnp.log(positive), -jnp.inf)


def _of_rows(weight: Float[Array, "batch heads queries"]) -> Float[Array, "batch queries heads 1"]:
    return weight.swapaxes(1, 2)[..., None]
