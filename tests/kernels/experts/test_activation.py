"""The gated activation of experts and their biases: values and gradients of every backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import kernels
from moe_jax.kernels import SILU, Activation
from tests.helpers.expert_layers import make_layer

CLAMPED = Activation(alpha=1.702, limit=7.0, offset=1.0)
"""gpt-oss's."""

POINTS = np.array([-30.0, -7.1, -7.0, -6.9, -0.3, 0.0, 0.4, 6.9, 7.0, 7.1, 30.0])


def expected(activation, gate, up, dact):
    """act, dgate and dup in f64, by the formula and its derivative."""
    limit = np.inf if activation.limit is None else activation.limit
    g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
    s = 1 / (1 + np.exp(-activation.alpha * g))
    factor = u + activation.offset
    dgate = dact * factor * s * (1 + activation.alpha * g * (1 - s)) * (gate <= limit)
    return g * s * factor, dgate, dact * g * s * (np.abs(up) <= limit)


@pytest.mark.parametrize("activation", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("in_kernel", [False, True])
def test_values_and_gradients_at_below_and_above_the_limits(rng, activation, in_kernel):
    gate, up = (a.ravel() for a in np.meshgrid(POINTS, POINTS))
    dact = rng.normal(size=gate.shape)
    arrays = jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32)
    act = activation.forward(*arrays, in_kernel=in_kernel)
    if in_kernel:
        same_act, pullback = activation.vjp(*arrays)
        np.testing.assert_allclose(same_act, act, rtol=1e-6)
        gradients = pullback(jnp.asarray(dact, jnp.float32))
    else:
        gradients = activation.backward(*arrays, jnp.asarray(dact, jnp.float32))
    for actual, wanted in zip((act, *gradients), expected(activation, gate, up, dact), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=1e-6)


def test_equal_activations_are_one_static_argument():
    assert Activation() == SILU and hash(Activation(limit=2.0)) == hash(Activation(limit=2.0)) and CLAMPED != SILU


@pytest.mark.parametrize("name, value", [("alpha", 0.0), ("limit", -1.0), ("limit", float("nan")), ("alpha", float("inf"))])
def test_a_number_that_is_not_positive(name, value):
    with pytest.raises(ValueError, match=f"{name} of an Activation must be a positive number; got {value}"):
        Activation(**{name: value})


def test_an_offset_that_is_not_finite():
    with pytest.raises(ValueError, match="offset of an Activation must be a finite number; got nan"):
        Activation(offset=float("nan"))


def test_an_activation_of_another_type(rng):
    with pytest.raises(ValueError, match=r"activation must be an Activation, for example .*; got 'silu'"):
        kernels.experts_mlp(*make_layer(rng, "random", 8, 2, 1, 16, 8), activation="silu")


def clamped(activation):
    def act(gate, up):
        # Written by `where`, whose gradient at a limit is one side's.
        g = jnp.where(gate <= activation.limit, gate, activation.limit)
        u = jnp.where(jnp.abs(up) <= activation.limit, up, jnp.sign(up) * activation.limit)
        return g * jax.nn.sigmoid(activation.alpha * g) * (u + activation.offset)

    return act


def biased_layer(rng, tokens, experts, k, hidden, inter, dtype):
    *arrays, weights, chosen = make_layer(rng, "some_nobody", tokens, experts, k, hidden, inter, dtype)
    biases = [jnp.asarray(rng.normal(size=(experts, size)) * 0.5, dtype) for size in (2 * inter, hidden)]
    return [*arrays, weights.astype(jnp.promote_types(dtype, jnp.float32)), *biases], chosen


def test_biases_are_refused_in_fp8(rng):
    arrays, chosen = biased_layer(rng, 8, 2, 1, 128, 128, jnp.bfloat16)
    with pytest.raises(ValueError, match="biases need precision=None"):
        kernels.experts_mlp(*arrays[:4], chosen, biases=tuple(arrays[4:]), precision=kernels.Precision())


def test_biases_of_another_shape(rng):
    *arrays, b_gate_up, b_down = biased_layer(rng, 8, 2, 1, 16, 8, jnp.float32)[0]
    with pytest.raises(ValueError, match=r"biases: b_down must have shape \[experts, hidden\]"):
        kernels.experts_mlp(*arrays, jnp.zeros((8, 1), jnp.int32), biases=(b_gate_up, b_down[:, :3]))


def test_biases_that_jax_asks_the_layout_of(rng):
    (*arrays, b_gate_up, b_down), chosen = biased_layer(rng, 8, 2, 1, 16, 8, jnp.float32)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    b_down = jax.device_put(b_down, jax.NamedSharding(mesh, jax.P("data")))
    with pytest.raises(ValueError, match=r"b_down is split as P\('data', None\) over mesh axes of type Explicit"):
        kernels.experts_mlp(*arrays, chosen, biases=(b_gate_up, b_down))
