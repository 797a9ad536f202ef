"""Each token's sum over the rows of its choices equals numpy's in f64; a choice that no expert computes adds nothing."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels.backends import implementation
from moe_jax.kernels.experts.mosaic.token_sums import columns_at_a_time
from moe_jax.kernels.experts.routing import plan

EXPERTS = 5


def make_rows(rng, tokens, k, features, dtype):
    """Rows in expert order, choices, and weights. A third of the choices is computed elsewhere; rows of nobody are NaN."""
    backend = implementation("mosaic")
    rows = plan(jnp.asarray(rng.integers(-2, EXPERTS, (tokens, k))), EXPERTS, backend.ROW_ALIGNMENT)
    has_pair = np.asarray(rows.pair_of_row)[:, None] < tokens * k
    is_computed = has_pair & (np.arange(rows.num_rows)[:, None] < rows.offsets[-1])
    values = np.where(is_computed, rng.normal(size=(rows.num_rows, features)), np.nan)
    return jnp.asarray(values, dtype), rows, jnp.asarray(rng.normal(size=(tokens, k)), jnp.float32)


def exact(values, rows, weights):
    of_pairs = np.asarray(values, np.float64)[rows.row_of_pair]
    is_computed = np.asarray(rows.row_of_pair < rows.offsets[-1])
    return np.sum(np.where(is_computed[:, :, None], of_pairs * np.asarray(weights, np.float64)[:, :, None], 0), axis=1)


@pytest.mark.parametrize(
    "tokens, shares, k, features, dtype, weighted",
    [
        (19, 1, 8, 1024, "bfloat16", True),
        pytest.param(7, 2, 1, 1536, "float16", False, marks=pytest.mark.thorough),
    ],
)
def test_sums(rng, tokens, shares, k, features, dtype, weighted):
    """Rows that nobody computed, here NaN, do not reach the sums."""
    assert columns_at_a_time(features, k)
    values, rows, weights = make_rows(rng, tokens * shares, k, features, dtype)
    ours = implementation("mosaic").token_sums(values, rows, weights if weighted else None, shares)
    assert {(a.shape, a.dtype.name) for a in ours} == {((tokens, features), dtype)}
    expected, step = exact(values, rows, weights if weighted else jnp.ones_like(weights)), float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.concatenate(ours).astype(np.float64), expected, rtol=step, atol=step)


@pytest.mark.parametrize("backend", ["mosaic", "xla"])
@pytest.mark.parametrize("tokens, k, features", [(6, 2, 192), (6, 9, 512), (0, 2, 512), (4, 0, 512)])
def test_other_sizes(rng, backend, tokens, k, features):
    """Sizes that the kernel does not take are summed too."""
    values, rows, weights = make_rows(rng, tokens, k, features, "float32")
    expected = np.split(exact(values, rows, weights), 2)
    for sums, of_share in zip(implementation(backend).token_sums(values, rows, weights, 2), expected, strict=True):
        np.testing.assert_allclose(sums, of_share, rtol=1e-5, atol=1e-5)


def test_columns_at_a_time():
    """The columns at a time divide all columns. More choices than a warpgroup has registers for give None."""
    sizes = [(2048, 8), (7168, 1), (2560, 6), (2880, 4), (2048, 9), (2048, 0)]
    assert [columns_at_a_time(*size) for size in sizes] == [1024, 1024, 512, None, None, None]
