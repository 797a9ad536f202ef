"""An embedding gives rows of its table, or NaN; parameters are drawn."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.layers import linear
from moe_jax.layers.linear import Embedding, draw_normal, normal_parameter


def test_id_outside_the_table():
    """It gives NaN and has no gradient."""
    table = Embedding(4, 3, rngs=nnx.Rngs(0))
    weight = np.asarray(table.weight[...])
    rows = table(jnp.array([[0, 3, -1, 4, -100]]), jnp.float32)
    np.testing.assert_array_equal(rows[0], [weight[0], weight[3], *np.full((3, 3), np.nan)])
    gradient = jax.grad(lambda table: jnp.nansum(table(jnp.array([[3, -1, 3]]), jnp.float32)))(table)
    np.testing.assert_array_equal(gradient.weight[...], [[0] * 3, [0] * 3, [0] * 3, [2] * 3])


def test_draw_in_bf16():
    """Numbers in bf16 equal the f32 ones, rounded."""
    in_f32, in_bf16 = (draw_normal(jax.random.key(0), (64, 64), 0.5, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    assert in_bf16.dtype == jnp.bfloat16
    np.testing.assert_array_equal(in_bf16, in_f32.astype(jnp.bfloat16))


def test_draw_by_parts(monkeypatch):
    """A large parameter is drawn in parts, which all differ."""
    key = nnx.Rngs(0).params()
    small = normal_parameter((6, 10), 0.5, jnp.float32, nnx.Rngs(0))[...]
    np.testing.assert_array_equal(small, jax.random.normal(key, (6, 10)) * 0.5)
    monkeypatch.setattr(linear, "WHOLE_DRAW", 2**10)
    monkeypatch.setattr(linear, "PART", 2**8)
    large = normal_parameter((3, 50, 40), 0.5, jnp.bfloat16, nnx.Rngs(0))[...]
    assert large.shape == (3, 50, 40) and large.dtype == jnp.bfloat16
    rows = np.asarray(large, np.float64).reshape(-1, 40)
    assert abs(rows.std() - 0.5) < 0.03 and abs(rows.mean()) < 0.03 and len(np.unique(rows, axis=0)) == 150
