"""Experts with frozen matrices: alone, and with low-rank changes in Hopper kernels. `test_call` has changes in every form."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax import kernels
from moe_jax.kernels.low_rank import LowRank
from tests.helpers import seeds
from tests.helpers.expert_layers import Adapter, Form, adapted, compute, make_layer, types_of
from tests.helpers.lowered import H200, launches_on_h200, traced_for_h200

TOKENS, EXPERTS, K, HIDDEN, INTER = 24, 4, 2, 16, 12


def test_mosaic():
    """The Hopper kernels, in the interpreter, with padding rows and ranks that are filled up."""
    rng, (hidden, inter) = seeds.rng(), (128, 64)
    x, *matrices, weights, chosen = make_layer(rng, "some_nobody", 40, 2, 2, hidden, inter)
    shapes = [(2, 3, hidden), (2, 2 * inter, 3), (2, 3, inter), (2, hidden, 3)]
    a1, b1, a2, b2 = (jnp.asarray(rng.normal(size=shape) * 0.1, jnp.float32) for shape in shapes)
    dy = jnp.asarray(rng.normal(size=x.shape), x.dtype)

    def leaves(backend, dtype):
        def f(x, weights, adapter):
            of_dtype = [matrix.astype(dtype) for matrix in matrices]
            return adapted(x, *of_dtype, weights, chosen, adapter, backend=backend)

        @jax.jit
        def with_gradients(dy, *arguments):
            y, pullback = jax.vjp(f, *arguments)
            return jax.tree.leaves((y, pullback(dy)))

        return with_gradients(dy.astype(dtype), x.astype(dtype), weights, Adapter(LowRank(a1, b1), LowRank(a2, b2)))

    for found, expected in zip(leaves("mosaic", jnp.bfloat16), leaves("xla", jnp.float32), strict=True):
        difference = np.linalg.norm(np.asarray(found, np.float32) - expected)
        assert difference < 0.02 * np.linalg.norm(expected)


def frozen(x, w_gate_up, w_down, weights, chosen, **options):
    """The experts with matrices that are not trained."""
    return compute(x, w_gate_up, w_down, weights, chosen, Form(frozen=True), **options)


def test_frozen():
    """The same bits as trained matrices, whose gradient is zero."""
    layer = make_layer(seeds.rng(), "random", TOKENS, EXPERTS, K, HIDDEN, INTER, jnp.float32)
    x, *matrices, weights, chosen = layer

    @partial(jax.jit, static_argnums=0)
    def gradients(f, chosen, dy, *arrays):
        return jax.vjp(lambda *a: f(*a, chosen, chunk_tokens=10), *arrays)[1](dy)

    arguments = chosen, x, x, *matrices, weights
    dx, *of_matrices, dweights = gradients(frozen, *arguments)
    expected = gradients(kernels.experts_mlp, *arguments)
    np.testing.assert_array_equal(dx, expected[0])
    np.testing.assert_array_equal(dweights, expected[3])
    assert all(np.any(gradient) for gradient in expected[1:3]) and not any(map(np.any, of_matrices))


def test_kernels_of_frozen_experts():
    """The backward pass launches no kernel for the gradient of a matrix, and gathers x for none."""
    *arrays, chosen = types_of(4096, 8, 2, 1024, 512)

    def count(f):
        def gradient(*arrays_and_chosen):
            *arrays, chosen = arrays_and_chosen
            # The pullback is of all arrays: JAX itself would see that nobody asks for the matrices' gradients.
            y, pullback = jax.vjp(lambda *arrays: f(*arrays, chosen, backend="mosaic"), *arrays)
            return y, pullback(y)

        return len(launches_on_h200(gradient, *arrays, chosen))

    assert (count(kernels.experts_mlp), count(frozen)) == (9, 6)


def test_kernels_of_adapted_experts():
    """Thin products are padded to what a kernel takes; none multiplies out the gradient of a matrix."""
    *arrays, chosen = types_of(4096, 8, 2, 1024, 512)
    factors = [(8, 4, 1024), (8, 1024, 4), (8, 4, 512), (8, 1024, 4)]
    a1, b1, a2, b2 = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in factors)

    def gradient(x, w_gate_up, w_down, weights, adapter, chosen):
        def f(x, weights, adapter):
            return adapted(x, w_gate_up, w_down, weights, chosen, adapter, backend="mosaic")

        y, pullback = jax.vjp(f, x, weights, adapter)
        return y, pullback(y)

    arguments = *arrays, Adapter(LowRank(a1, b1), LowRank(a2, b2)), chosen
    text = str(traced_for_h200(gradient, *arguments))
    assert "bf16[8,1024,1024]" in text and "f32[8,1024,1024]" not in text.replace("bf16", "")
    assert "bf16[8,1024,512]" in text and "f32[8,1024,512]" not in text.replace("bf16", "")
    assert len(launches_on_h200(gradient, *arguments)) == 15

    def residuals(x, w_gate_up, w_down, weights, adapter, chosen):
        return jax.vjp(lambda *a: adapted(a[0], w_gate_up, w_down, a[1], chosen, a[2], backend="mosaic"), x, weights, adapter)[
            1
        ]

    with jax.sharding.use_abstract_mesh(H200):
        kept = {
            a.shape for a in jax.tree.leaves(jax.eval_shape(residuals, *arguments)) if a.dtype == jnp.float32 and a.ndim == 3
        }
    assert kept <= set(factors), "factors with padded ranks are made again in the backward pass"
