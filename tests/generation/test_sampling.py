"""Draws follow the restricted distribution, and each row draws for itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.generation.sampling import distribution, sample
from tests.helpers import seeds

LOGITS = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.06, 0.04]))


def frequencies(**options):
    rows = jnp.broadcast_to(LOGITS, (20000, 5))
    keys = jax.random.split(jax.random.key(seeds.integer()), 20000)
    tokens = sample(rows, keys, **options)
    return np.bincount(np.asarray(tokens), minlength=5) / 20000


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(temperature=1.0), [0.4, 0.3, 0.2, 0.06, 0.04]),
        (dict(temperature=0.5), np.array([0.16, 0.09, 0.04, 0.0036, 0.0016]) / 0.2952),
        (dict(temperature=1.0, top_k=2), [4 / 7, 3 / 7, 0, 0, 0]),
        (dict(temperature=1.0, top_k=99), [0.4, 0.3, 0.2, 0.06, 0.04]),
        (dict(temperature=1.0, top_p=0.65), [4 / 7, 3 / 7, 0, 0, 0]),
        (dict(temperature=1.0, top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0, 0]),
        (dict(temperature=1.0, top_p=1e-6), [1, 0, 0, 0, 0]),
        (dict(temperature=1.0, top_k=3, top_p=0.5), [4 / 7, 3 / 7, 0, 0, 0]),
        (dict(temperature=0.0), [1, 0, 0, 0, 0]),
    ],
)
def test_frequencies(options, expected):
    np.testing.assert_allclose(distribution(LOGITS, **options), expected, rtol=1e-5)
    # Five standard deviations of a share of 20000 draws.
    np.testing.assert_allclose(frequencies(**options), expected, atol=5 * np.sqrt(0.25 / 20000))
    assert not frequencies(**options)[np.asarray(expected) == 0].any()


def test_a_row_does_not_depend_on_the_others():
    key = jax.random.key(seeds.integer())
    logits = jax.random.normal(key, (6, 50))
    keys = jax.random.split(key, 6)
    together = sample(logits, keys, temperature=1.0)
    others_changed = sample(logits.at[3:].add(jax.random.normal(key, (3, 50))), keys, temperature=1.0)
    np.testing.assert_array_equal(together[:3], others_changed[:3])
