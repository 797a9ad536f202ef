"""Parts of a softmax merge to the whole, in any order, with gradients; parts without keys change nothing and give no NaN."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.kernels.attention.online_softmax import PartialAttention, merge, softmax_sum

BATCH, QUERIES, HEADS, WIDTH = 1, 3, 2, 4
CUTS = 2, 7


def part(scores, v):
    """Returns attention by scores [batch, heads, queries, keys] to v [batch, keys, width]."""
    weights, lse = softmax_sum(scores)
    return PartialAttention(jnp.einsum("bhqk,bke->bqhe", weights, v), lse)


def make(seed, keys):
    rng = np.random.default_rng(seed)
    scores = 20 * rng.normal(size=(BATCH, HEADS, QUERIES, keys))
    # Some pairs are masked, and the first query sees none at all.
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    scores[:, :, 0] = -np.inf
    return jnp.asarray(scores, jnp.float32), jnp.asarray(rng.normal(size=(BATCH, keys, WIDTH)), jnp.float32)


def merged(scores, v, cuts, order):
    bounds = [0, *sorted(cuts), scores.shape[3]]
    total = PartialAttention(jnp.zeros((BATCH, QUERIES, HEADS, WIDTH)), jnp.full((BATCH, HEADS, QUERIES), -jnp.inf))
    for i in order:
        total = merge(total, part(scores[..., bounds[i] : bounds[i + 1]], v[:, bounds[i] : bounds[i + 1]]))
    return total


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), order=st.permutations(range(3)))
def test_parts_in_any_order(seed, order):
    """They merge to the softmax over all keys."""
    scores, v = make(seed, 9)
    out, lse = map(np.asarray, merged(scores, v, CUTS, order))
    weights = np.exp(np.asarray(scores, np.float64))
    sums = weights.sum(axis=-1)
    np.testing.assert_allclose(np.exp(lse.astype(np.float64)), sums, rtol=1e-4)
    wanted = np.einsum("bhqk,bke->bqhe", weights / np.where(sums, sums, 1)[..., None], v)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    assert (out[:, 0] == 0).all() and np.isneginf(lse[:, :, 0]).all()


def test_gradients():
    """Gradients through parts are finite and equal the gradients through all keys at once."""
    scores, v = make(0, 9)
    direction = np.random.default_rng(100).normal(size=(BATCH, QUERIES, HEADS, WIDTH))

    def value(parts, scores, v):
        out, lse = parts(scores, v)
        return (out * direction).sum() + jnp.where(jnp.isneginf(lse), 0, lse).sum()

    def in_parts(scores, v):
        return merged(scores, v, CUTS, (2, 0, 1))

    gradient = jax.jit(jax.grad(value, argnums=(1, 2)), static_argnums=0)
    of_parts, of_whole = (gradient(f, scores, v) for f in (in_parts, part))
    for actual, wanted in zip(of_parts, of_whole, strict=True):
        assert bool(jnp.isfinite(actual).all())
        np.testing.assert_allclose(actual, wanted, atol=2e-5)


def test_two_empty_parts():
    """They merge to an empty part, with finite gradients."""
    empty = PartialAttention(jnp.zeros((BATCH, QUERIES, HEADS, WIDTH)), jnp.full((BATCH, HEADS, QUERIES), -jnp.inf))
    out, lse = merge(empty, empty)
    assert bool((out == 0).all()) and bool(jnp.isneginf(lse).all())
    gradients = jax.jit(jax.grad(lambda a, b: merge(a, b).out.sum(), argnums=(0, 1)))(empty, empty)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradients))


def test_scores_far_apart():
    """The larger part wins without overflow."""
    ones = jnp.ones((BATCH, QUERIES, HEADS, WIDTH))
    low, high = (jnp.full((BATCH, HEADS, QUERIES), x) for x in (-1e4, 1e4))
    out, lse = merge(PartialAttention(ones, low), PartialAttention(2 * ones, high))
    np.testing.assert_array_equal(out, 2 * ones)
    np.testing.assert_array_equal(lse, high)
