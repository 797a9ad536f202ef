"""The frame of every architecture: its treatment of tokens and segments."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import moe_jax
from moe_jax.layers.cache import init_cache
from moe_jax.models.execution import Execution
from tests.helpers import tiny


@pytest.fixture(scope="module")
def model():
    return tiny.dense()


def test_repeated_segment_id(model):
    """A segment id that comes again is another document."""
    logits = jax.jit(lambda ids: model(jnp.arange(6)[None], segment_ids=ids).logits)
    again, other = (logits(jnp.array([ids])) for ids in ([1, 1, 2, 2, 1, 1], [1, 1, 2, 2, 3, 3]))
    np.testing.assert_array_equal(again, other)


def test_tokens_in_a_cache(model):
    """Tokens of any integer dtype go into a cache while there is room."""
    positions, cache = jnp.arange(3)[None], init_cache(model.config, 1, 4, jnp.float32)
    tokens = jnp.array([[5, 6, 7]], jnp.uint16)
    run = jax.jit(lambda tokens, cache: model(tokens, positions, cache=cache))
    output = run(tokens, cache)
    np.testing.assert_allclose(output.logits, run(tokens, None).logits, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="room for 4 tokens and holds 3; got 2 more"):
        model(tokens[:, :2], positions[:, :2] + 3, cache=output.cache)


def test_lists_are_tokens(model):
    expected = model(jnp.array([[5, 6, 7]]), segment_ids=jnp.array([[0, 1, 1]])).logits
    np.testing.assert_array_equal(model([[5, 6, 7]], segment_ids=[[0, 1, 1]]).logits, expected)


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([[1, 264]], "tokens must be ids from 0 to 263, the model's vocabulary; got 264"),
        (jnp.array([[1, -100]]), "tokens must be ids from 0 to 263, the model's vocabulary; got -100. Padding takes any id"),
        ([[1.0]], "tokens must be an array of integers .*; got dtype float64"),
        ([["a"]], r"tokens must be an array of integers .*moe_jax.complete\(model, text\) continues it"),
        ([[1, 2], [3]], "the rows have different lengths: pad them, and pass segment_ids of 0 for padding"),
        ([1, 2], r"tokens must be \[batch, seq\]; got shape \(2,\)"),
    ],
)
def test_tokens_that_are_none_are_named(model, tokens, message):
    with pytest.raises(ValueError, match=message):
        model(tokens)


def test_unknown_ids_under_jit(model):
    """Ids outside the vocabulary give NaN where values are not known."""
    assert jnp.isnan(jax.jit(lambda tokens: model(tokens).logits)(jnp.array([[3, 264]]))[0, 1]).all()


@pytest.mark.parametrize(
    "option, message",
    [
        ("attention_mask", "takes no attention_mask: pass it as segment_ids, in which 0 is padding"),
        ("rematt", "takes no option 'rematt'; did you mean remat?"),
        ("labels", "takes no option 'labels'; there are cache, expert_ids, remat"),
    ],
)
def test_unknown_options_are_named(model, option, message):
    with pytest.raises(TypeError, match=message):
        model(jnp.ones((1, 2), int), **{option: 1})


@pytest.mark.parametrize("wrong", [-1, np.int64(-2), 1.5, 2.0, "ofload", "", [1], "٣", "router,router"], ids=repr)
def test_what_is_no_remat_is_named(model, wrong):
    with pytest.raises(ValueError, match=f"remat must be True, False, 'offload' or a number .*; got {re.escape(repr(wrong))}$"):
        model(jnp.ones((1, 2), int), remat=wrong)


def test_numbers_of_numpy_are_remat():
    made = Execution().with_remat(np.int32(1))
    assert made == Execution(remat=True, num_kept=1) and type(made.num_kept) is int


@pytest.mark.parametrize(
    "wrong, meant", [("fp32", "float32"), ("bf16", "bfloat16"), ("flaot16", "float16"), (torch.half, "float16")]
)
def test_dtypes_are_named(wrong, meant):
    for name in ("dtype", "param_dtype"):
        message = f"{name} must be one of bfloat16, float16, float32, float64; got .*; {meant}\\?$"
        with pytest.raises(ValueError, match=message):
            tiny.dense(**{name: wrong})
        with pytest.raises(ValueError, match=message):
            moe_jax.from_pretrained("someone/some-model", **{name: wrong})
    with pytest.raises(ValueError, match="dtype must be one of .*; got 'int32'$"):
        tiny.dense(dtype="int32")
    with pytest.raises(ValueError, match="dtype must be one of .*; got None$"):
        moe_jax.from_pretrained("someone/some-model", dtype=None)


@pytest.mark.parametrize("shape", [(1, 0), (0, 3)])
def test_no_tokens_are_refused(model, shape):
    with pytest.raises(ValueError, match="tokens must hold at least one token"):
        model(jnp.ones(shape, int))


@pytest.mark.parametrize(
    "call", [lambda model: model([[1, 2]]), lambda model: moe_jax.generate(model, [[1, 2]])], ids=["call", "generate"]
)
def test_a_model_that_a_training_step_has_donated_is_named(call):
    model = tiny.model()
    jax.jit(lambda state: state, donate_argnums=0)(nnx.state(model))
    with pytest.raises(
        ValueError, match="arrays that were deleted, by a training step that donated them .* give the trained model"
    ):
        call(model)
