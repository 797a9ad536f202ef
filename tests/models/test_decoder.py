"""What every architecture's frame does with tokens and segments."""

import jax.numpy as jnp
import numpy as np
import tiny


def test_a_segment_id_that_comes_again_is_another_document():
    model, tokens = tiny.dense(), jnp.arange(6)[None]
    again, other = (model(tokens, segment_ids=jnp.array([ids])).logits for ids in ([1, 1, 2, 2, 1, 1], [1, 1, 2, 2, 3, 3]))
    np.testing.assert_array_equal(again, other)
