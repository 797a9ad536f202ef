"""The chunked entropies equal the entropies of all logits in f64, with their gradients; log-probabilities too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels import token_log_probs, token_log_probs_and_entropies
from tests.helpers import seeds


def plain(hidden, weight, labels):
    log_probs = jax.nn.log_softmax(hidden @ weight.T)
    entropies = -(jnp.exp(log_probs) * log_probs).sum(axis=1)
    return jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0], entropies


def make_inputs(dtype=jnp.float64, tokens=17, vocab=53):
    rng = seeds.rng()
    hidden, weight = jnp.asarray(rng.normal(size=(tokens, 8)), dtype), jnp.asarray(rng.normal(size=(vocab, 8)), dtype)
    return hidden, weight, jnp.asarray(rng.integers(0, vocab, tokens)), jnp.asarray(rng.normal(size=(2, tokens)), dtype)


@pytest.mark.parametrize("chunk", [5, 1000])
def test_equal_all_logits(chunk):
    """Values and gradients, in f64."""
    with jax.enable_x64(True):
        hidden, weight, labels, cotangents = make_inputs()
        found, pullback = jax.vjp(lambda h, w: token_log_probs_and_entropies(h, w, labels, chunk_tokens=chunk), hidden, weight)
        wanted, plain_pullback = jax.vjp(lambda h, w: plain(h, w, labels), hidden, weight)
        for actual, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-13)
        gradients = pullback(type(found)(*cotangents))
        for actual, expected in zip(gradients, plain_pullback(tuple(cotangents)), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)


def test_f32_near_f64():
    """Very sure and nearly uniform distributions keep their digits in f32."""
    with jax.enable_x64(True):
        hidden, weight, labels, cotangents = make_inputs()
        hidden *= jnp.geomspace(1e-3, 3, len(hidden))[:, None]

        def of(dtype, function):
            cast = [array.astype(dtype) for array in (hidden, weight)]
            values, pullback = jax.vjp(lambda h, w: tuple(function(h, w, labels)), *cast)
            return [*values, *pullback(tuple(cotangents.astype(dtype)))]

        for actual, expected in zip(of(jnp.float32, token_log_probs_and_entropies), of(jnp.float64, plain), strict=True):
            assert actual.dtype == jnp.float32
            np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-5)


def test_log_probs_alone_are_the_same():
    """Where no entropy is used, gradients equal `token_log_probs`'s, and a frozen head gets none."""
    hidden, weight, labels, cotangents = make_inputs(jnp.float32)

    def gradient(function, asked=(0, 1)):
        return jax.grad(lambda h, w: (cotangents[0] * function(h, w)).sum(), asked)(hidden, weight)

    found = gradient(lambda h, w: token_log_probs_and_entropies(h, w, labels, chunk_tokens=5).log_probs)
    for actual, expected in zip(found, gradient(lambda h, w: token_log_probs(h, w, labels, chunk_tokens=5)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)

    def products(asked):
        entropies = jax.grad(lambda h, w: token_log_probs_and_entropies(h, w, labels).entropies.sum(), asked)
        return str(jax.make_jaxpr(entropies)(hidden, weight)).count("dot_general")

    assert [products((0, 1)), products((0,))] == [4, 3]


def test_logits_exist_by_chunk():
    hidden, weight, labels, _ = make_inputs(jnp.float32)
    gradient = jax.jit(
        jax.grad(lambda h, w: sum(map(jnp.sum, token_log_probs_and_entropies(h, w, labels, chunk_tokens=5))), (0, 1))
    )
    text = str(gradient.trace(hidden, weight).jaxpr)
    assert "[5,53]" in text and "17,53" not in text and "20,53" not in text
