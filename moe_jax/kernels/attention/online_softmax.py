"""Softmax over keys that come in parts: each part gives its own attention and logsumexp, and parts are merged in any order.

    lse = log(exp(lse_a) + exp(lse_b))      out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

(Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867.) Of no keys at all the logsumexp is -inf and the attention 0,
and merging that changes nothing. No step forms inf - inf or 0 / 0, in values or gradients.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def merge(
    out_a: Float[Array, "batch queries heads value_dim"],
    lse_a: Float[Array, "batch heads queries"],
    out_b: Float[Array, "batch queries heads value_dim"],
    lse_b: Float[Array, "batch heads queries"],
) -> tuple[Float[Array, "batch queries heads value_dim"], Float[Array, "batch heads queries"]]:
    """(out, lse) over the keys of both parts, in the wider of their dtypes; commutative and associative up to rounding."""
    largest = jax.lax.stop_gradient(jnp.maximum(lse_a, lse_b))
    # Where neither part has a key any finite number will do.
    largest = jnp.where(jnp.isneginf(largest), 0, largest)
    weight_a, weight_b = jnp.exp(lse_a - largest), jnp.exp(lse_b - largest)
    total = weight_a + weight_b
    positive = jnp.where(total > 0, total, 1)
    out = out_a * _of_rows(weight_a / positive) + out_b * _of_rows(weight_b / positive)
    return out, jnp.where(total > 0, largest + jnp.log(positive), -jnp.inf)


def softmax_sum(
    scores: Float[Array, "*rows keys"],
) -> tuple[Float[Array, "*rows keys"], Float[Array, "*rows"]]:
    """(exp(scores - lse), lse) with lse the logsumexp over keys; a row of -inf alone gives zeros and -inf."""
    largest = jax.lax.stop_gradient(scores.max(axis=-1))
    largest = jnp.where(jnp.isneginf(largest), 0, largest)
    weights = jnp.exp(scores - largest[..., None])
    total = weights.sum(axis=-1)
    positive = jnp.where(total > 0, total, 1)
    return weights / positive[..., None], jnp.where(total > 0, largest + jnp.log(positive), -jnp.inf)


def _of_rows(weight: Float[Array, "batch heads queries"]) -> Float[Array, "batch queries heads 1"]:
    return weight.swapaxes(1, 2)[..., None]
