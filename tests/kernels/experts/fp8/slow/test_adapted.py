"""Low-rank changes of experts in FP8: every result against the same roundings row by row, and against f32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels import Precision, QuantisedMatrices
from moe_jax.kernels.experts.activation import activated
from moe_jax.kernels.experts.fp8.quantise import InFp8, dequantised_rows, quantise_rows
from moe_jax.kernels.low_rank import LowRank
from tests.helpers import expert_layers, oracle, seeds
from tests.helpers.compiled_steps import quantise_matrices
from tests.helpers.expert_layers import Adapter, Form, compute, dequantised_matrices

TOKENS, EXPERTS, K, HIDDEN, INTER, RANK = 48, 3, 2, 256, 128, 3
RESULTS = "y", "x", "weights", "a1", "b1", "a2", "b2"
FP8 = Precision()


def _layer(routing="random", tokens=TOKENS, hidden=HIDDEN, inter=INTER):
    """Powers of two as weights of choices: a product with one moves no rounding. The changes are as large as the matrices."""
    rng = seeds.rng()
    x, *matrices, _, chosen = expert_layers.make_layer(rng, routing, tokens, EXPERTS, K, hidden, inter)
    weights = jnp.asarray(2.0 ** -rng.integers(0, 3, (tokens, K)), jnp.float32)
    shapes = [(EXPERTS, RANK, hidden), (EXPERTS, 2 * inter, RANK), (EXPERTS, RANK, inter), (EXPERTS, hidden, RANK)]
    a1, b1, a2, b2 = (jnp.asarray(rng.normal(size=shape) * shape[2] ** -0.5, jnp.float32) for shape in shapes)
    dy = jnp.asarray(rng.normal(size=x.shape) * 10.0 ** rng.uniform(-2, 0, (tokens, 1)), x.dtype)
    return x, weights, Adapter(LowRank(a1, b1), LowRank(a2, b2)), chosen, matrices, list(map(quantise_matrices, matrices)), dy


@partial(jax.jit, static_argnums=0)
def _results(f, matrices, chosen, dy, *arrays):
    y, pullback = jax.vjp(partial(f, matrices, chosen), *arrays)
    return jax.tree.leaves((y, pullback(dy.astype(y.dtype))))


def _ours(matrices, chosen, x, weights, adapter, precision=FP8, layer=None, **options):
    """Computes with matrices as codes or as arrays."""
    codes = [InFp8(w) if isinstance(w, QuantisedMatrices) else None for w in matrices]
    values = [None if code is not None else w for w, code in zip(matrices, codes, strict=True)]
    form = Form(layer, frozen=True, adapter=adapter, copies=codes)
    return compute(x, *values, weights, chosen, form, precision=precision, **options)


@jax.custom_vjp
def _product_in_fp8(rows, w):
    # Without the barrier XLA removes both conversions on a GPU.
    rounded = jax.lax.optimization_barrier(quantise_rows(rows))
    return jnp.einsum("ri,roi->ro", dequantised_rows(rounded), w).astype(jnp.bfloat16)


_product_in_fp8.defvjp(lambda rows, w: (_product_in_fp8(rows, w), w), lambda w, dy: (_product_in_fp8(dy, w.mT), None))


def _row_by_row(quantised, chosen, x, weights, adapter):
    """The definition, which JAX differentiates; both passes round the operands of a product in FP8."""

    def product(rows, w, factors):
        a, b = (factor[chosen.reshape(-1)].astype(jnp.bfloat16) for factor in factors)
        u = jnp.einsum("ri,rki->rk", rows, a)
        return _product_in_fp8(rows, dequantised_matrices(w)[chosen.reshape(-1)]) + jnp.einsum("rk,rok->ro", u, b)

    rows = jnp.repeat(x.astype(jnp.float32), K, axis=0).astype(jnp.bfloat16)
    gate_up, down = quantised
    h = product(rows, gate_up, adapter.gate_up)
    y_rows = product(activated(h), down, adapter.down).astype(jnp.float32)
    return jnp.sum(weights[:, :, None] * y_rows.reshape(*weights.shape, -1), axis=1).astype(x.dtype)


def _assert_near(found, wanted, bounds):
    for name, one, other in zip(RESULTS, found, wanted, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        bound = bounds.get(name, bounds["others"]) + 16 * expert_layers.SUM_ERROR_IN_FP8
        assert np.linalg.norm(one - other) <= bound * np.linalg.norm(other), name


def test_the_rounded_values():
    """The gradient to a weight is <g, act> with a rounded g here, and <dy, y> row by row."""
    *arrays, chosen, _, quantised, dy = _layer()
    found = _results(_ours, quantised, chosen, dy, *arrays)
    wanted = _results(_row_by_row, quantised, chosen, dy, *arrays)
    _assert_near(found, wanted, {"y": 4e-3, "x": 0.02, "weights": 0.1, "others": 0.01})


@pytest.mark.thorough
def test_errors():
    *arrays, chosen, matrices, quantised, dy = _layer(tokens=128)
    found = _results(partial(_ours, precision=Precision(kept="fp8")), quantised, chosen, dy, *arrays)

    def exact(matrices, chosen, x, weights, adapter):
        changed = [w.astype(jnp.float32) + jnp.matmul(*reversed(of_w)) for w, of_w in zip(matrices, adapter, strict=True)]
        return oracle.experts_mlp(x.astype(jnp.float32), *changed, weights, chosen)

    _assert_near(found, _results(exact, matrices, chosen, dy, *arrays), {"weights": 0.18, "others": 0.08})


# Changes with bf16 kernels are in ../test_adapted.py, and FP8 kernels without them in test_kernels.py.
@pytest.mark.thorough
def test_mosaic():
    """The FP8 kernels, in the interpreter, with changes of a padded rank; experts hold padding rows."""
    *arrays, chosen, _, quantised, dy = _layer("some_nobody", tokens=24, hidden=128)
    given = quantised, chosen, dy, *arrays
    found, wanted = (_results(partial(_ours, backend=backend), *given) for backend in ("mosaic", "xla"))
    _assert_near(found, wanted, {"others": 0.02})


@pytest.mark.thorough
def test_matrices_in_a_stack(backend="mosaic"):
    """A layer of a stack has the bits of its own matrices."""
    x, weights, adapter, chosen, _, quantised, _ = _layer("some_nobody", tokens=24, hidden=128)
    stack = jax.tree.map(lambda array: jnp.stack([jnp.flip(array, 0), array, jnp.roll(array, 1, axis=0)]), quantised)

    def ours(quantised, layer):
        return _ours(quantised, chosen, x, weights, adapter, layer=layer, backend=backend)

    found, own = jax.jit(ours)(stack, jnp.int32(1)), jax.jit(ours)(quantised, None)
    np.testing.assert_array_equal(found.astype(jnp.float32), own.astype(jnp.float32))


def test_refusals():
    x, weights, adapter, chosen, matrices, quantised, _ = _layer()
    with pytest.raises(ValueError, match="matrices in FP8 get no gradient"):
        jax.eval_shape(jax.grad(lambda quantised: _ours(quantised, chosen, x, weights, adapter).sum()), quantised)
    with pytest.raises(ValueError, match="x is float32; it must be bfloat16"):
        _ours(quantised, chosen, x.astype(jnp.float32), weights, adapter)
    with pytest.raises(ValueError, match=r"down.change.a must have shape \[experts, rank, inter\]"):
        wrong = adapter._replace(down=adapter.down._replace(a=adapter.down.b))
        _ours(quantised, chosen, x, weights, wrong)
    of_matrices = jax.jit(jax.grad(lambda w: _ours(w, chosen, x, weights, adapter).sum()))(matrices)
    assert not any(map(np.any, jax.tree.leaves(of_matrices)))
