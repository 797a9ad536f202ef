"""The FP8 kernels for Hopper against the reference in XLA, in JAX's GPU interpreter where there is no GPU."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels.experts.fp8 import mosaic, xla
from moe_jax.kernels.experts.fp8.mosaic import by_rows, by_rows_backward
from moe_jax.kernels.experts.fp8.mosaic.promoted import Fp8TileShape
from moe_jax.kernels.experts.fp8.quantise import (
    INVERSE_LARGEST,
    LEAST_MAXIMUM,
    QuantisedRows,
    dequantised_rows,
    transposed,
)
from moe_jax.kernels.experts.separate_vjps import weight_of_row
from tests.helpers import expert_layers, seeds
from tests.helpers.compiled_steps import plan, plan_of_few, quantise_matrices, quantise_rows
from tests.helpers.expert_layers import SUM_ERROR_IN_FP8, rows_with_a_pair

EXPERTS, K, HIDDEN, INTER, TOKENS = 3, 2, 384, 256, 96

PASSES = "rows_of_tokens", "rows_of_rounded", "gated_matmul", "grouped_matmul", "gated_matmul_backward"


def _waiting(module):
    """The module's passes, each compiled whole, which wait for their results: kernels that the interpreter runs at one time
    may wait for each other's threads."""
    options = {"gated_matmul": {"static_argnames": "keep_h"}}
    return SimpleNamespace(**{name: _wait(jax.jit(getattr(module, name), **options.get(name, {}))) for name in PASSES})


def _wait(f):
    return lambda *operands, **options: jax.block_until_ready(f(*operands, **options))


kernels, reference = _waiting(mosaic), _waiting(xla)


def _layer(routing, rng):
    x, w_gate_up, w_down, weights, chosen = expert_layers.make_layer(rng, routing, TOKENS, EXPERTS, K, HIDDEN, INTER)
    p = plan(chosen, EXPERTS, mosaic.ROW_ALIGNMENT)
    return x, quantise_matrices(w_gate_up), quantise_matrices(w_down), weight_of_row(weights, p), p


def _assert_near(ours, theirs, rows, error=2e-3 + 4 * SUM_ERROR_IN_FP8):
    a, b = (np.asarray(array, np.float32)[rows] for array in (ours, theirs))
    assert np.isfinite(b).all()
    assert np.linalg.norm(a - b) <= error * np.linalg.norm(b)


def _assert_rounded_alike(ours, theirs, rows):
    """Sums in another order move a scale by their own error, and few values to the other side of a tie."""
    np.testing.assert_allclose(
        np.asarray(ours.scales)[:, rows], np.asarray(theirs.scales)[:, rows], rtol=1e-4 + SUM_ERROR_IN_FP8
    )
    assert np.mean((np.asarray(ours.values) != np.asarray(theirs.values))[rows]) < 1e-3 + 16 * SUM_ERROR_IN_FP8


def test_matrices_in_both_orders():
    """Values, transposes and scales agree bit for bit, also for zeros, tiny and infinite numbers."""
    w = seeds.rng().normal(size=(2, 2, 256, 128)).astype(np.float32)
    w[0, 0, :128] = 0
    w[0, 1, 3, 5] = np.inf
    w[1, 0] *= 1e-30
    w[1, 1] *= 1e-38
    ours, theirs = (jax.jit(m.matrices_in_both_orders)(jnp.asarray(w, jnp.bfloat16)) for m in (mosaic, xla))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_kept_h():
    """Codes and scales agree bit for bit, also for zeros, tiny and infinite numbers; other numbers of rows are left to XLA."""
    h = seeds.rng().normal(size=(128, 384)).astype(np.float32)
    h[2], h[3, 5], h[4], h[5] = 0, np.inf, 1e-30 * h[4], 1e-38 * h[5]
    for rows in (128, 70):
        kept = [jax.jit(m.kept_h, static_argnums=1)(jnp.asarray(h[:rows], jnp.bfloat16), "fp8") for m in (mosaic, xla)]
        for a, b in zip(*kept, strict=True):
            np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("routing", ["some_nobody", pytest.param("one_takes_all", marks=pytest.mark.thorough)])
def test_passes(routing):
    """Every kernel gives what the reference gives for the same operands."""
    rng = seeds.rng()
    x, gate_up, down, v, p = _layer(routing, rng)
    rows = rows_with_a_pair(p)
    tokens = reference.rows_of_tokens(x, p)
    h, act = reference.gated_matmul(tokens, gate_up, p)
    our_h, our_act = kernels.gated_matmul(tokens, gate_up, p)
    _assert_near(our_h, h, rows)
    _assert_rounded_alike(our_act, act, rows)
    _assert_near(kernels.grouped_matmul(act, down, p), reference.grouped_matmul(act, down, p), rows)
    dy = reference.rows_of_tokens(x[::-1], p)
    ours, theirs = (m.gated_matmul_backward(dy, transposed(down), h, v, p) for m in (kernels, reference))
    _assert_rounded_alike(ours[0], theirs[0], rows)
    for found, expected in zip(ours[1:], theirs[1:], strict=True):
        _assert_near(found, expected, rows)


def test_rows_of_tokens():
    """Values and scales agree bit for bit, also for zeros, tiny and infinite numbers; filling rows are zeros.

    So do tokens that were rounded before.
    """
    rng = seeds.rng()
    chosen = jnp.asarray(rng.integers(-1, EXPERTS - 1, (37, K)), jnp.int32)
    p, x = plan(chosen, EXPERTS, mosaic.ROW_ALIGNMENT), rng.normal(size=(37, HIDDEN))
    x[2], x[3, 5], x[4, 100], x[7, 3] = 0, np.inf, np.nan, 1e4
    x[5], x[6] = 1e-30 * x[5], 1e-38 * x[6]
    x = jnp.asarray(x, jnp.bfloat16)
    theirs, rounded = reference.rows_of_tokens(x, p), quantise_rows(x)
    computed = slice(0, int(p.offsets[-1]))
    for ours in (kernels.rows_of_tokens(x, p), kernels.rows_of_rounded(rounded, p)):
        values = [np.asarray(rows.values.view(jnp.uint8))[computed] for rows in (ours, theirs)]
        np.testing.assert_array_equal(*values)
        np.testing.assert_array_equal(np.asarray(ours.scales)[:, computed], np.asarray(theirs.scales)[:, computed])
        filling = ~rows_with_a_pair(p)[computed]
        assert filling.any() and not values[0][filling].any()
        assert (np.asarray(ours.scales)[:, computed][:, filling] == LEAST_MAXIMUM * INVERSE_LARGEST).all()


def test_promotion():
    """Sums of positive numbers are f32 sums over groups of 128, and scales of six decades enter where they belong."""
    rng = seeds.rng()
    *_, p = _layer("random", rng)
    decades = 10.0 ** rng.integers(-3, 4, (p.num_rows, INTER // 128)).repeat(128, axis=1)
    a = quantise_rows(jnp.asarray(rng.random((p.num_rows, INTER)) * decades, jnp.float32))
    w = quantise_matrices(jnp.asarray(rng.random((EXPERTS, HIDDEN, INTER)), jnp.float32))
    w = w._replace(scales=w.scales * 10.0 ** rng.integers(-3, 4, w.scales.shape))
    _assert_near(kernels.grouped_matmul(a, w, p), reference.grouped_matmul(a, w, p), rows_with_a_pair(p))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Fp8TileShape(128, 128, 3), marks=pytest.mark.thorough),
        Fp8TileShape(64, 128, 2, ping_pong=True, steps_of_slot=2),
    ],
    ids=["one block", "two steps a slot"],
)
def test_bits_of_a_row(other):
    """A token's results do not depend on the other tokens, on their experts, or on the tile."""
    rng = seeds.rng()
    w = quantise_matrices(jnp.asarray(rng.normal(size=(EXPERTS, 256, 256)), jnp.float32))
    own = rng.normal(size=(1, 256))
    results = []
    for count, tile in ((3, Fp8TileShape(128, 256, 3)), (100, other)):
        others = rng.normal(size=(count, 256))
        x = jnp.asarray(np.concatenate([others, own]), jnp.bfloat16)
        chosen = jnp.asarray([*rng.integers(0, 3, count), 1], jnp.int32)[:, None]
        p = plan(chosen, EXPERTS, mosaic.ROW_ALIGNMENT)
        y = _wait(by_rows.matmul)(reference.rows_of_tokens(x, p), w, p, tile)
        results.append(np.asarray(y[p.row_of_pair[-1, 0]].view(jnp.uint16)))
    np.testing.assert_array_equal(*results)


@pytest.mark.thorough
def test_bits_of_gradients():
    """Gradients do not depend on the tile."""
    rng, other = seeds.rng(), Fp8TileShape(64, 256, 2, ping_pong=True)
    x, gate_up, down, v, p = _layer("random", rng)
    h = jnp.asarray(rng.normal(size=(p.num_rows, 2 * INTER)), jnp.bfloat16)
    dy, rows = reference.rows_of_tokens(x, p), np.arange(p.num_rows) < int(p.offsets[-1])
    tiles = Fp8TileShape(128, 128, 2), other
    results = [_wait(by_rows_backward.matmul_gated_backward)(dy, transposed(down), h, v, p, tile) for tile in tiles]
    first, second = (jax.tree.map(lambda a: np.asarray(a, np.float32), result) for result in results)
    np.testing.assert_array_equal(second[0].scales[:, rows], first[0].scales[:, rows])
    np.testing.assert_array_equal(second[0].values[rows], first[0].values[rows])
    for of_second, of_first in zip(second[1:], first[1:], strict=True):
        np.testing.assert_array_equal(of_second[rows], of_first[rows])


def test_numbers_that_are_none():
    """An infinite or undefined number reaches the results of its own row alone."""
    rng = seeds.rng()
    x, gate_up, down, v, p = _layer("random", rng)
    x = x.at[3, 200].set(jnp.nan).at[5, 20].set(jnp.inf).at[7].set(0)
    h, act = kernels.gated_matmul(reference.rows_of_tokens(x, p), gate_up, p)
    token = np.asarray(p.token_of_row)
    spoilt = np.isin(token, (3, 5))
    for values in (h, dequantised_rows(act)):
        is_finite = np.isfinite(np.asarray(values, np.float32)).all(axis=1)
        assert not is_finite[spoilt].any() and is_finite[rows_with_a_pair(p) & ~spoilt].all()
    assert not np.asarray(h, np.float32)[token == 7].any()
    assert (np.asarray(act.scales)[:, token == 7] == LEAST_MAXIMUM * INVERSE_LARGEST).all()


def test_few_tokens():
    """A plan that holds all tokens lets each chosen expert read the tokens where they are, and store a part of the rows."""
    rng = seeds.rng()
    x, w_gate_up, w_down, _, chosen = expert_layers.make_layer(rng, "random", 21, EXPERTS, K, 128, 128)
    gate_up, down = quantise_matrices(w_gate_up), quantise_matrices(w_down)
    few, many = plan_of_few(chosen, EXPERTS, mosaic.ROW_ALIGNMENT), plan(chosen, EXPERTS, mosaic.ROW_ALIGNMENT)

    def y(p, module):
        act = module.gated_matmul(module.rows_of_tokens(x, p), gate_up, p, keep_h=False)[1]
        return np.asarray(module.grouped_matmul(act, down, p)[p.row_of_pair], np.float32)

    _assert_near(y(few, kernels), y(many, reference), slice(None))
    found, rounded = kernels.rows_of_tokens(x, few), kernels.rows_of_rounded(quantise_rows(x), few)
    np.testing.assert_array_equal(rounded.values.view(jnp.uint8), found.values.view(jnp.uint8))
    np.testing.assert_array_equal(rounded.scales[:, :21], found.scales[:, :21])


def test_few_pairs():
    """Kernels by pairs give the bits of the kernels by rows, out of a stack of layers; a pair of nobody gives zeros."""
    rng = seeds.rng()
    x = jnp.asarray(rng.normal(size=(2, 384)), jnp.bfloat16)
    stacks = [quantise_matrices(jnp.asarray(rng.normal(size=(2, 8, *s)), jnp.float32)) for s in ((512, 384), (384, 256))]
    chosen = jnp.asarray([[rng.integers(8), rng.integers(8)], [rng.integers(8), -1]], jnp.int32)
    found = _wait(mosaic.experts_of_few_pairs)(x, *stacks, chosen, jnp.int32(1))
    gate_up, down = (type(w)(w.values[1], w.scales[1]) for w in stacks)
    p = plan_of_few(chosen, 8, mosaic.ROW_ALIGNMENT)
    act = kernels.gated_matmul(kernels.rows_of_tokens(x, p), gate_up, p, keep_h=False)[1]
    expected = kernels.grouped_matmul(act, down, p)[p.row_of_pair.reshape(-1)]
    np.testing.assert_array_equal(np.asarray(found, np.float32)[:3], np.asarray(expected, np.float32)[:3])
    assert np.abs(np.asarray(found, np.float32)[:3]).max() > 1 and not np.asarray(found, np.float32)[3].any()


def test_no_rows():
    x, gate_up, down, _, _ = _layer("random", seeds.rng())
    p = plan(jnp.zeros((0, K), jnp.int32), EXPERTS, mosaic.ROW_ALIGNMENT)
    rows = jax.eval_shape(mosaic.rows_of_tokens, x[:0], p)
    h, act = jax.eval_shape(mosaic.gated_matmul, rows, gate_up, p)
    assert jax.eval_shape(mosaic.rows_of_rounded, rows, p).values.shape == (0, HIDDEN)
    assert isinstance(act, QuantisedRows) and h.shape == (0, 2 * INTER)
    assert jax.eval_shape(mosaic.grouped_matmul, act, down, p).shape == (0, HIDDEN)
    backward = jax.eval_shape(mosaic.gated_matmul_backward, rows, transposed(down), h, jnp.zeros(0), p)
    assert backward[0].values.shape == (0, 2 * INTER)
