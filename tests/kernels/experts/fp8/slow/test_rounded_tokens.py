"""Tokens that were rounded to FP8 before: results compared with the same tokens in bf16, and the errors against f32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels import Precision
from moe_jax.kernels.experts.call import TokenPart, experts
from moe_jax.kernels.experts.fp8.quantise import RoundedTokens, quantise_rows
from moe_jax.kernels.experts.weights import ExpertWeights
from tests.helpers import expert_layers, seeds


def _layer(tokens, hidden, inter):
    """Outlier channels of x, and gradients whose tokens are decades apart."""
    rng = seeds.rng()
    x, *others = expert_layers.make_layer(rng, "some_nobody", tokens, 4, 2, hidden, inter)
    x = x.at[:, :: hidden // 4].multiply(8)
    dy = jnp.asarray(rng.normal(size=x.shape) * 10.0 ** rng.uniform(-3, 0, (tokens, 1)), x.dtype)
    return (x, *others), dy


def _results(layer, dy, backend, parts=1, *, rounds, kept="bf16"):
    """Returns y and its gradients; with `rounds`, the experts get tokens that were rounded before."""
    x, w_gate_up, w_down, weights, chosen = layer

    def f(x, w_gate_up, w_down, weights):
        if rounds:
            tokens = RoundedTokens(quantise_rows(jax.lax.stop_gradient(x)), x).split([len(x) // 4] * (parts - 1))
        else:
            tokens = jnp.split(x, [len(x) // 4] * (parts - 1))
        of_parts = (jnp.split(a, [len(x) // 4] * (parts - 1)) for a in (weights, chosen))
        given = [TokenPart(*part) for part in zip(tokens, *of_parts, strict=True)]
        options = dict(backend=backend, precision=Precision(kept=kept))
        return jnp.concatenate(experts(given, ExpertWeights.of(w_gate_up, w_down), **options))

    y, pullback = jax.vjp(f, x, w_gate_up, w_down, weights)
    return y, *pullback(dy)


def _assert_equal_but_for_gate_up(results, expected):
    """The weights' gradient of gate and up reads the tokens: its error is bounded elsewhere."""
    for name, a, b in zip(expert_layers.ARRAYS, results, expected, strict=True):
        assert a.dtype == b.dtype, name
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        if name == "w_gate_up":
            assert 0 < np.linalg.norm(a - b) < 0.04 * np.linalg.norm(b)
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)


# tests/parallel/eight_devices/test_tokens_in_fp8.py has all transports.
@pytest.mark.thorough
def test_results_are_those_of_tokens_in_bf16():
    (layer, dy), kept, parts = _layer(128, 256, 128), "fp8", 2
    found, expected = (
        jax.jit(lambda layer, dy, rounds=rounds: _results(layer, dy, "xla", parts, rounds=rounds, kept=kept))(layer, dy)
        for rounds in (True, False)
    )
    _assert_equal_but_for_gate_up(found, expected)


@pytest.mark.thorough
def test_kernels():
    layer, dy = _layer(40, 128, 128)
    found, expected = (_results(layer, dy, "mosaic", rounds=rounds) for rounds in (True, False))
    _assert_equal_but_for_gate_up(found, expected)


@pytest.mark.thorough
def test_errors():
    layer, dy = _layer(512, 256, 128)
    results = jax.jit(lambda layer, dy: _results(layer, dy, "xla", rounds=True))(layer, dy)
    exact = expert_layers.exact_with_gradients(layer, dy)
    for name, found, wanted in zip(expert_layers.ARRAYS, results, exact, strict=True):
        assert expert_layers.relative_error(found, wanted) < (0.1 if name == "weights" else 0.08), name


def test_a_forward_pass_of_few_tokens():
    layer, _ = _layer(8, 128, 128)
    x, w_gate_up, w_down, weights, chosen = layer

    @jax.jit
    def y_of(tokens):
        parts = [TokenPart(tokens, weights, chosen)]
        return experts(parts, ExpertWeights.of(w_gate_up, w_down), backend="xla", precision=Precision())[0]

    found, expected = y_of(RoundedTokens.of(jax.jit(quantise_rows)(x))), y_of(x)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
