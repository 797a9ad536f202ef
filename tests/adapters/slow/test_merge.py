"""A merged model is plain, and computes what the adapter did; a model without its adapter is the one before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.adapters import merge_adapter, without_adapter
from moe_jax.layers.lora import Frozen, has_adapters
from tests.helpers.adapted_models import assert_near, logits_of, small_model, with_adapters

TOKENS = jnp.arange(12).reshape(2, 6)


def test_merge():
    model = small_model("deepseek_v3")
    before, structure = logits_of(model, TOKENS), jax.tree.structure(nnx.state(model, nnx.Param))
    adapted = with_adapters(model)
    logits = logits_of(adapted, TOKENS)
    np.testing.assert_array_equal(logits_of(without_adapter(adapted), TOKENS), before)
    assert has_adapters(adapted)
    merge_adapter(adapted)
    assert_near(logits_of(adapted, TOKENS), logits, "logits")
    assert not has_adapters(adapted) and not jax.tree.leaves(nnx.state(adapted, Frozen))
    assert jax.tree.structure(nnx.state(adapted, nnx.Param)) == structure


def test_frozen_models_generate():
    """Tokens of a model whose parameters are all frozen have the largest logits of the model without adapters."""
    model, prompt = small_model("qwen3"), [3, 5, 8]
    found = moe_jax.generate(without_adapter(with_adapters(nnx.clone(model))), prompt, max_new_tokens=4)
    expected = logits_of(model, jnp.asarray([prompt + found]))[0, len(prompt) - 1 : -1].argmax(axis=-1)
    np.testing.assert_array_equal(found, expected)


def test_nothing_to_merge():
    with pytest.raises(ValueError, match="no adapters to merge"):
        merge_adapter(small_model("qwen3"))
