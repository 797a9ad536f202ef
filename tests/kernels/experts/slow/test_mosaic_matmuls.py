"""The grouped matmuls on Hopper, each alone: equal to the xla backend's, with zeros for rows and experts of nobody."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.kernels.experts import mosaic, xla
from moe_jax.kernels.experts.routing import plan
from tests.helpers.expert_layers import ROUTINGS, choose, relative_error


@pytest.mark.parametrize(
    "tokens, experts, k",
    [(0, 3, 2), pytest.param(90, 2, 1, marks=pytest.mark.thorough)],
    ids=["no tokens", "several blocks an expert"],
)
@settings(max_examples=3, deadline=None)
@given(routing=st.sampled_from(ROUTINGS), seed=st.integers(0, 2**31))
def test_three_matmuls(tokens, experts, k, routing, seed):
    """On the same plan they equal the xla backend's, and rows of nobody give zeros."""
    rng = np.random.default_rng(seed)
    rows = plan(jnp.asarray(choose(rng, routing, tokens, experts, k), jnp.int32), experts, mosaic.ROW_ALIGNMENT)
    x, dh = (jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16) for width in (64, 128))
    w = jnp.asarray(rng.normal(size=(experts, 128, 64)), jnp.bfloat16)
    owned = np.asarray(rows.pair_of_row) < rows.row_of_pair.size
    owned &= np.arange(rows.num_rows) < int(rows.offsets[-1])

    for actual, expected in zip(*(all_three(backend, rows, owned, x, dh, w) for backend in (mosaic, xla)), strict=True):
        assert relative_error(actual, expected) < 1e-3
        assert not np.asarray(actual)[~np.asarray(expected).any(axis=tuple(range(1, np.ndim(expected))))].any()


@partial(jax.jit, static_argnums=0)
def all_three(backend, rows, owned, x, dh, w):
    """Returns two products by rows, zero where a row is nobody's, and one by experts. Compiled once a shape."""
    x_rows, source = backend.rows_of_tokens(x, rows)
    dh_rows, dh_source = backend.rows_of_tokens(dh, rows)
    return (
        jnp.where(owned[:, None], backend.grouped_matmul(x_rows, w, rows, source_of_row=source), 0),
        jnp.where(owned[:, None], backend.grouped_matmul(dh_rows, w, rows, source_of_row=dh_source, transpose=True), 0),
        backend.grouped_outer(dh_rows, x_rows, rows, jnp.float32, a_source_of_row=dh_source, b_source_of_row=source),
    )
