"""Draws the next token from logits: greedy, temperature, top-k and nucleus (top-p) sampling."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


def sample(
    logits: Float[Array, "batch vocab"],
    keys: Key[Array, "batch"],
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int[Array, "batch"]:
    """Draws one token per row from softmax(logits / temperature), restricted to the top k and then to the top p.

    Temperature 0 returns the argmax. top_p keeps the most likely tokens up to and including the one with which their
    probabilities reach top_p (Holtzman et al., 2020, https://arxiv.org/abs/1904.09751). Tokens of exactly its probability are
    kept too. Each row has its own key: its draw does not depend on the other rows.
    """
    if temperature == 0:
        return jnp.argmax(logits.astype(jnp.float32), axis=-1).astype(jnp.int32)
    return draw(_restricted(logits, temperature, top_k, top_p), keys)


def distribution(
    logits: Float[Array, "... vocab"], *, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> Float[Array, "... vocab"]:
    """Returns the f32 probabilities that `sample` samples from; at temperature 0, a one-hot of the argmax."""
    if temperature == 0:
        return jax.nn.one_hot(jnp.argmax(logits.astype(jnp.float32), axis=-1), logits.shape[-1])
    return jax.nn.softmax(_restricted(logits, temperature, top_k, top_p), axis=-1)


def draw(logits: Float[Array, "batch ... vocab"], keys: Key[Array, "batch"]) -> Int[Array, "batch ..."]:
    """Samples a token per row from softmax(logits), with one PRNG key per row."""
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def folded(keys: Key[Array, "batch"], number) -> Key[Array, "batch"]:
    """Folds `number` (for example the step) into each row's PRNG key, for independent samples."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def _restricted(logits: Float[Array, "... vocab"], temperature: float, top_k: int | None, top_p: float | None):
    """Returns logits / temperature in f32, with -inf for tokens that are cut."""
    logits = logits.astype(jnp.float32) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if top_p is not None and top_p < 1:
        descending = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        smallest = jnp.where(before < top_p, descending, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return logits
