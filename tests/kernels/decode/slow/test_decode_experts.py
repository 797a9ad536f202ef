"""The experts of a decoding step add up to `experts_mlp`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels import Precision, QuantisedMatrices, experts_mlp, quantise_matrices
from moe_jax.kernels.decode.add_norm import add_experts
from moe_jax.kernels.decode.experts import expert_rows, expert_rows_in_fp8
from moe_jax.kernels.decode.route import TokenChoices
from tests.helpers import seeds

EXPERTS, COLUMNS, K, HIDDEN, INTER, LAYER = 60, 128, 2, 128, 64, 1
"""Routing has columns after the last expert."""


def _choice(rng, tokens):
    ids = np.zeros((tokens, COLUMNS), np.int32)
    # Few experts, because the interpreter takes its time for each.
    ids[:, :K] = np.stack([7 * rng.permutation(4)[:K] for _ in range(tokens)])
    is_chosen = np.zeros((tokens, COLUMNS), np.int32)
    np.put_along_axis(is_chosen, ids[:, :K], 1, axis=1)
    weights = jnp.asarray(rng.random(size=(tokens, COLUMNS)), jnp.float32)
    return TokenChoices(weights, jnp.asarray(ids), jnp.asarray(is_chosen))


@pytest.mark.parametrize(
    "tokens, dtype",
    [
        (2, "bfloat16"),
        pytest.param(3, "float32", marks=pytest.mark.thorough),
        pytest.param(90, "bfloat16", marks=pytest.mark.thorough),
    ],
)
def test_equals_experts_mlp(tokens, dtype):
    """With weights of another dtype than the tokens' too."""
    rng = seeds.rng()
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), dtype)  # noqa: E731
    x, w_gate_up, w_down = normal(tokens, HIDDEN), normal(2, EXPERTS, 2 * INTER, HIDDEN), normal(2, EXPERTS, HIDDEN, INTER)
    x = x.astype(jnp.bfloat16)
    choice = _choice(rng, tokens)

    @jax.jit
    def sums(x, choice):
        outputs = expert_rows(x, w_gate_up, w_down, choice, jnp.int32(LAYER), k=K)
        return add_experts(jnp.zeros_like(x), outputs, jnp.ones(HIDDEN), eps=1e-6, k=K).x

    layer = jax.jit(partial(experts_mlp, backend="mosaic"))
    expected = layer(x, w_gate_up[LAYER], w_down[LAYER], choice.weights[:, :K], choice.experts[:, :K])
    _assert_equal_rows(sums(x, choice), expected)


@pytest.mark.parametrize("tokens", [21, *(pytest.param(each, marks=pytest.mark.thorough) for each in (3, 90))])
def test_in_fp8(tokens):
    """Pairs by themselves, tokens read where they are, of a number that is no multiple of 8, and gathered tokens."""
    rng = seeds.rng()
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), jnp.bfloat16)  # noqa: E731
    x, choice = normal(tokens, HIDDEN), _choice(rng, tokens)
    # Another layer's numbers would be far away.
    stacks = [normal(2, EXPERTS, *shape) * jnp.asarray([9, 1])[:, None, None, None] for shape in ((256, HIDDEN), (HIDDEN, 128))]
    experts = list(map(jax.jit(quantise_matrices), stacks))

    @jax.jit
    def sums(x, choice):
        outputs = expert_rows_in_fp8(x, *experts, choice, jnp.int32(LAYER), k=K)
        return add_experts(jnp.zeros_like(x), outputs, jnp.ones(HIDDEN), eps=1e-6, k=K).x

    found = sums(x, choice)
    own = [QuantisedMatrices(w.values[LAYER], w.scales[LAYER]) for w in experts]
    assert np.isfinite(np.asarray(found, np.float32)).all(), "a row that is needed was not stored"
    layer = jax.jit(partial(experts_mlp, precision=Precision(), backend="mosaic"))
    expected = layer(x, *own, choice.weights[:, :K], choice.experts[:, :K])
    _assert_equal_rows(found, expected)


def _assert_equal_rows(found, expected):
    """Compares sums of equal rows. On a GPU XLA may add a product to a sum without rounding it before."""
    rounding = 2**-7 if jax.default_backend() == "gpu" else 0
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=rounding)
