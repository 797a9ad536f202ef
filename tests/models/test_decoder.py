"""What every architecture's frame does with tokens and segments."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from moe_jax.layers.cache import init_cache


def test_a_segment_id_that_comes_again_is_another_document():
    model, tokens = tiny.dense(), jnp.arange(6)[None]
    again, other = (model(tokens, segment_ids=jnp.array([ids])).logits for ids in ([1, 1, 2, 2, 1, 1], [1, 1, 2, 2, 3, 3]))
    np.testing.assert_array_equal(again, other)


def test_tokens_of_any_integer_dtype_go_into_a_cache_while_there_is_room():
    model, positions = tiny.dense(), jnp.arange(3)[None]
    cache = init_cache(model.config, 1, 4, jnp.float32)
    tokens = jnp.array([[5, 6, 7]], jnp.uint16)
    output = model(tokens, positions, cache=cache)
    np.testing.assert_allclose(output.logits, model(tokens).logits, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="room for 4 tokens and holds 3; got 2 more"):
        model(tokens[:, :2], positions[:, :2] + 3, cache=output.cache)
