"""`ragged_dot`: dtypes, precision, rows of no group, refusals, the kernels that it launches, and its form for tokamax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_jax.kernels import ragged_dot, ragged_dot_for_tokamax
from moe_jax.kernels.experts.ragged_dot import OF_LAX
from tests.helpers.lowered import launches_on_h200

SIZES = jnp.array([2, 0, 3], jnp.int32)


def operands(rng, dtype=np.float32):
    """5 rows of three groups, and a row of no group."""
    return jnp.asarray(rng.normal(size=(6, 4)), dtype), jnp.asarray(rng.normal(size=(3, 4, 5)), dtype)


@pytest.mark.parametrize(
    "lhs_dtype, rhs_dtype, preferred",
    [("bfloat16", "bfloat16", None), ("bfloat16", "bfloat16", jnp.float32), ("bfloat16", "float32", None)],
)
def test_the_result_has_the_dtype_of_lax(rng, lhs_dtype, rhs_dtype, preferred):
    lhs, rhs = operands(rng)
    lhs, rhs = lhs.astype(lhs_dtype), rhs.astype(rhs_dtype)

    def with_gradients(dot):
        return jax.jit(jax.value_and_grad(lambda lhs, rhs: dot(lhs, rhs, SIZES, None, preferred).sum(), (0, 1)))(lhs, rhs)

    ours, theirs = with_gradients(ragged_dot), with_gradients(jax.lax.ragged_dot)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("precision", ["highest", (jax.lax.Precision.HIGHEST,) * 2])
def test_precision_is_that_of_all_three_products(rng, precision):
    def step(lhs, rhs):
        y, pullback = jax.vjp(lambda *a: ragged_dot(*a, SIZES, precision), lhs, rhs)
        return y, pullback(y)

    text = str(jax.make_jaxpr(step)(*operands(rng)))
    assert text.count("dot_general[") == text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") >= 3


def test_rows_of_no_group_are_neither_read_nor_written(rng):
    lhs, rhs = operands(rng)

    @jax.jit
    def with_gradients(lhs, rhs):
        y, pullback = jax.vjp(lambda *a: ragged_dot(*a, SIZES), lhs, rhs)
        return y, *pullback(jnp.ones_like(y).at[5].set(jnp.nan))

    y, dlhs, drhs = with_gradients(lhs.at[5].set(jnp.nan), rhs.at[1].set(jnp.inf))
    assert not any(np.asarray(a).any() for a in (y[5], dlhs[5], drhs[1]))
    assert all(np.isfinite(a).all() for a in (y, dlhs, drhs))


def test_sizes_beyond_the_rows_are_cut_off(rng):
    lhs, rhs = operands(rng)
    dot = jax.jit(ragged_dot)
    ours, whole = (dot(lhs, rhs, jnp.array(sizes)) for sizes in ([4, -1, 100], [4, 0, 2]))
    np.testing.assert_array_equal(ours, whole)


@pytest.mark.parametrize("m, k, n, g", [(0, 4, 5, 3), (6, 0, 5, 3), (6, 4, 0, 3), (6, 4, 5, 0)])
def test_an_axis_of_length_0_gives_zeros(m, k, n, g):
    y = ragged_dot(jnp.ones((m, k)), jnp.ones((g, k, n)), jnp.zeros(g, jnp.int32))
    assert y.shape == (m, n) and not np.asarray(y).any()


def test_maps_over_sizes_and_rows(rng):
    lhs, rhs = operands(rng)
    sizes = jnp.stack([SIZES, jnp.array([1, 4, 1])])
    rows = jnp.stack([lhs, 2 * lhs])
    ours = jax.jit(jax.vmap(ragged_dot, (0, None, 0)))(rows, rhs, sizes)
    theirs = [jax.lax.ragged_dot(of_one, rhs, own) for of_one, own in zip(rows, sizes, strict=True)]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_matrices_of_all_devices_get_the_sum_of_gradients(rng):
    """The sum is in the program, and shard_map's check of types passes."""
    lhs, rhs = operands(rng)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.shard_map(ragged_dot, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=P("x"))
    assert "psum" in str(jax.make_jaxpr(jax.grad(lambda rhs: split(lhs, rhs, SIZES).sum()))(rhs))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(lhs=jnp.ones(4)), r"lhs must have shape \[m, k\]; got \[4\]"),
        (dict(rhs=jnp.ones((3, 5, 4))), r"rhs must have shape \[g, k, n\] with k=4; got \[3, 5, 4\]"),
        (dict(group_sizes=SIZES[:2]), r"group_sizes must have shape \[g\] with g=3; got \[2\]"),
        (dict(group_sizes=jnp.ones(3)), "group_sizes must have a dtype of integer; got float32"),
        (dict(lhs=jnp.ones((6, 4), int)), "lhs must have a dtype of floating; got int32"),
        (dict(precision=("high", "highest")), r"precision must be one for both operands; got \('high', 'highest'\)"),
        (dict(backend="mosaic"), "'mosaic' does not support this input: lhs @ rhs is float32; it computes in bfloat16"),
        (dict(backend="cuda"), "unknown backend 'cuda'"),
    ],
)
def test_what_does_not_fit_is_named(rng, change, message):
    lhs, rhs = operands(rng)
    with pytest.raises(ValueError, match=message):
        ragged_dot(**dict(lhs=lhs, rhs=rhs, group_sizes=SIZES) | change)


def test_sizes_that_hopper_kernels_cannot_multiply_are_named(rng):
    lhs, rhs = operands(rng, jnp.bfloat16)
    with pytest.raises(ValueError, match="k is 4; it must be a multiple of 64"):
        ragged_dot(lhs, rhs, SIZES, backend="mosaic")
    with pytest.raises(NotImplementedError, match="group_offset must be None"):
        ragged_dot(lhs, rhs, SIZES, group_offset=jnp.int32(1))


@pytest.mark.parametrize("n, gathers", [(1536, 3), (28672, 2)], ids=["Qwen3-30B-A3B", "Mixtral, too wide to gather dy"])
def test_launches_of_a_training_step(n, gathers):
    """lhs is copied to aligned rows in both passes, and dy once for both of its products."""

    def step(lhs, rhs, sizes, dy):
        y, pullback = jax.vjp(lambda lhs, rhs: ragged_dot(lhs, rhs, sizes, backend="mosaic"), lhs, rhs)
        return y, pullback(dy)

    shapes = ((65536, 2048), jnp.bfloat16), ((8, 2048, n), jnp.bfloat16), ((8,), jnp.int32), ((65536, n), jnp.bfloat16)
    launches = launches_on_h200(step, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert len(launches) == gathers + 3


def test_tokamax_calls_it_or_continues_with_the_next(rng):
    lhs, rhs = operands(rng)
    of_tokamax = dict(precision=None, preferred_element_type=None, activation=None, ragged_dot_dimension_numbers=OF_LAX)
    y = ragged_dot_for_tokamax(lhs, rhs, group_sizes=SIZES, **of_tokamax)
    np.testing.assert_array_equal(y, ragged_dot(lhs, rhs, SIZES))
    transposed = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    for other in (dict(activation=jax.nn.relu), dict(ragged_dot_dimension_numbers=transposed), dict(group_offset=jnp.ones(1))):
        with pytest.raises(NotImplementedError, match=f"does not support this call's {next(iter(other))}"):
            ragged_dot_for_tokamax(lhs, rhs, group_sizes=SIZES, **of_tokamax | other)
    with pytest.raises(NotImplementedError, match="lhs and rhs must be arrays; got str"):
        ragged_dot_for_tokamax("quantised", rhs, group_sizes=SIZES)
