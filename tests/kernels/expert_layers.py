"""Layers of experts under routings that are hard for a kernel, and what is compared of them."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle

ARRAYS = ("y", "x", "w_gate_up", "w_down", "weights")
"""What `with_gradients` gives: the result, and the gradients."""


def choose(rng, routing, tokens, experts, k):
    if routing == "random":
        return np.argsort(rng.random((tokens, experts)), axis=1)[:, :k]
    if routing == "one_takes_all":
        return np.full((tokens, k), experts - 1)
    if routing == "half_empty":
        return rng.integers(0, max(experts // 2, 1), (tokens, k))
    return rng.integers(-1, experts + 1, (tokens, k)) if routing == "some_nobody" else np.full((tokens, k), experts)


def make_layer(rng, routing, tokens, experts, k, hidden, inter, dtype=jnp.bfloat16):
    x, w_gate_up, w_down = (
        jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, dtype)
        for shape in ((tokens, hidden), (experts, 2 * inter, hidden), (experts, hidden, inter))
    )
    weights = jnp.asarray(rng.random((tokens, k)), jnp.float32)
    return x, w_gate_up, w_down, weights, jnp.asarray(choose(rng, routing, tokens, experts, k), jnp.int32)


def with_gradients(f, layer, dy):
    *arrays, chosen = layer
    y, pullback = jax.vjp(lambda *a: f(*a, chosen), *arrays)
    return y, *pullback(dy.astype(y.dtype))


def exact_with_gradients(layer, dy):
    """By the definition, in f64."""
    *arrays, chosen = layer
    with jax.enable_x64(True):
        return with_gradients(oracle.experts_mlp, (*(a.astype(jnp.float64) for a in arrays), chosen), dy)


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-300)
