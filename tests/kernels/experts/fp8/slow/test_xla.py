"""The reference of the FP8 backends against f32 products of the dequantised operands, and its rounding of rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels.experts.fp8 import xla
from moe_jax.kernels.experts.fp8.quantise import INVERSE_LARGEST, LEAST_MAXIMUM, QuantisedRows, transposed
from tests.helpers import expert_layers, seeds
from tests.helpers.compiled_steps import dequantised_rows, plan, quantise_matrices, quantise_rows, weight_of_row, whole
from tests.helpers.expert_layers import SUM_ERROR_IN_FP8, dequantised_matrices

EXPERTS, K, HIDDEN, INTER = 4, 2, 256, 128


def _by_rows(rows, w, p):
    """Returns the f32 products row by row; zeros for rows of no expert."""
    padded = np.concatenate([np.asarray(dequantised_matrices(w)), np.zeros((1, *w.values.shape[1:]))])
    return np.einsum("rk,rnk->rn", np.asarray(dequantised_rows(rows)), padded[np.asarray(p.expert_of_row)])


def _silu(gate):
    return gate / (1 + np.exp(-gate))


@jax.jit
def _both_passes(x, w_gate_up, w_down, dy, p, weight_of_row):
    gate_up, down = quantise_matrices(w_gate_up), quantise_matrices(w_down)
    rows = xla.rows_of_tokens(x, p)
    h, act = xla.gated_matmul(rows, gate_up, p)
    y = xla.grouped_matmul(act, down, p)
    dy_rows = xla.rows_of_tokens(dy, p)
    backward = xla.gated_matmul_backward(dy_rows, transposed(down), h, weight_of_row, p)
    return gate_up, down, rows, h, act, y, dy_rows, backward


@pytest.mark.parametrize(
    "routing, alignment",
    [pytest.param("one_takes_all", 1, marks=pytest.mark.thorough), ("some_nobody", 8), ("none", 8)],
)
def test_products_are_those_of_the_dequantised(routing, alignment):
    rng = seeds.rng()
    x, w_gate_up, w_down, weights, chosen = expert_layers.make_layer(rng, routing, 48, EXPERTS, K, HIDDEN, INTER)
    dy = jnp.asarray(rng.normal(size=x.shape), x.dtype)
    p = plan(chosen, EXPERTS, alignment)
    v = weight_of_row(weights, p)
    gate_up, down, rows, h, act, y, dy_rows, backward = _both_passes(x, w_gate_up, w_down, dy, p, v)

    sums = _by_rows(rows, gate_up, p)
    gate, up = np.split(sums, 2, axis=1)
    _assert_near(h, sums)
    of_sums = quantise_rows(jnp.asarray(_silu(gate) * up, jnp.float32))
    np.testing.assert_allclose(act.scales, of_sums.scales, rtol=1e-5 + SUM_ERROR_IN_FP8)
    # A sum in another order may fall on the other side between two neighbours of e4m3.
    np.testing.assert_allclose(dequantised_rows(act), dequantised_rows(of_sums), rtol=2**-3, atol=1e-5 + SUM_ERROR_IN_FP8)
    assert np.mean(np.asarray(act.values) != np.asarray(of_sums.values)) < 1e-3 + 16 * SUM_ERROR_IN_FP8
    _assert_near(y, _by_rows(act, down, p))

    g = _by_rows(dy_rows, transposed(down), p)
    gate, up = np.split(np.asarray(h, np.float32), 2, axis=1)
    s, v = 1 / (1 + np.exp(-gate)), np.asarray(v)[:, None]
    dh = np.concatenate([v * g * up * s * (1 + gate * (1 - s)), v * g * gate * s], axis=1)
    rounded_dh, dh_bf16, weighted_act, dweight_of_row = backward
    _assert_near(dh_bf16, dh)
    np.testing.assert_allclose(dequantised_rows(rounded_dh), dh, rtol=2**-3, atol=np.abs(dh).max() * 2**-7)
    _assert_near(weighted_act, v * _silu(gate) * up)
    dweights = np.sum(g * _silu(gate) * up, axis=1)
    lost = 4 * SUM_ERROR_IN_FP8 * np.abs(dweights).max(initial=0)
    np.testing.assert_allclose(dweight_of_row, dweights, rtol=1e-3, atol=1e-3 + lost)


def _assert_near(found, sums):
    """Equal but for the rounding to bf16, and for the part of the largest sums that FP8 products may lose."""
    lost = 4 * SUM_ERROR_IN_FP8 * np.abs(sums).max(initial=0)
    np.testing.assert_allclose(found, sums, rtol=2**-8, atol=1e-5 + lost)


def test_rows_without_a_pair_are_zeros():
    x = jnp.ones((3, HIDDEN), jnp.bfloat16)
    p = plan(jnp.array([[0], [2], [7]]), EXPERTS, 8)
    rows = whole(xla.rows_of_tokens)(x, p)
    is_pair = np.asarray(p.pair_of_row) < 3
    assert is_pair.sum() == 3 and np.all(np.asarray(rows.values, np.float32)[is_pair] == 448)
    assert np.all(np.asarray(rows.values, np.float32)[~is_pair] == 0)
    assert np.all(np.asarray(rows.scales)[:, ~is_pair] == LEAST_MAXIMUM * INVERSE_LARGEST)


def test_a_row_does_not_depend_on_others():
    """Bits of a row are the same with 48 tokens and alone, also next to a row of infinities."""
    rng = seeds.rng()
    x, w, _, _, chosen = expert_layers.make_layer(rng, "random", 48, EXPERTS, 1, HIDDEN, INTER)
    chosen = chosen.at[1].set(chosen[0])

    @jax.jit
    def first_row(x, chosen):
        p = plan(chosen, EXPERTS, 8)
        h, act = xla.gated_matmul(xla.rows_of_tokens(x, p), quantise_matrices(w), p)
        row = p.row_of_pair[0, 0]
        return h[row], act.values[row], act.scales[:, row]

    alone = first_row(x[:1], chosen[:1])
    for others in (x, x.at[1].set(jnp.inf)):
        for a, b in zip(alone, first_row(others, chosen), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_extremes():
    """Groups of zeros give zeros; infinities and NaNs give NaN in their own row alone; tiny numbers are no zeros."""
    x = jnp.ones((5, HIDDEN), jnp.float32)
    x = x.at[0].set(0).at[1, 3].set(jnp.inf).at[2, 200].set(jnp.nan).at[3].set(1e-28)
    w = quantise_matrices(jnp.ones((1, 128, HIDDEN)))
    y = whole(xla.grouped_matmul)(quantise_rows(x), w, plan(jnp.zeros((5, 1), jnp.int32), 1))
    y = np.asarray(y, np.float32)[:, 0]
    assert y[0] == 0 and np.isnan(y[1]) and np.isnan(y[2])
    np.testing.assert_allclose(y[3:], [HIDDEN * 1e-28, HIDDEN], rtol=2**-8)


def test_a_layer_of_a_stack():
    rng = seeds.rng()
    w = quantise_matrices(jnp.asarray(rng.normal(size=(3, EXPERTS, INTER, HIDDEN)), jnp.float32))
    rows = quantise_rows(jnp.asarray(rng.normal(size=(8, HIDDEN)), jnp.float32))
    p = plan(jnp.asarray(rng.integers(0, EXPERTS, (8, 1))), EXPERTS)
    layer = jnp.int32(1)
    in_stack = whole(xla.grouped_matmul)(rows, w, dataclasses.replace(p, layer=layer))
    alone = whole(xla.grouped_matmul)(rows, jax.tree.map(lambda a: a[1], w), p)
    np.testing.assert_array_equal(np.asarray(in_stack, np.float32), np.asarray(alone, np.float32))


def test_no_rows():
    rows = QuantisedRows(jnp.zeros((0, HIDDEN), jnp.float8_e4m3fn), jnp.zeros((HIDDEN // 128, 0)))
    w = quantise_matrices(jnp.ones((EXPERTS, INTER, HIDDEN)))
    assert xla.grouped_matmul(rows, w, plan(jnp.zeros((0, 1), jnp.int32), EXPERTS)).shape == (0, INTER)
