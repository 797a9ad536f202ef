"""Experts with frozen matrices: alone, and with low-rank changes that equal changed matrices, with every gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import kernels
from moe_jax.kernels.low_rank import LowRank
from tests.helpers import seeds
from tests.helpers.expert_layers import Adapter, Form, adapted, compute, make_layer, types_of
from tests.helpers.lowered import H200, launches_on_h200, traced_for_h200

TOKENS, EXPERTS, K, HIDDEN, INTER = 24, 4, 2, 16, 12


def make_adapter(rng, ranks=(3, 2), shared_outer=False, dtype=jnp.float64):
    def factor(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    outer, (r1, r2) = 1 if shared_outer else EXPERTS, ranks
    return Adapter(
        LowRank(factor(outer, r1, HIDDEN), factor(EXPERTS, 2 * INTER, r1)),
        LowRank(factor(EXPERTS, r2, INTER), factor(outer, HIDDEN, r2)),
    )


def changed(w_gate_up, w_down, adapter):
    """The matrices with the changes added."""
    return tuple(w + jnp.matmul(*reversed(factors)) for w, factors in zip((w_gate_up, w_down), adapter, strict=True))


@pytest.mark.parametrize(
    "routing, shared_outer, chunk", [pytest.param("random", False, None, marks=pytest.mark.thorough), ("some_nobody", True, 10)]
)
def test_changed_matrices(routing, shared_outer, chunk):
    """The result, and the gradients of x, of the weights of choices, and of every factor."""
    rng = seeds.rng()
    with jax.enable_x64(True):
        layer = make_layer(rng, routing, TOKENS, EXPERTS, K, HIDDEN, INTER, jnp.float64)
        x, *matrices, weights, chosen = layer
        adapter, dy = make_adapter(rng, shared_outer=shared_outer), jnp.asarray(rng.normal(size=x.shape))

        def ours(matrices, chosen, x, weights, adapter):
            return adapted(x, *matrices, weights, chosen, adapter, chunk_tokens=chunk)

        def plain(matrices, chosen, x, weights, adapter):
            return kernels.experts_mlp(x, *changed(*matrices, adapter), weights, chosen)

        def with_gradients(f, matrices, chosen, dy, *arguments):
            y, pullback = jax.vjp(partial(f, matrices, chosen), *arguments)
            return jax.tree.leaves((y, pullback(dy)))

        arguments = matrices, chosen, dy, x, weights, adapter
        found, expected = (jax.jit(with_gradients, static_argnums=0)(f, *arguments) for f in (ours, plain))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12 * np.abs(other).max())


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


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["xla", "mosaic"])
def test_matrices_in_a_stack(backend):
    """A layer of a stack has the results and gradients of its own matrices."""
    rng, (hidden, inter) = seeds.rng(), (128, 64)
    x, *stacks, weights, chosen = make_layer(rng, "some_nobody", 40, 6, 2, hidden, inter)
    stacks, chosen = [matrices.reshape(3, 2, *matrices.shape[1:]) for matrices in stacks], chosen % 2
    shapes = [(2, 3, hidden), (2, 2 * inter, 3), (2, 3, inter), (2, hidden, 3)]
    a1, b1, a2, b2 = (jnp.asarray(rng.normal(size=shape) * 0.1, jnp.bfloat16) for shape in shapes)
    adapter, x = Adapter(LowRank(a1, b1), LowRank(a2, b2)), x.astype(jnp.bfloat16)

    def in_stack(x, adapter, stacks):
        form = Form(jnp.int32(1), frozen=True, adapter=adapter)
        return compute(x, *stacks, weights, chosen, form, backend=backend)

    def own(x, adapter, stacks):
        return adapted(x, *(matrices[1] for matrices in stacks), weights, chosen, adapter, backend=backend)

    @partial(jax.jit, static_argnums=0)
    def with_gradients(f, stacks, *arrays):
        y, pullback = jax.vjp(lambda *arrays: f(*arrays, stacks), *arrays)
        return jax.tree.leaves((y, pullback(y)))

    stacks = [matrices.astype(jnp.bfloat16) for matrices in stacks]
    for found, expected in zip(*(with_gradients(f, stacks, x, adapter) for f in (in_stack, own)), strict=True):
        found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
        # On Hopper the change is a matmul of its own here, whose result is rounded.
        np.testing.assert_allclose(found, expected, atol=0 if backend == "xla" else 0.02 * np.abs(expected).max())


def frozen(x, w_gate_up, w_down, weights, chosen, **options):
    """The experts with matrices that are not trained."""
    return compute(x, w_gate_up, w_down, weights, chosen, Form(frozen=True), **options)


@pytest.mark.parametrize("chunk", [pytest.param(None, marks=pytest.mark.thorough), 10])
def test_frozen(chunk):
    """The same bits as trained matrices, whose gradient is zero."""
    layer = make_layer(seeds.rng(), "random", TOKENS, EXPERTS, K, HIDDEN, INTER, jnp.float32)
    x, *matrices, weights, chosen = layer

    @partial(jax.jit, static_argnums=0)
    def gradients(f, chosen, dy, *arrays):
        return jax.vjp(lambda *a: f(*a, chosen, chunk_tokens=chunk), *arrays)[1](dy)

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


def test_factors_that_do_not_fit_are_named():
    layer = make_layer(seeds.rng(), "random", TOKENS, EXPERTS, K, HIDDEN, INTER, jnp.float32)
    adapter = make_adapter(seeds.rng(), dtype=jnp.float32)
    wrong = adapter._replace(down=adapter.down._replace(a=adapter.down.b))
    with pytest.raises(ValueError, match=r"down.change.a must have shape \[experts, rank, inter\]"):
        adapted(*layer, wrong)
