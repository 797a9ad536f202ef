"""A layer of experts in Hopper kernels: in JAX's GPU interpreter where there is no GPU, compiled where there is one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import kernels
from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.routing import plan
from tests.helpers.expert_layers import SMALL, assert_as_near_as, few_bits, make_layer, with_gradients


@pytest.mark.parametrize(
    "routing, tokens, experts, k, hidden, inter, dtype",
    [
        ("some_nobody", *SMALL, "bfloat16"),
        pytest.param("one_takes_all", *SMALL, "bfloat16", marks=pytest.mark.thorough),
        pytest.param("half_empty", 129, 2, 1, 64, 128, "float16", marks=pytest.mark.thorough),
        pytest.param("some_nobody", 1, 6, 3, 256, 192, "bfloat16", marks=pytest.mark.thorough),
    ],
)
def test_values_and_gradients(rng, routing, tokens, experts, k, hidden, inter, dtype):
    """Errors against f64 are as small as the xla backend's."""
    layer = make_layer(rng, routing, tokens, experts, k, hidden, inter, dtype)
    dy = jnp.asarray(rng.normal(size=(tokens, hidden)), dtype)
    ours = with_gradients(lambda *a: kernels.experts_mlp(*a, backend="mosaic"), layer, dy)
    theirs = with_gradients(lambda *a: kernels.experts_mlp(*a, backend="xla"), layer, dy)
    assert_as_near_as(ours, theirs, layer, dy, few=3e-2)


@pytest.mark.thorough
def test_between_gate_up_and_down(rng):
    """A function between `gate_up` and `down` gets gradients of the rows of pairs only."""
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "some_nobody", *SMALL)
    rows = plan(chosen, SMALL[1], mosaic.ROW_ALIGNMENT)

    def loss(slope, backend):
        gate, up = jnp.split(kernels.gate_up(x, w_gate_up, rows, backend=backend), 2, axis=1)
        act = (jax.nn.silu(slope * gate.astype(jnp.float32)) * up).astype(x.dtype)
        return jnp.square(kernels.down(act, w_down, weights, rows, backend=backend).astype(jnp.float32)).sum()

    ours, theirs = (jax.jit(jax.grad(loss), static_argnums=1)(1.1, backend) for backend in ("mosaic", "xla"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-2)


@pytest.mark.thorough
def test_f32_master_weights(rng):
    """f32 weights get f32 gradients that were not rounded before."""
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "random", *SMALL)
    layer = (x, w_gate_up.astype(jnp.float32), w_down.astype(jnp.float32), weights, chosen)
    dy = jnp.asarray(rng.normal(size=x.shape), x.dtype)
    _, _, d_gate_up, d_down, _ = with_gradients(lambda *a: kernels.experts_mlp(*a, backend="mosaic"), layer, dy)
    _, _, rounded_gate_up, rounded_down, _ = with_gradients(
        lambda *a: kernels.experts_mlp(*a, backend="mosaic"), (x, w_gate_up, w_down, weights, chosen), dy
    )
    assert d_gate_up.dtype == d_down.dtype == jnp.float32
    np.testing.assert_array_equal(d_gate_up.astype(jnp.bfloat16), rounded_gate_up)
    np.testing.assert_array_equal(d_down.astype(jnp.bfloat16), rounded_down)


@pytest.mark.thorough
def test_without_h(rng):
    """A forward pass alone, and the first of two under `jax.checkpoint`, which JAX does not interpret."""
    *arrays, chosen = make_layer(rng, "some_nobody", *SMALL)
    dy = jnp.asarray(rng.normal(size=arrays[0].shape), jnp.bfloat16)

    def layer(*arrays):
        return kernels.experts_mlp(*arrays, chosen, backend="mosaic")

    y, *gradients = with_gradients(lambda *a: layer(*a[:-1]), (*arrays, chosen), dy)
    np.testing.assert_array_equal(jax.jit(layer)(*arrays), y)
    if mosaic.is_native():
        with_remat = with_gradients(lambda *a: jax.checkpoint(layer)(*a[:-1]), (*arrays, chosen), dy)
        for actual, expected in zip(with_remat, (y, *gradients), strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_bits_of_a_token(rng):
    """They do not depend on the other tokens."""
    tokens = 7
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "random", *SMALL)
    weights = few_bits(weights)
    dy = jnp.asarray(rng.normal(size=x.shape), x.dtype)

    def run(count):
        layer = (x[:count], w_gate_up, w_down, weights[:count], chosen[:count])
        y, dx, _, _, d_weights = with_gradients(lambda *a: kernels.experts_mlp(*a, backend="mosaic"), layer, dy[:count])
        return y, dx, d_weights

    for alone, of_all in zip(run(tokens), run(SMALL[0]), strict=True):
        np.testing.assert_array_equal(alone, of_all[:tokens])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": jnp.float32}, "x is float32; it computes in bfloat16 and float16"),
        ({"hidden": 96}, "hidden is 96; it must be a multiple of 64"),
        ({"inter": 32}, "inter is 32; it must be a multiple of 64"),
        (
            {"hidden": 14400},
            "hidden is 14400; gathering such rows takes 345632 bytes of shared memory; a core has 232448",
        ),
    ],
)
def test_refusal(rng, change, message):
    """An input that the backend does not take is refused with the reason."""
    sizes = {"hidden": 64, "inter": 128} | change
    layer = make_layer(rng, "random", 5, 4, 2, **sizes)
    with pytest.raises(ValueError, match=f"argument backend: backend 'mosaic' does not support this input: {message}"):
        kernels.experts_mlp(*layer, backend="mosaic")


def test_plan_of_another_alignment(rng):
    x, w_gate_up, _, _, chosen = make_layer(rng, "random", 5, 4, 2, 64, 128)
    with pytest.raises(ValueError, match=r"row_alignment 1; it needs plan\(..., row_alignment=64\)"):
        kernels.gate_up(x, w_gate_up, plan(chosen, 4), backend="mosaic")
