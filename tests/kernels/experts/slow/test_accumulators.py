"""Gradients of weights that are added to accumulators, or multiplied out later: the sums, stacks of layers, devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_jax.kernels.backends import implementation
from tests.helpers import seeds
from tests.helpers.expert_gradients import accumulating, make_inputs
from tests.helpers.expert_layers import gradients_by_accumulators, gradients_by_tickets, gradients_in_a_stack, make_layer


@pytest.mark.parametrize("chunk_tokens", [pytest.param(None, marks=pytest.mark.thorough), 7])
def test_accumulators_grow_by_the_weight_gradients(chunk_tokens):
    """Outputs and other gradients stay the same. The accumulators of experts without tokens keep their bits."""
    with jax.enable_x64(True):
        rng = seeds.rng()
        x, *weights, topk_weights, chosen = make_inputs(rng, 20, 6, 2, 8, 4, "half_empty")
        direction = jnp.asarray(rng.normal(size=x.shape))
        totals = tuple(jnp.asarray(rng.normal(size=w.shape)).at[:, 0, 0].set(-0.0) for w in weights)

        def loss(x, topk_weights, weights, totals):
            return (accumulating(x, *weights, topk_weights, chosen, totals, chunk_tokens=chunk_tokens) * direction).sum()

        arguments = x, topk_weights, tuple(weights)
        y, expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arguments, None)
        y_with_totals, actual = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*arguments, totals)
        for one, other in zip((y_with_totals, *actual[:2]), (y, *expected[:2]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
        assert not any(gradient.any() for gradient in actual[2])
        for after, before, gradient in zip(actual[3], totals, expected[2], strict=True):
            np.testing.assert_allclose(after, before + gradient, rtol=0, atol=1e-13 * np.abs(gradient).max())
            np.testing.assert_array_equal(after[3:].view(jnp.int64), before[3:].view(jnp.int64))


@pytest.mark.parametrize(
    "routing",
    [
        "some_nobody",
        *(pytest.param(r, marks=pytest.mark.thorough) for r in ("random", "one_takes_all", "half_empty", "nobody")),
    ],
)
def test_weight_gradients_multiplied_later(routing):
    """They have the bits of gradients added to accumulators, and so have y and the other gradients. No ticket is read."""
    rng = seeds.rng()
    layer = make_layer(rng, routing, 20, 6, 2, 8, 4, jnp.float32)
    dy = jnp.asarray(rng.normal(size=layer[0].shape), jnp.float32)
    found, expected = (
        jax.jit(f, static_argnums=0)("xla", layer, dy) for f in (gradients_by_tickets, gradients_by_accumulators)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


ON_GPU = [pytest.param(backend, marks=pytest.mark.gpu) for backend in ("mosaic", "triton")]


@pytest.mark.parametrize("backend", ["xla", *ON_GPU])
def test_layer_of_a_stack(backend):
    """Kernels read a layer's weights inside a stack and add to its sums there: the same bits, and other layers' sums stay."""
    if not implementation(backend).is_native():
        pytest.skip(f"backend {backend} is not written for this device")
    rng = seeds.rng()
    layer = make_layer(rng, "half_empty", 300, 8, 2, 128, 64, jnp.bfloat16)
    dy = jnp.asarray(rng.normal(size=layer[0].shape), jnp.bfloat16)
    expected = jax.jit(gradients_by_accumulators, static_argnums=0)(backend, layer, dy)
    found, of_others = jax.jit(gradients_in_a_stack, static_argnums=0)(backend, layer, dy)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for before, after in of_others:
        assert (before == -1).all() and (after == 1).all()


@pytest.mark.parametrize("backend", [pytest.param("xla", marks=pytest.mark.thorough), *ON_GPU])
def test_stacked_accumulators_grow_in_place(backend):
    """Our kernels agree bit for bit, though XLA takes each layer's accumulators out of the stack and puts them back."""
    if not implementation(backend).is_native():
        pytest.skip(f"backend {backend} is not written for this device")
    rng = seeds.rng()
    layers, (tokens, experts, k, hidden, inter) = 3, (300, 8, 2, 128, 64)
    x, *weights, topk_weights, chosen = make_inputs(rng, tokens, experts, k, hidden, inter, "half_empty", jnp.float32)
    x, how = x.astype(jnp.bfloat16), {"backend": backend}
    totals = tuple(jnp.asarray(rng.normal(size=(layers, *w.shape)), jnp.float32) for w in weights)

    def loss(scale, weights, totals):
        y = accumulating(x * scale, *weights, topk_weights, chosen, totals, **how)
        return jnp.sin(y.astype(jnp.float32)).sum()

    def of_layer(i, totals):
        scale = (1 + i).astype(x.dtype)
        after = jax.grad(loss, 2)(scale, weights, tuple(jax.lax.dynamic_index_in_dim(t, i, 0, keepdims=False) for t in totals))
        return tuple(jax.lax.dynamic_update_index_in_dim(t, new, i, 0) for t, new in zip(totals, after, strict=True))

    expected = [
        [t[i] + d for t, d in zip(totals, jax.jit(jax.grad(loss, 1))(jnp.asarray(1 + i, x.dtype), weights, None), strict=True)]
        for i in range(layers)
    ]
    actual = jax.jit(lambda totals: jax.lax.fori_loop(0, layers, of_layer, totals), donate_argnums=0)(totals)
    for matrix in range(2):
        # XLA may choose other matmuls in another program.
        tolerance = 1e-5 if backend == "xla" else 0
        np.testing.assert_allclose(actual[matrix], jnp.stack([after[matrix] for after in expected]), tolerance, tolerance)


@pytest.mark.thorough
def test_accumulators_of_devices_are_their_own():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    x, *weights, topk_weights, chosen = make_inputs(seeds.rng(), 24, 4, 2, 8, 4, dtype=jnp.float32)
    totals = tuple(jnp.ones_like(w) for w in weights)

    def after(totals, x, topk_weights, chosen):
        return jax.grad(lambda t: accumulating(x, *weights, topk_weights, chosen, t).sum())(totals)

    def on_mesh(of_totals):
        specs = of_totals, P("data"), P("data"), P("data")
        split = jax.jit(jax.shard_map(after, mesh=mesh, in_specs=specs, out_specs=of_totals))
        return split(totals, x, topk_weights, chosen)

    for one, other in zip(on_mesh(P("data")), jax.jit(after)(totals, x, topk_weights, chosen), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"accumulators\.gate_up must vary over the mesh axes \['data'\]"):
        on_mesh(P())
