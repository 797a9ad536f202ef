"""A layer of Qwen3-30B-A3B in Hopper kernels on a GPU: every result against f64, and the bits of a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import kernels
from moe_jax.kernels.experts import mosaic
from tests.helpers.expert_layers import make_layer, relative_error, with_gradients


@pytest.mark.gpu
@pytest.mark.skipif(not mosaic.is_native(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("tokens", [1, 129, 8192])
def test_layer_of_qwen3_30b(rng, tokens):
    """On the GPU it equals f64 for sampled tokens and experts."""
    experts, k = 128, 8
    layer = make_layer(rng, "random", tokens, experts, k, 2048, 768)
    dy = jnp.asarray(rng.normal(size=(tokens, 2048)), jnp.bfloat16)
    step = jax.jit(lambda *layer: with_gradients(kernels.experts_mlp, layer, dy))
    y, dx, d_gate_up, d_down, d_weights = first = step(*layer)
    for one, other in zip(first, step(*layer), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(jax.jit(kernels.experts_mlp)(*layer), y, err_msg="a forward pass alone writes no h")

    x, w_gate_up, w_down, weights, chosen = (np.asarray(a, np.float64) for a in layer)
    chosen, gradient = chosen.astype(int), np.asarray(dy, np.float64)
    for token in rng.choice(tokens, min(tokens, 20), replace=False):
        y_exact, dx_exact, d_weights_exact = np.zeros(2048), np.zeros(2048), np.zeros(k)
        for i, e in enumerate(chosen[token]):
            act, dh, g = backward_of_one(x[token], w_gate_up[e], w_down[e], weights[token, i], gradient[token])
            y_exact += weights[token, i] * w_down[e] @ act
            dx_exact += dh @ w_gate_up[e]
            d_weights_exact[i] = g @ act
        assert relative_error(y[token], y_exact) < 8e-3 and relative_error(dx[token], dx_exact) < 8e-3
        np.testing.assert_allclose(d_weights[token], d_weights_exact, atol=2e-2 * np.abs(d_weights_exact).max())
    e = chosen[0, 0]
    gate_up_exact, down_exact = np.zeros_like(w_gate_up[e]), np.zeros_like(w_down[e])
    for token, i in np.argwhere(chosen == e):
        act, dh, _ = backward_of_one(x[token], w_gate_up[e], w_down[e], weights[token, i], gradient[token])
        gate_up_exact += np.outer(dh, x[token])
        down_exact += np.outer(gradient[token], weights[token, i] * act)
    assert relative_error(d_gate_up[e], gate_up_exact) < 8e-3 and relative_error(d_down[e], down_exact) < 8e-3


def backward_of_one(x, w_gate_up, w_down, weight, dy):
    """act, dh and g = w_down^T dy of one token in one expert, in f64."""
    gate, up = np.split(w_gate_up @ x, 2)
    sigmoid = 1 / (1 + np.exp(-gate))
    g = w_down.T @ dy
    dact = weight * g
    return gate * sigmoid * up, np.concatenate([dact * up * sigmoid * (1 + gate * (1 - sigmoid)), dact * gate * sigmoid]), g


@pytest.mark.gpu
@pytest.mark.skipif(not mosaic.is_native(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("tokens", [1, 2, 16, 129])
def test_bits_of_a_token_of_qwen3_30b(rng, tokens):
    """They do not depend on 8192 other tokens, or on gradients that are computed too."""
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "random", 8192, 128, 8, 2048, 768)
    dy = jnp.asarray(rng.normal(size=x.shape), jnp.bfloat16)

    @jax.jit
    def run(x, weights, chosen, dy):
        y, dx, _, _, d_weights = with_gradients(kernels.experts_mlp, (x, w_gate_up, w_down, weights, chosen), dy)
        return y, dx, d_weights

    of_all = run(x, weights, chosen, dy)
    own = [a[:tokens] for a in (x, weights, chosen, dy)]
    for alone, among_others in zip(run(*own), of_all, strict=True):
        np.testing.assert_array_equal(alone, among_others[:tokens])
    without_gradients = jax.jit(kernels.experts_mlp)(own[0], w_gate_up, w_down, *own[1:3])
    np.testing.assert_array_equal(without_gradients, of_all[0][:tokens])
