"""The gated activation of an expert (SwiGLU, https://arxiv.org/abs/2002.05202) and its gradient, computed in f32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.kernels.precision import widened


def gated_silu(h: Float[Array, "rows 2*inter"]) -> Float[Array, "rows inter"]:
    """Computes silu(gate) * up for h = [gate | up], in at least f32, and returns it in h's dtype."""
    gate, up = _halves(h)
    return (jax.nn.silu(gate) * up).astype(h.dtype)


def gated_silu_backward(h: Float[Array, "rows 2*inter"], dact: Float[Array, "rows inter"]) -> Float[Array, "rows 2*inter"]:
    """Computes the gradient to h = [gate | up] from the gradient `dact` to silu(gate) * up, in h's dtype.

    With s = sigmoid(gate): dgate = dact * up * s * (1 + gate * (1 - s)) and dup = dact * gate * s.
    """
    gate, up = _halves(h)
    sigmoid = jax.nn.sigmoid(gate)
    dgate = dact * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dact * gate * sigmoid
    return jnp.concatenate([dgate, dup], axis=1).astype(h.dtype)


def _halves(h: Array) -> list[Array]:
    return jnp.split(widened(h), 2, axis=1)
