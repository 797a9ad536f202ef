"""Both grouped matmuls against a loop over rows: every routing pattern, group and block boundary, dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels.backends import implementation
from moe_jax.kernels.experts import mosaic, xla
from tests.helpers.compiled_steps import plan, whole


def even(rng, tokens, experts, k):
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :k]


def one_takes_all(rng, tokens, experts, k):
    return np.full((tokens, k), rng.integers(experts))


def some_idle(rng, tokens, experts, k):
    return rng.choice(rng.permutation(experts)[: max(1, experts // 3)], (tokens, k))


def skewed(rng, tokens, experts, k):
    return np.minimum(rng.geometric(0.6, (tokens, k)) - 1, experts - 1)


def nobody(rng, tokens, experts, k):
    return rng.choice([-1, experts, experts + 7], (tokens, k))


def some_nobody(rng, tokens, experts, k):
    return rng.integers(-2, experts + 2, (tokens, k))


PATTERNS = [even, one_takes_all, some_idle, skewed, nobody, some_nobody]
SHAPES = [(50, 6, 3), (1, 128, 8), (200, 4, 1), (90, 1, 1)]


@functools.partial(jax.jit, static_argnames="workspace_bytes")
def all_three(x, rows, w, p, workspace_bytes):
    """Returns the third product twice: alone, and added to existing values, here w."""
    assert workspace_bytes == xla.WORKSPACE_BYTES, "traced under the patched constant"
    return (
        xla.grouped_matmul(x, w, p, source_of_row=p.token_of_row),
        xla.grouped_matmul(rows, w, p, transpose=True),
        xla.grouped_outer(rows, x, p, jnp.float32, b_source_of_row=p.token_of_row),
        xla.grouped_outer(rows, x, p, jnp.float32, b_source_of_row=p.token_of_row, accumulate_into=w),
    )


CASES = [
    *((shape, pattern, how) for shape in SHAPES for how in ("traced", "small workspace") for pattern in PATTERNS),
    *((shape, one_takes_all, "constant routing") for shape in SHAPES),
]


def is_sibling(shape, pattern, how):
    """Every pattern is tried at the first shape, and one pattern at another."""
    return shape != SHAPES[0] and (how != "small workspace" or pattern is not some_nobody or shape != (200, 4, 1))


@pytest.mark.parametrize(
    "shape, pattern, how",
    [pytest.param(*case, marks=pytest.mark.thorough) if is_sibling(*case) else case for case in CASES],
    ids=lambda p: getattr(p, "__name__", str(p)),
)
def test_all_three_against_a_loop(rng, monkeypatch, shape, pattern, how):
    """In a small workspace the experts fall into several groups; with routing known to the compiler, loops have fixed turns."""
    if how == "small workspace":
        monkeypatch.setattr(xla, "WORKSPACE_BYTES", 20_000)
    tokens, experts, k = shape
    n, d = 10, 12
    p = plan(jnp.asarray(pattern(rng, tokens, experts, k), jnp.int32), experts)
    x = rng.standard_normal((tokens, d)).astype(np.float32)
    rows = rng.standard_normal((tokens * k, n)).astype(np.float32)
    w = rng.standard_normal((experts, n, d)).astype(np.float32)
    w[:, 0, 0] = -0.0  # Which adding 0 would turn into 0.

    y, back = np.zeros((tokens * k, n)), np.zeros((tokens * k, d))
    dw = np.zeros((experts, n, d))
    for r, (e, t) in enumerate(zip(np.asarray(p.expert_of_row), np.asarray(p.token_of_row), strict=True)):
        if e < experts:
            y[r], back[r] = w[e] @ x[t].astype(float), rows[r] @ w[e].astype(float)
            dw[e] += np.outer(rows[r], x[t].astype(float))

    if how == "constant routing":
        results = jax.jit(lambda *a: all_three(*a, p, xla.WORKSPACE_BYTES))(x, rows, w)
    else:
        results = all_three(x, rows, w, p, workspace_bytes=xla.WORKSPACE_BYTES)
    *results, total = results
    has_rows = np.bincount(np.asarray(p.expert_of_row), minlength=experts)[:experts] > 0
    np.testing.assert_array_equal(total[has_rows], w[has_rows] + np.asarray(results[2])[has_rows])
    np.testing.assert_array_equal(np.asarray(total)[~has_rows].view(np.int32), w[~has_rows].view(np.int32))
    for got, want in zip(results, (y, back, dw), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6 * max(1, np.abs(want).max()))
        assert not np.any(np.asarray(got)[np.all(want == 0, axis=tuple(range(1, want.ndim)))]), "rows and experts of nobody"


def test_narrow_dtypes_sum_in_f32(rng):
    """4096 addends near 1: a bf16 sum would stop at 256; the exact sum rounds once."""
    dtype = "bfloat16"
    p = plan(jnp.zeros((4096, 1), jnp.int32), 2)
    ones = jnp.ones((4096, 3), dtype)
    values = jnp.asarray(rng.uniform(0.5, 1.5, (4096, 2)), dtype)
    dw = whole(xla.grouped_outer)(values, ones, p, jnp.dtype(dtype))
    assert dw.dtype == dtype
    want = np.asarray(values, np.float64).sum(0)[:, None] * np.ones((1, 3))
    np.testing.assert_allclose(np.asarray(dw[0], np.float64), want, rtol=2.0**-8)
    y = whole(xla.grouped_matmul)(values.T, ones.T[None], plan(jnp.zeros((2, 1), jnp.int32), 1))
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=2.0**-8)


@pytest.mark.parametrize("backend", ["xla", "mosaic"])
def test_products_of_parts_are_summed_in_f32_and_rounded_once(backend):
    """256 and seven times 0.5: bf16 sums would stay at 256."""
    parts = []
    for value in [256] + 7 * [0.5]:
        p = plan(jnp.zeros((1, 1), jnp.int32), 2, mosaic.ROW_ALIGNMENT)
        a = jnp.zeros((p.num_rows, 128), jnp.bfloat16).at[0].set(value)
        parts.append(xla.OuterPart(a, jnp.zeros((p.num_rows, 128), jnp.bfloat16).at[0].set(1), p))
    dw = whole(implementation(backend).grouped_outer_of_parts)(parts, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(dw[0], np.float32), jnp.bfloat16(259.5).astype(np.float32))
    assert not np.asarray(dw[1]).any()


@pytest.mark.parametrize("backend", ["xla", "mosaic"])
def test_products_of_parts_are_added_to_what_is_there(rng, backend):
    """Covers experts with rows in the first part alone, in the second alone, in both and in none."""
    parts, expected = [], rng.normal(size=(4, 128, 64)).astype(np.float32)
    expected[3] = -0.0  # Which adding 0 would turn into 0.
    before = jnp.asarray(expected)
    for experts in ([0, 2], [2, 1]):
        p = plan(jnp.asarray(experts, jnp.int32)[:, None], 4, mosaic.ROW_ALIGNMENT)
        a, b = (np.zeros((p.num_rows, columns)) for columns in (128, 64))
        for row, expert in zip(np.asarray(p.row_of_pair[:, 0]), experts, strict=True):
            a[row], b[row] = (rng.integers(-4, 5, array.shape[1]) for array in (a, b))
            expected[expert] += np.outer(a[row], b[row])
        parts.append(xla.OuterPart(jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16), p))
    total = np.asarray(whole(implementation(backend).grouped_outer_of_parts)(parts, jnp.float32, before))
    np.testing.assert_allclose(total, expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(total[3].view(np.int32), expected[3].view(np.int32))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA counts no FLOPs of the libraries that it calls on a GPU")
def test_work_grows_with_rows_not_with_experts():
    """FLOPs that XLA counts for 4x the experts at the same rows, even routing assumed: a masked dense product takes 4x."""

    def flops(experts):
        p = jax.eval_shape(lambda e: plan(e, experts), jax.ShapeDtypeStruct((2048, 4), jnp.int32))
        x, w = jax.ShapeDtypeStruct((2048, 64), jnp.float32), jax.ShapeDtypeStruct((experts, 32, 64), jnp.float32)
        compiled = jax.jit(lambda x, w, p: xla.grouped_matmul(x, w, p, source_of_row=p.token_of_row)).lower(x, w, p).compile()
        return compiled.cost_analysis()["flops"]

    dense = 2 * 2048 * 4 * 32 * 64
    assert dense <= flops(16) < 2 * dense
    assert flops(64) < 1.5 * flops(16)


def test_blocks_cover_overflow_exactly(rng):
    plan_of, blocks_of = jax.jit(plan, static_argnums=1), jax.jit(xla._overflow_blocks, static_argnums=(1, 2, 3))
    for _ in range(2):
        tokens, experts, k = (int(rng.integers(1, n)) for n in (120, 12, 4))
        p = plan_of(jnp.asarray(skewed(rng, tokens, experts, k), jnp.int32), experts)
        direct, height, turn = int(rng.integers(0, 12)), int(rng.integers(1, 20)), int(rng.integers(1, 5))
        first, expert, start, end = map(np.asarray, blocks_of(p, direct, height, turn))
        covered = [(e, r) for e, s, f in zip(expert, start, end, strict=True) for r in range(s, f)]
        offsets = np.asarray(p.offsets)
        assert covered == [(e, r) for e in range(experts) for r in range(offsets[e] + direct, offsets[e + 1])]
        assert len(expert) >= -(-first[-1] // turn) * turn, "a turn reads its blocks past the last one"
