"""A projection in parts: which tiles and parts sizes get, and the product that the parts add up to."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels import backends
from moe_jax.kernels.decode import project as project_module
from moe_jax.kernels.decode.project import parts_of, project
from tests.helpers import seeds

QKV, OUTPUT = ((4096, 512, 512), 2048), ((2048,), 4096)
"""Rows of the matrices of Qwen3-30B-A3B's projections, and their summands."""

DENSE_QKV, DENSE_DOWN = ((8192, 1024, 1024), 5120), ((5120,), 25600)
"""Rows of the matrices of Qwen3-32B's projections, and their summands."""


@pytest.fixture
def hopper(monkeypatch):
    """Sizes are for a Hopper GPU; the interpreter still runs the kernel."""
    monkeypatch.setattr(backends, "compute_capability", lambda: "9.0")
    monkeypatch.setattr(backends, "num_cores", lambda: 132)


@pytest.mark.parametrize(
    ("tokens", "sizes", "rows", "columns", "splits"),
    [
        (2, QKV, 64, 128, 3),
        (64, QKV, 64, 128, 3),
        (128, QKV, 128, 64, 1),
        (256, QKV, 128, 128, 1),
        (2, OUTPUT, 64, 64, 4),
        (64, OUTPUT, 64, 64, 4),
        (65, OUTPUT, 128, 64, 4),
        (256, OUTPUT, 128, 128, 4),
        (128, DENSE_QKV, 128, 128, 1),
        (256, DENSE_QKV, 128, 128, 1),
        (128, DENSE_DOWN, 128, 128, 3),
        (64, ((1024,), 2048), 64, 64, 4),
    ],
)
def test_parts(hopper, tokens, sizes, rows, columns, splits):
    """Tiles and parts are the fastest that were measured (docs/log/engine.md)."""
    parts = parts_of(tokens, *sizes)
    assert parts is not None
    assert (parts.tile.rows, parts.tile.columns, parts.splits) == (rows, columns, splits)


@pytest.mark.parametrize(
    ("tokens", "heights", "summands"),
    [
        (1, *QKV),
        (64, (128,), 2048),
        (64, (512, 128, 128), 1024),
        (256, *DENSE_DOWN),
        (257, *DENSE_QKV),
        (128, (12288, 12288), 4096),
        (256, (25600,), 5120),
    ],
)
def test_left_to_xla(hopper, tokens, heights, summands):
    """One token; a router and others with tiles for few cores; more tokens or tiles than were timed."""
    assert parts_of(tokens, heights, summands) is None


@pytest.mark.parametrize(("tokens", "heights", "is_taken"), [(3, (128, 80), True), (3, (80, 128), False), (1, (128,), False)])
def test_sum_of_parts(hopper, monkeypatch, tokens, heights, is_taken):
    """No tile reads two matrices: only the last may end within one."""
    monkeypatch.setattr(backends, "num_cores", lambda: 8)
    calls = []
    kernel = project_module.split_matmul
    monkeypatch.setattr(project_module, "split_matmul", lambda *a: calls.append(a) or kernel(*a))
    rng = seeds.rng()
    x, *weights = (jnp.asarray(rng.normal(size=(n, 1088)), jnp.bfloat16) for n in (tokens, *heights))
    # Without jit: its cache knows nothing of the GPU that the test pretends.
    found = np.asarray(project.__wrapped__(x, *weights), np.float64).sum(axis=0)
    exact = np.asarray(x, np.float64) @ np.concatenate([np.asarray(w, np.float64) for w in weights]).T
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-3)
    assert bool(calls) == is_taken
