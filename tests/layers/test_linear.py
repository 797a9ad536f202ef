"""An embedding gives rows of its table, or NaN."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.layers.linear import Embedding


def test_an_id_outside_the_table_is_nan_and_has_no_gradient():
    table = Embedding(4, 3, rngs=nnx.Rngs(0))
    weight = np.asarray(table.weight[...])
    rows = table(jnp.array([[0, 3, -1, 4, -100]]), jnp.float32)
    np.testing.assert_array_equal(rows[0], [weight[0], weight[3], *np.full((3, 3), np.nan)])
    gradient = jax.grad(lambda table: jnp.nansum(table(jnp.array([[3, -1, 3]]), jnp.float32)))(table)
    np.testing.assert_array_equal(gradient.weight[...], [[0] * 3, [0] * 3, [0] * 3, [2] * 3])
