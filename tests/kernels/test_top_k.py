"""The kernel of top-k chooses as `lax.top_k`, in its order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels import top_k
from moe_jax.kernels.top_k import top_k_indices
from tests.helpers import seeds

SPECIAL = np.asarray([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45], np.float32)


def places(x, k):
    found = top_k._top_k(jnp.asarray(x), k=k)
    np.testing.assert_array_equal(found, jax.lax.top_k(x, k)[1])
    return found


@pytest.mark.parametrize(("columns", "k"), [(128, 8), (256, 6), (8, 8), (24, 9)])
def test_order(columns, k):
    """Tiles of distinct numbers, of many equal ones, and of infinities, NaN and zeros of both signs."""
    rng = seeds.rng()
    distinct = rng.normal(size=(64, columns))
    equal = rng.integers(-2, 3, size=(64, columns))
    special = rng.choice(SPECIAL, size=(64, columns))
    places(np.concatenate([distinct, equal, special]).astype(np.float32), k)


def test_rows_of_one_number():
    """Each NaN of all ones is chosen once too."""
    x = np.zeros((64, 16), np.float32)
    x[1], x[2] = np.nan, np.full(16, 0xFFFFFFFF, np.uint32).view(np.float32)
    np.testing.assert_array_equal(places(x, 16), np.broadcast_to(np.arange(16), (64, 16)))


def test_gradient(monkeypatch):
    """The choice has none, in the kernel too."""
    monkeypatch.setattr(top_k, "_has_kernel", lambda x: True)
    x = jnp.asarray(seeds.rng().normal(size=(64, 8)), jnp.float32)

    def chosen_sum(x):
        p = jax.nn.softmax(x)
        return jnp.take_along_axis(p, top_k_indices(p, 2), axis=1).sum()

    def expected_sum(x):
        return jax.lax.top_k(jax.nn.softmax(x), 2)[0].sum()

    np.testing.assert_allclose(jax.jit(jax.grad(chosen_sum))(x), jax.grad(expected_sum)(x), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "backend", "expected"),
    [
        ((1024, 128), jnp.float32, None, True),
        ((131072, 8), jnp.float32, "mosaic", True),
        ((1024, 128), jnp.float32, "xla", False),
        ((1024, 128), jnp.bfloat16, None, False),
        ((1024, 512), jnp.float32, None, False),
        ((1024, 60), jnp.float32, None, False),
        ((960, 128), jnp.float32, None, False),
        ((1056, 128), jnp.float32, None, False),
    ],
)
def test_sizes(monkeypatch, shape, dtype, backend, expected):
    """The kernel is taken on Hopper for many rows of f32 that fit its registers, unless the user chose another backend."""
    monkeypatch.setattr(top_k, "splitting_refusal", lambda: None)
    monkeypatch.delenv("MOE_JAX_BACKEND", raising=False)
    if backend is not None:
        monkeypatch.setenv("MOE_JAX_BACKEND", backend)
    x = jax.ShapeDtypeStruct(shape, dtype)
    for capability, has_kernel in ((None, False), ("9.0", expected)):
        monkeypatch.setattr(top_k, "compute_capability", lambda: capability)  # noqa: B023
        assert top_k._has_kernel(x) == has_kernel


def test_more_than_columns():
    with pytest.raises(ValueError, match="k is 9; it must be 1 to 8, the number of columns"):
        top_k._top_k(jnp.zeros((64, 8)), k=9)
