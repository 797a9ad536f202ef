"""The chunked log-probabilities equal log_softmax over all logits, with their gradients, and never hold those logits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_jax.kernels import token_log_probs
from tests.helpers import seeds


def plain(hidden, weight, labels):
    log_probabilities = jax.nn.log_softmax(hidden @ weight.T)
    return jnp.take_along_axis(log_probabilities, labels[:, None], axis=1)[:, 0]


def make_inputs(dtype=jnp.float64, tokens=17, vocab=53):
    rng = seeds.rng()
    hidden, weight = jnp.asarray(rng.normal(size=(tokens, 8)), dtype), jnp.asarray(3 * rng.normal(size=(vocab, 8)), dtype)
    return hidden, weight, jnp.asarray(rng.integers(0, vocab, tokens)), jnp.asarray(rng.normal(size=tokens), dtype)


@partial(jax.jit, static_argnums=0)
def with_gradients(f, hidden, weight, labels, cotangent):
    """Returns the values, and the gradients of hidden and weight."""
    values, pullback = jax.vjp(lambda h, w: f(h, w, labels), hidden, weight)
    return values, *pullback(cotangent)


in_chunks = partial(token_log_probs, chunk_tokens=5)


@pytest.mark.parametrize("f", [in_chunks, partial(token_log_probs, chunk_tokens=17)], ids=["chunks", "whole"])
def test_equals_log_softmax(f):
    """Values and gradients, in f64."""
    with jax.enable_x64(True):
        inputs = make_inputs()
        (values, *gradients), (wanted, *expected) = (with_gradients(each, *inputs) for each in (f, plain))
        # A value near 0 is the difference of two numbers of the size of the logits.
        np.testing.assert_allclose(values, wanted, rtol=1e-12, atol=1e-13)
        for actual, exact in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(actual, exact, rtol=1e-10, atol=1e-12)


def test_bf16_operands():
    """They give f32, and gradients have the dtypes of the arguments."""
    hidden, weight, labels, cotangent = make_inputs(jnp.float32)
    hidden, weight = hidden.astype(jnp.bfloat16), weight.astype(jnp.bfloat16).astype(jnp.float32)
    values, *gradients = with_gradients(in_chunks, hidden, weight, labels, cotangent)
    assert values.dtype == jnp.float32
    wanted, *exact = with_gradients(plain, hidden.astype(jnp.float32), weight, labels, cotangent)
    np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5)
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, jnp.float32]
    for actual, expected in zip(gradients, exact, strict=True):
        np.testing.assert_allclose(actual.astype(jnp.float32), expected, rtol=0.02, atol=0.02 * np.abs(expected).max())


def test_logits_exist_by_chunk():
    hidden, weight, labels, _ = make_inputs(jnp.float32)
    gradient = jax.jit(jax.grad(lambda h, w: token_log_probs(h, w, labels, chunk_tokens=5).sum(), argnums=(0, 1)))
    text = str(gradient.trace(hidden, weight).jaxpr)
    assert "[5,53]" in text and "17,53" not in text and "20,53" not in text


def test_label_outside_the_vocabulary():
    """It gives NaN for its own token alone; if that token is masked out, all gradients are finite."""
    hidden, weight, labels, _ = make_inputs(jnp.float32)
    wild = labels.at[3].set(-100)
    np.testing.assert_array_equal(np.isnan(jax.jit(token_log_probs)(hidden, weight, wild)), np.arange(17) == 3)

    def masked(hidden, weight, labels):
        return jnp.where(jnp.arange(17) == 3, 0, token_log_probs(hidden, weight, labels)).sum()

    gradient = jax.jit(jax.grad(masked, (0, 1)))
    gradients, expected = (gradient(hidden, weight, ids) for ids in (wild, labels))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), gradients, expected)


def test_replicated_head():
    """Inside `shard_map` the head's gradient is summed over the devices."""
    hidden, weight, labels, _ = make_inputs(jnp.float32)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(token_log_probs, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P("data"))
    gradients, expected = (
        jax.jit(jax.grad(lambda h, w, f=f: jnp.sin(f(h, w, labels)).sum(), (0, 1)))(hidden, weight) for f in (sharded, plain)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradients, expected)


def test_shape_errors():
    hidden, weight, labels, _ = make_inputs(jnp.float32)
    with pytest.raises(ValueError, match=r"labels must have shape \(17,\); got \(16,\)"):
        token_log_probs(hidden, weight, labels[1:])
    with pytest.raises(ValueError, match="hidden must be .*; got"):
        token_log_probs(hidden[None], weight, labels)


def test_frozen_head():
    """Its gradient is not computed, the other gradient is the same, and no logits are computed twice."""
    hidden, weight, labels, _ = make_inputs(jnp.float32)
    of_both, of_hidden = (
        jax.grad(lambda h, w: jnp.sin(token_log_probs(h, w, labels, chunk_tokens=5)).sum(), asked) for asked in ((0, 1), (0,))
    )
    np.testing.assert_allclose(*(jax.jit(f)(hidden, weight)[0] for f in (of_hidden, of_both)), rtol=1e-5, atol=1e-6)
    products = [str(jax.make_jaxpr(f)(hidden, weight)).count("dot_general") for f in (of_both, of_hidden)]
    assert products == [4, 2]


def test_frozen_head_in_bf16():
    """The gradient of hidden is rounded once, and a token that is masked out has none."""
    hidden, weight, labels, cotangent = make_inputs(jnp.float32)
    hidden, weight = hidden.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    cotangent = cotangent.at[3].set(0)
    wild, is_counted = labels.at[3].set(-100), cotangent != 0
    gradient = jax.jit(jax.grad(lambda h: (cotangent * token_log_probs(h, weight, wild)).sum(where=is_counted)))(hidden)
    exact = [array.astype(jnp.float32) for array in (hidden, weight)]
    wanted = jax.jit(jax.grad(lambda h: (cotangent * plain(h, exact[1], labels)).sum()))(exact[0])
    assert gradient.dtype == jnp.bfloat16 and not np.asarray(gradient[3], np.float32).any()
    np.testing.assert_allclose(gradient.astype(jnp.float32), wanted, rtol=0.02, atol=0.02 * np.abs(wanted).max())
