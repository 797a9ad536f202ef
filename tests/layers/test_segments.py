"""Positions restart with each document."""

import jax.numpy as jnp
import numpy as np

from moe_jax.layers.segments import runs, segment_positions


def test_positions_restart_where_the_segment_changes():
    ids = jnp.array([[7, 7, 7, 8, 8, 0], [0, 0, 3, 3, 3, 3], [1, 2, 1, 1, 2, 2]])
    expected = [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3], [0, 0, 0, 1, 0, 1]]
    np.testing.assert_array_equal(segment_positions(ids), expected)


def test_an_id_that_comes_again_is_another_run():
    ids = jnp.array([[7, 7, 0, 8, 7, 7], [0, 0, 3, 3, 0, 3]])
    np.testing.assert_array_equal(runs(ids), [[1, 1, 0, 4, 5, 5], [0, 0, 3, 3, 0, 6]])
