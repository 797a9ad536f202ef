"""Inputs of `experts_mlp` in any dtype, and the comparison of two functions of them, with every gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.kernels.experts.weights import Accumulators
from tests.helpers import seeds
from tests.helpers.expert_layers import Form, compute

ARGUMENTS = ("x", "w_gate_up", "w_down", "topk_weights")


def make_inputs(rng, tokens, experts, k, hidden, inter, routing="random", dtype=jnp.float64):
    x, w_gate_up, w_down = (
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((tokens, hidden), (experts, 2 * inter, hidden), (experts, hidden, inter))
    )
    weights = jnp.asarray(rng.random((tokens, k)), dtype)
    if routing == "random":
        chosen = np.array([rng.permutation(experts)[:k] for _ in range(tokens)], int).reshape(tokens, k)
    elif routing == "one_takes_all":
        chosen = np.full((tokens, k), experts - 1)
    elif routing == "some_nobody":
        chosen = rng.integers(-1, experts + 1, (tokens, k))
    else:  # the upper half of the experts is empty
        chosen = rng.integers(0, max(experts // 2, 1), (tokens, k))
    return x, w_gate_up, w_down, weights, jnp.asarray(chosen, jnp.int32)


def accumulating(x, w_gate_up, w_down, weights, chosen, totals, **options):
    """The experts with a pair of accumulators, or none."""
    form = Form(gradient=None if totals is None else Accumulators(*totals))
    return compute(x, w_gate_up, w_down, weights, chosen, form, **options)


def compare(ours, reference, inputs, tolerance):
    """Values, and gradients of a random projection of them."""
    *arrays, chosen = inputs
    direction = jnp.asarray(seeds.rng().normal(size=arrays[0].shape), arrays[0].dtype)
    assert_near(*(compiled(f, arrays, chosen, direction) for f in (ours, reference)), tolerance)


def with_gradients(f, arrays, chosen, direction):
    def loss(*arguments):
        y = f(*arguments, chosen)
        return (y * direction).sum(), y

    gradients, y = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)
    return y, *gradients


compiled = jax.jit(with_gradients, static_argnums=0)
"""Once for each shape, for any routing."""


def assert_near(actuals, others, tolerance):
    """In the relative Frobenius norm."""
    for name, actual, expected in zip(("y", *ARGUMENTS), actuals, others, strict=True):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
        error = np.linalg.norm(np.asarray(actual, np.float64) - np.asarray(expected, np.float64))
        size = np.linalg.norm(np.asarray(expected, np.float64))
        assert error <= tolerance * size, f"{name}: relative error {error / max(size, 1e-300):.1e}"
