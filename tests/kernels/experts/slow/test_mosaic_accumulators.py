"""Hopper kernels that add gradients of weights to accumulators, in stacks of layers, by micro-batch or later."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.expert_gradients import accumulating
from tests.helpers.expert_layers import (
    SMALL,
    exact_with_gradients,
    gradients_by_accumulators,
    gradients_by_tickets,
    gradients_in_a_stack,
    make_layer,
    relative_error,
)


@pytest.mark.thorough
def test_accumulators_of_micro_batches(rng):
    """Accumulators grow by the gradients of every chunk."""
    layer = make_layer(rng, "half_empty", 2 * SMALL[0] - 4, *SMALL[1:])
    dy = jnp.asarray(rng.normal(size=layer[0].shape), jnp.bfloat16)
    totals = tuple(jnp.asarray(rng.normal(size=w.shape), jnp.float32) for w in layer[1:3])

    def with_totals(x, weights):
        def f(x, weights, totals):
            how = {"backend": "mosaic", "chunk_tokens": SMALL[0]}
            return accumulating(x, *layer[1:3], weights, layer[4], totals, **how)

        y, pullback = jax.vjp(f, x, weights, totals)
        dx, d_weights, after = pullback(dy)
        return y, dx, *after, d_weights

    y, dx, *after, d_weights = jax.jit(with_totals)(layer[0], layer[3])
    exact = exact_with_gradients(layer, dy)
    for actual, expected in zip((y, dx, d_weights), (exact[0], exact[1], exact[4]), strict=True):
        assert relative_error(actual, expected) < 1e-2
    for total, before, expected in zip(after, totals, exact[2:4], strict=True):
        assert relative_error(np.asarray(total, np.float64) - before, expected) < 1e-2
        np.testing.assert_array_equal(total[2:], before[2:])


# test_layer_of_a_stack.py shows in the compiled program that a layer is read and added to in place.
@pytest.mark.thorough
def test_layer_of_a_stack(rng):
    """Kernels read a layer's weights inside a stack and add to its sums there: the same bits, and other layers' sums stay."""
    layer = make_layer(rng, "half_empty", *SMALL)
    dy = jnp.asarray(rng.normal(size=layer[0].shape), jnp.bfloat16)
    expected = jax.jit(gradients_by_accumulators, static_argnums=0)("mosaic", layer, dy)
    found, of_others = jax.jit(gradients_in_a_stack, static_argnums=0)("mosaic", layer, dy)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for before, after in of_others:
        assert (before == -1).all() and (after == 1).all()


@pytest.mark.thorough
def test_weight_gradients_multiplied_later(rng):
    """They have the bits of gradients added to accumulators, and so have y and the other gradients."""
    layer = make_layer(rng, "some_nobody", *SMALL)
    dy = jnp.asarray(rng.normal(size=layer[0].shape), jnp.bfloat16)
    found, expected = (
        jax.jit(f, static_argnums=0)("mosaic", layer, dy) for f in (gradients_by_tickets, gradients_by_accumulators)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
