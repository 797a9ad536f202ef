"""A residual sum and its norm in one kernel round where the modules round."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels.decode.add_norm import ExpertRows, SharedRows, add_experts, add_splits
from moe_jax.layers.linear import rms_norm
from tests.helpers import seeds
from tests.helpers.serving_races import normal

TOKENS, HIDDEN, EXPERTS, K, EPS = 5, 256, 128, 2, 1e-6


def check(found, x, y, weight):
    np.testing.assert_array_equal(found.x, x + y)
    # The sums of squares are formed in another order.
    expected = np.asarray(rms_norm(x + y, weight, EPS), np.float32)
    np.testing.assert_allclose(np.asarray(found.normed, np.float32), expected, rtol=2**-7)


def test_sum_of_splits():
    rng = seeds.rng()
    x, splits, weight = normal(rng, TOKENS, HIDDEN), normal(rng, 3, TOKENS, HIDDEN, dtype=jnp.float32), normal(rng, HIDDEN)
    check(add_splits(x, splits, weight, eps=EPS), x, (splits[0] + splits[1] + splits[2]).astype(x.dtype), weight)


@pytest.mark.parametrize("layout", ["pairs", "a block an expert", "places", "rows of pairs"])
def test_sum_over_choices(layout):
    rng = seeds.rng()
    x, weight = normal(rng, TOKENS, HIDDEN), normal(rng, HIDDEN)
    weights = normal(rng, TOKENS, EXPERTS, dtype=jnp.float32)
    ids = np.full((TOKENS, EXPERTS), 77)
    ids[:, :K] = np.stack([rng.permutation(4)[:K] for _ in range(TOKENS)])
    # The last token is padding.
    ids[-1] = EXPERTS
    offsets = np.concatenate([[0, 64, 128, 192], np.full(EXPERTS - 3, 256)])
    place = rng.permuted(np.tile(np.arange(TOKENS)[:, None], EXPERTS), axis=0)
    rows = np.array(normal(rng, TOKENS * K if layout == "pairs" else 300, HIDDEN))
    own = [np.arange(TOKENS), place[np.arange(TOKENS)[:, None], ids[:, :K] % EXPERTS].T][layout == "places"]
    of_pairs = (offsets[ids[:, :K]].T + own).T
    if layout == "pairs":
        of_pairs = np.arange(TOKENS * K).reshape(TOKENS, K)
    else:
        rows[offsets[-1] :] = np.nan
    outputs = ExpertRows(
        jnp.asarray(rows),
        weights,
        jnp.asarray(ids, jnp.int32),
        None if layout == "pairs" else jnp.asarray(offsets, jnp.int32),
        jnp.asarray(place, jnp.int32) if layout == "places" else None,
    )
    if layout == "rows of pairs":
        outputs = outputs._replace(offsets=None, row_of_pair=jnp.asarray(of_pairs, jnp.int32))
    found = add_experts(x, outputs, weight, eps=EPS, k=K)
    terms = rows.astype(np.float32)[of_pairs] * np.asarray(weights)[:, :K, None]
    terms[-1] = 0
    check(found, x, jnp.asarray(terms[:, 0] + terms[:, 1]).astype(x.dtype), weight)


def test_shared_experts():
    """Their partial sums, times the sigmoid of a token's score, are the last term of the sum."""
    rng = seeds.rng()
    x, weight, gate = normal(rng, TOKENS, HIDDEN), normal(rng, HIDDEN), normal(rng, HIDDEN)
    rows, splits = normal(rng, TOKENS * K, HIDDEN), normal(rng, 2, TOKENS, HIDDEN, dtype=jnp.float32)
    weights, ids = normal(rng, TOKENS, EXPERTS, dtype=jnp.float32), jnp.zeros((TOKENS, EXPERTS), jnp.int32)
    found = add_experts(x, ExpertRows(rows, weights, ids, None, None), weight, SharedRows(splits, x, gate), eps=EPS, k=K)
    scores = jnp.einsum("th,h->t", x, gate, preferred_element_type=jnp.float32)
    terms = np.asarray(rows, np.float32).reshape(TOKENS, K, HIDDEN) * np.asarray(weights)[:, :K, None]
    terms = np.append(terms, (splits[:1] + splits[1:]).swapaxes(0, 1) / (1 + np.exp(-scores[:, None, None])), axis=1)
    np.testing.assert_allclose(np.asarray(found.x, np.float32), x + terms.sum(axis=1), rtol=2**-7, atol=2**-6)
