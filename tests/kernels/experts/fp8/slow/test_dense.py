"""A dense matrix in FP8: errors against f32, equality of kernel and reference, sizes that are filled up, and copies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels import fp8_matmul, quantise_matrices
from moe_jax.kernels.experts.fp8.dense import DenseCopies, dense_copies
from moe_jax.kernels.experts.routing import plan_of_one
from tests.helpers import seeds
from tests.helpers.compiled_steps import plan
from tests.helpers.expert_layers import SUM_ERROR_IN_FP8

NAMES = "y", "dx", "dw"


def _operands(batch, columns, summands):
    """Some channels of x are outliers, and the tokens' gradients are decades apart."""
    rng = seeds.rng()
    x = rng.normal(size=(*batch, summands))
    x[..., :: summands // 4] *= 8
    dy = rng.normal(size=(*batch, columns)) * 10.0 ** rng.uniform(-3, 0, (*batch, 1))
    w = jnp.asarray(rng.normal(size=(columns, summands)), jnp.float32)
    return jnp.asarray(x, jnp.bfloat16), w, jnp.asarray(dy, jnp.bfloat16)


@partial(jax.jit, static_argnames="backend")
def _passes(x, w, dy, **options):
    y, pullback = jax.vjp(lambda x, w: fp8_matmul(x, w, **options), x, w)
    return y, *pullback(dy)


def _assert_near(found, expected):
    for name, a, b in zip(NAMES, found, expected, strict=True):
        a, b = (np.asarray(array, np.float32) for array in (a, b))
        assert np.linalg.norm(a - b) <= 4 * SUM_ERROR_IN_FP8 * np.linalg.norm(b), name


def _assert_equal(found, expected):
    for name, a, b in zip(NAMES, found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), err_msg=name)


def test_errors():
    """Each result is within 0.08 of f32 in norm, and points where it points. The sizes are no multiples of 128."""
    x, w, dy = _operands((2, 100), 576, 320)
    found = _passes(x, w, dy)
    wide_x, wide_dy = (np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (x, dy))
    wide_w = np.asarray(w, np.float64)
    exact = wide_x @ wide_w.T, wide_dy @ wide_w, wide_dy.T @ wide_x
    for name, result, wanted, bound in zip(NAMES, found, exact, (0.08, 0.08, 0.004), strict=True):
        result, norm = np.asarray(result, np.float64).reshape(wanted.shape), np.linalg.norm(wanted)
        assert np.linalg.norm(result - wanted) <= bound * norm, name
        assert np.vdot(result, wanted) >= 0.997 * norm * np.linalg.norm(result), name
    assert [a.shape for a in found] == [dy.shape, x.shape, w.shape]
    assert [a.dtype for a in found] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize(
    "tokens, columns, summands",
    [
        (40, 128, 128),
        pytest.param(200, 576, 384, marks=pytest.mark.thorough),
    ],
)
def test_kernels(tokens, columns, summands):
    """Kernels and reference sum 128 products, scale them and add them in one order: on a CPU they give the same bits."""
    operands = _operands((tokens,), columns, summands)
    _assert_near(_passes(*operands, backend="mosaic"), _passes(*operands, backend="xla"))


def test_copies():
    """Copies in both orders, in one, and codes of sizes that are not filled up give the bits of a matrix that is rounded."""
    x, w, dy = _operands((40,), 192, 256)
    expected = _passes(x, w, dy)
    copies = dense_copies(w)
    assert copies.rounded.values.shape == (256, 256)
    nobody = jnp.full_like(w, jnp.nan)
    _assert_equal(_passes(x, nobody, dy, copies=copies), expected)
    as_stored = DenseCopies(copies.rounded._replace(values=copies.rounded.values[:192]))
    _assert_equal(_passes(x, nobody, dy, copies=as_stored), expected)


def test_a_stack_of_matrices_is_rounded_one_by_one():
    _, w, _ = _operands((4,), 192, 256)
    stacked, one = dense_copies(jnp.stack([w, 2 * w])), dense_copies(2 * w)
    for a, b in zip(jax.tree.leaves(stacked), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(np.asarray(a[1], np.float32), np.asarray(b, np.float32))


def test_no_tokens():
    y, dx, dw = _passes(*_operands((0,), 128, 128))
    assert y.shape == (0, 128) and dx.shape == (0, 128) and not np.any(dw)


def test_plan_of_one():
    """It is the plan of choices of zero, except for rows after the last tile."""
    for tokens in (64, 130):
        ours = jax.jit(plan_of_one, static_argnums=(0, 1))(tokens, 64)
        theirs = plan(jnp.zeros((tokens, 1), jnp.int32), 1, 64)
        assert ours.num_rows % 128 == 0 and tokens <= ours.num_rows <= theirs.num_rows
        for name, a in vars(theirs).items():
            b = getattr(ours, name)
            if name in ("expert_of_row", "token_of_row", "pair_of_row"):
                a = a[: ours.num_rows]
            np.testing.assert_array_equal(a, b, err_msg=name)


def test_refusals():
    x, w, _ = _operands((4,), 128, 128)
    with pytest.raises(ValueError, match="x is float32; it must be bfloat16"):
        fp8_matmul(x.astype(jnp.float32), w)
    with pytest.raises(ValueError, match=r"got \[4, 64\] and \[128, 128\]"):
        fp8_matmul(x[:, :64], w)
    with pytest.raises(ValueError, match=r"copies must be of w, \[128, 128\]; got \[256, 128\]"):
        fp8_matmul(x, w, DenseCopies(quantise_matrices(jnp.ones((256, 128)))))
