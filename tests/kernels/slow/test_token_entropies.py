"""The chunked entropies equal the entropies of all logits in f64, with their gradients; log-probabilities too."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.kernels import token_log_probs, token_log_probs_and_entropies
from tests.helpers import seeds

in_chunks = partial(token_log_probs_and_entropies, chunk_tokens=5)


def plain(hidden, weight, labels):
    log_probs = jax.nn.log_softmax(hidden @ weight.T)
    entropies = -(jnp.exp(log_probs) * log_probs).sum(axis=1)
    return jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0], entropies


def make_inputs(dtype=jnp.float64, tokens=17, vocab=53):
    rng = seeds.rng()
    hidden, weight = jnp.asarray(rng.normal(size=(tokens, 8)), dtype), jnp.asarray(rng.normal(size=(vocab, 8)), dtype)
    return hidden, weight, jnp.asarray(rng.integers(0, vocab, tokens)), jnp.asarray(rng.normal(size=(2, tokens)), dtype)


@partial(jax.jit, static_argnums=0)
def with_gradients(f, hidden, weight, labels, cotangents):
    """Returns the values of both kinds, and the gradients of hidden and weight."""
    values, pullback = jax.vjp(lambda h, w: tuple(f(h, w, labels)), hidden, weight)
    return *values, *pullback(tuple(cotangents))


def test_equal_all_logits():
    """Values and gradients, in f64. Very sure and nearly uniform distributions keep their digits in f32."""
    with jax.enable_x64(True):
        hidden, *others = make_inputs()
        found, expected = (with_gradients(f, hidden, *others) for f in (in_chunks, plain))
        for actual, exact, rtol in zip(found, expected, (1e-12, 1e-12, 1e-10, 1e-10), strict=True):
            np.testing.assert_allclose(actual, exact, rtol=rtol, atol=1e-13 if rtol == 1e-12 else 1e-12)
        inputs = hidden * jnp.geomspace(1e-3, 3, len(hidden))[:, None], *others
        narrow = [a.astype(jnp.float32) if a.dtype == jnp.float64 else a for a in inputs]
        expected = with_gradients(plain, *inputs)
        for actual, exact in zip(with_gradients(token_log_probs_and_entropies, *narrow), expected, strict=True):
            assert actual.dtype == jnp.float32
            np.testing.assert_allclose(actual, exact, rtol=2e-5, atol=1e-5)


def test_log_probs_alone_are_the_same():
    """Where no entropy is used, gradients equal `token_log_probs`'s, and a frozen head gets none."""
    hidden, weight, labels, cotangents = make_inputs(jnp.float32)

    def gradient(function):
        return jax.jit(jax.grad(lambda h, w: (cotangents[0] * function(h, w)).sum(), (0, 1)))(hidden, weight)

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
