"""Gradients of weights that are added to accumulators, or multiplied out later: the sums, stacks of layers, devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from moe_jax.kernels.backends import implementation
from tests.helpers import seeds
from tests.helpers.expert_gradients import accumulating, make_inputs
from tests.helpers.expert_layers import (
    SMALL,
    gradients_by_accumulators,
    gradients_by_tickets,
    gradients_in_a_stack,
    make_layer,
)


def test_accumulators_grow_by_the_weight_gradients():
    """Outputs and other gradients stay the same. The accumulators of experts without tokens keep their bits."""
    with jax.enable_x64(True):
        rng = seeds.rng()
        x, *weights, topk_weights, chosen = make_inputs(rng, 20, 6, 2, 8, 4, "half_empty")
        direction = jnp.asarray(rng.normal(size=x.shape))
        totals = tuple(jnp.asarray(rng.normal(size=w.shape)).at[:, 0, 0].set(-0.0) for w in weights)

        def loss(x, topk_weights, weights, totals):
            return (accumulating(x, *weights, topk_weights, chosen, totals, chunk_tokens=7) * direction).sum()

        arguments = x, topk_weights, tuple(weights)
        y, expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arguments, None)
        y_with_totals, actual = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*arguments, totals)
        for one, other in zip((y_with_totals, *actual[:2]), (y, *expected[:2]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
        assert not any(gradient.any() for gradient in actual[2])
        for after, before, gradient in zip(actual[3], totals, expected[2], strict=True):
            np.testing.assert_allclose(after, before + gradient, rtol=0, atol=1e-13 * np.abs(gradient).max())
            np.testing.assert_array_equal(after[3:].view(jnp.int64), before[3:].view(jnp.int64))


def gradients_of_both(of_one, of_other, backend, routing, sizes):
    """Returns the two functions' results for one layer of random numbers."""
    rng = seeds.rng()
    layer = make_layer(rng, routing, *sizes)
    dy = jnp.asarray(rng.normal(size=layer[0].shape), layer[0].dtype)
    return (jax.jit(f, static_argnums=0)(backend, layer, dy) for f in (of_one, of_other))


@pytest.mark.parametrize(
    "backend, sizes",
    [("xla", (20, 6, 2, 8, 4, jnp.float32)), pytest.param("mosaic", (*SMALL, jnp.bfloat16), marks=pytest.mark.thorough)],
)
def test_weight_gradients_multiplied_later(backend, sizes):
    """They have the bits of gradients added to accumulators, and so have y and the other gradients. No ticket is read."""
    both = gradients_of_both(gradients_by_tickets, gradients_by_accumulators, backend, "some_nobody", sizes)
    jax.tree.map(np.testing.assert_array_equal, *both)


ON_GPU = [pytest.param(backend, (300, 8, 2, 128, 64), marks=pytest.mark.gpu) for backend in ("mosaic", "triton")]


# test_layer_of_a_stack.py shows in the compiled program that a layer is read and added to in place.
@pytest.mark.parametrize(
    "backend, sizes",
    [("xla", (20, 6, 2, 8, 4)), pytest.param("mosaic", SMALL, marks=pytest.mark.thorough), *ON_GPU],
)
def test_layer_of_a_stack(request, backend, sizes):
    """Kernels read a layer's weights inside a stack and add to its sums there: the same bits, and other layers' sums stay."""
    if request.node.get_closest_marker("gpu") and not implementation(backend).is_native():
        pytest.skip(f"backend {backend} is not written for this device")
    both = gradients_of_both(
        gradients_in_a_stack,
        gradients_by_accumulators,
        backend,
        "half_empty",
        (*sizes, jnp.float32 if backend == "xla" else jnp.bfloat16),
    )
    (found, of_others), expected = both
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for before, after in of_others:
        assert (before == -1).all() and (after == 1).all()


def test_accumulators_of_devices_are_their_own():
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    x, *weights, topk_weights, chosen = make_inputs(seeds.rng(), 24, 4, 2, 8, 4, dtype=jnp.float32)

    def after(totals, x, topk_weights, chosen):
        return jax.grad(lambda t: accumulating(x, *weights, topk_weights, chosen, t, backend="xla").sum())(totals)

    def on_mesh(of_totals):
        specs = of_totals, P("data"), P("data"), P("data")
        split = jax.shard_map(after, mesh=mesh, in_specs=specs, out_specs=of_totals)
        return jax.eval_shape(split, tuple(weights), x, topk_weights, chosen)

    assert [a.shape for a in on_mesh(P("data"))] == [w.shape for w in weights]
    with pytest.raises(ValueError, match=r"accumulators\.gate_up must vary over the mesh axes \['data'\]"):
        on_mesh(P())
