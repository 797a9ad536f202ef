"""Attention to a part of the keys equals its definition in f64, gradients too, by XLA and by the Hopper kernels interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels.attention import partial as partial_attention
from moe_jax.kernels.attention.mosaic import masks
from moe_jax.kernels.attention.online_softmax import BackwardInputs, PartialAttention, merge
from tests.helpers.expert_layers import relative_error

SCALE, BATCH = 0.2, 1


def make(rng, queries, keys, heads, kv_heads, head_dim, value_dim, dtype):
    """q, k, v, dout and bounds that never fall. Some intervals are empty: at the beginning, in the middle and at the end."""
    shapes = (queries, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, value_dim), (queries, heads, value_dim)
    q, k, v, dout = (jnp.asarray(rng.normal(size=(BATCH, *shape)), dtype) for shape in shapes)
    first, last = np.sort(rng.integers(0, keys + 1, (BATCH, queries)), 1), np.sort(rng.integers(-1, keys, (BATCH, queries)), 1)
    # Most queries see a key; in some draws the queries at both ends see none.
    first //= 3
    first[:, -7:] = keys
    return q, k, v, dout, (jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32))


def definition(q, k, v, bounds):
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    index = np.arange(k.shape[1])
    first, last = (np.asarray(a)[..., None] for a in bounds)
    seen = ((first <= index) & (index <= last))[:, None]
    weights = jnp.where(seen, jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k) * SCALE), 0)
    total = weights.sum(axis=-1)
    out = jnp.einsum("bhqk,bkhe->bqhe", weights / jnp.where(total > 0, total, 1)[..., None], v)
    return out, jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)


CASES = {
    "several chunks": (90, 150, 4, 2, 16, 8, "float32", "xla", 1e-5),
    "kernels": (130, 200, 2, 1, 64, 64, "bfloat16", "mosaic", 5e-3),
    "kernels, dk and dv apart": (128, 200, 1, 1, 192, 128, "bfloat16", "mosaic", 5e-3),
}


@pytest.mark.parametrize(
    "name, adds, out_dtype",
    [
        pytest.param("several chunks", True, None, marks=pytest.mark.thorough),
        pytest.param("kernels", False, None, marks=pytest.mark.thorough),
        ("kernels, dk and dv apart", True, jnp.bfloat16),
    ],
)
def test_equals_the_definition(rng, monkeypatch, name, adds, out_dtype):
    """Covers a part alone, a part added to other parts, and a last part with rounded results."""
    monkeypatch.setattr(partial_attention, "CHUNK", 64)
    *sizes, backend, tolerance = CASES[name]
    q, k, v, dout, bounds = make(rng, *sizes)

    @jax.jit
    def exactly(q, k, v, dout):
        (out, lse), pullback = jax.vjp(lambda *a: definition(*a, bounds), q, k, v)
        return out, lse, jnp.einsum("bqhe,bqhe->bhq", dout, out), *pullback((dout, jnp.zeros_like(lse)))

    with jax.enable_x64(True):
        exact = [np.asarray(a) for a in exactly(*(jnp.asarray(np.asarray(a, np.float64)) for a in (q, k, v, dout)))]
    wanted_out, wanted_lse, delta, *wanted = (jnp.asarray(a, jnp.float32) for a in exact)

    def before(shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32) if adds else 0.0

    sums, of_queries, of_keys = (
        (before(wanted_out.shape), before(wanted_lse.shape)),
        before(q.shape),
        (before(k.shape), before(v.shape)),
    )
    if adds:
        # Some queries saw no key in the previous part either.
        sums = sums[0].at[:, ::3].set(0), sums[1].at[:, :, ::3].set(-jnp.inf)

    @jax.jit
    def found(q, k, v, dout, lse, delta, *previous):
        previous = previous if adds else (None,) * 3
        operands = BackwardInputs(q, k, v, dout, lse, delta), bounds
        options = {"scale": SCALE, "backend": backend}
        last = options | {"out_dtype": out_dtype}
        out, lse = partial_attention.forward(q, k, v, bounds, previous=previous[0], **last)
        dq = partial_attention.gradient_of_queries(*operands, previous=previous[1], **last)
        return out, lse, dq, *partial_attention.gradients_of_keys(*operands, previous=previous[2], **options)

    out, lse, *gradients = found(q, k, v, dout, wanted_lse, delta, sums, of_queries, of_keys)
    for actual, expected, added in zip(gradients[1:], wanted[1:], of_keys, strict=True):
        assert actual.dtype == jnp.float32
        assert relative_error(actual - added, expected) < tolerance
    assert lse.dtype == jnp.float32
    assert out.dtype == gradients[0].dtype == (out_dtype or jnp.float32)
    if out_dtype is None:
        assert relative_error(gradients[0] - of_queries, wanted[0]) < tolerance
    else:
        assert relative_error(gradients[0], wanted[0] + of_queries) < tolerance
    if adds:
        wanted_out, wanted_lse = merge(PartialAttention(*sums), PartialAttention(wanted_out, wanted_lse))
    empty = np.isneginf(wanted_lse)
    assert empty.any() and not empty.all()
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    np.testing.assert_array_equal(np.asarray(out).swapaxes(1, 2)[empty], 0)
    assert relative_error(out, wanted_out) < tolerance
    np.testing.assert_allclose(np.where(empty, 0, lse), np.where(empty, 0, wanted_lse), atol=1e-4)


def test_block_steps(rng):
    """The steps cover the blocks in sight, and steps without a mask have every pair visible."""
    block_q, block_kv = 64, 128
    *_, (first, last) = make(rng, 512, 640, 1, 1, 1, 1, "float32")
    index = np.arange(640)
    visible = (np.asarray(first)[..., None] <= index) & (index <= np.asarray(last)[..., None])
    seen = visible.reshape(BATCH, 512 // block_q, block_q, 640 // block_kv, block_kv)
    some, every = seen.any(axis=(2, 4)), seen.all(axis=(2, 4))
    keys_in_sight = masks.TokenInterval(first, last)
    by_queries = np.asarray(masks.n_block_steps(keys_in_sight, 640, block_q, block_kv))
    by_keys = np.asarray(masks.m_block_steps(masks.queries_of_keys(keys_in_sight, 640), 512, block_q, block_kv))
    for rows, direction, has_some, has_every in (
        (by_queries, -1, some, every),
        (by_keys, 1, some.swapaxes(1, 2), every.swapaxes(1, 2)),
    ):
        for row, row_some, row_every in zip(*(a.reshape(-1, a.shape[2]) for a in (rows, has_some, has_every)), strict=True):
            steps = masks.BlockSteps(*row)
            blocks = steps.start + direction * np.arange(steps.total)
            assert 1 <= steps.masked <= steps.full <= steps.total
            assert blocks.min() >= 0 and blocks.max() < len(row_some)
            # The union of a block's intervals may have holes where intervals are empty; an empty block takes one step.
            assert set(np.flatnonzero(row_some)) <= set(blocks)
            assert row_every[blocks[steps.masked : steps.full]].all()
