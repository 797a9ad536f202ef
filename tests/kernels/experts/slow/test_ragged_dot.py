"""`ragged_dot` and `jax.lax.ragged_dot` are one function: values and both gradients, for hundreds of random group sizes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import kernels
from moe_jax.kernels.experts import xla


def operands(rng, m, k, n, g, dtype="float32"):
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in ((m, k), (g, k, n), (m, n)))


def random_sizes(rng, count, m, g):
    """[count, g]: nearly even and very uneven groups, whose sum is mostly below m. The last four are extremes."""
    sizes = [rng.multinomial(rng.integers(m + 1), rng.dirichlet(np.full(g, rng.choice([0.1, 1, 100])))) for _ in range(count)]
    one, none = np.zeros(g, int), np.zeros(g, int)
    one[rng.integers(g)] = m
    sizes[-4:] = one, none, one[::-1], rng.multinomial(m, np.full(g, 1 / g))
    return jnp.asarray(np.stack(sizes), jnp.int32)


@partial(jax.jit, static_argnums=0)
def of_all_sizes(dot, lhs, rhs, dy, sizes):
    """The result and both gradients for each row of sizes."""

    def of_one(sizes):
        y, pullback = jax.vjp(lambda lhs, rhs: dot(lhs, rhs, sizes), lhs, rhs)
        return y, *pullback(dy)

    return jax.lax.map(of_one, sizes)


def assert_same(ours, theirs, tolerance):
    for name, ours_, theirs_ in zip(("y", "dlhs", "drhs"), ours, theirs, strict=True):
        assert ours_.dtype == theirs_.dtype
        scale = max(1.0, float(jnp.abs(theirs_).max()))
        np.testing.assert_allclose(ours_.astype(float), theirs_.astype(float), rtol=0, atol=tolerance * scale, err_msg=name)


@pytest.mark.parametrize(
    "m, k, n, g, dtype",
    [(37, 6, 5, 4, "float64"), (24, 3, 4, 30, "float32")],
    ids=["few groups, f64", "more groups than most have rows"],
)
def test_equals_lax_for_random_sizes(rng, m, k, n, g, dtype):
    with jax.enable_x64(dtype == "float64"):
        inputs = *operands(rng, m, k, n, g, dtype), random_sizes(rng, 200, m, g)
        ours, theirs = (of_all_sizes(dot, *inputs) for dot in (kernels.ragged_dot, jax.lax.ragged_dot))
        assert_same(ours, theirs, 1e-12 if dtype == "float64" else 3e-6)


def test_equals_lax_with_aligned_rows(rng, monkeypatch):
    """Hopper kernels need groups that begin at multiples of 64 rows; here 8, in XLA."""
    monkeypatch.setattr(xla, "ROW_ALIGNMENT", 8)
    inputs = *operands(rng, 37, 6, 5, 4), random_sizes(rng, 200, 37, 4)
    ours, theirs = (of_all_sizes(dot, *inputs) for dot in (partial(kernels.ragged_dot, backend="xla"), jax.lax.ragged_dot))
    assert_same(ours, theirs, 3e-6)


@pytest.mark.thorough
def test_equals_lax_in_hopper_kernels(rng):
    """bf16, in JAX's interpreter where there is no GPU."""
    inputs = *operands(rng, 70, 64, 128, 3, "bfloat16"), jnp.array([[66, 0, 2]], jnp.int32)
    ours, theirs = (of_all_sizes(dot, *inputs) for dot in (partial(kernels.ragged_dot, backend="mosaic"), jax.lax.ragged_dot))
    assert_same(ours, theirs, 2**-7)
