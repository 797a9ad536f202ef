"""Small models with adapters whose factors are all random: with b at zero, gradients of a would be zero."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.adapters.names import OUTSIDE, targets_of
from tests.helpers import seeds
from tests.helpers.hf_reference import load_ours, reference

DEEPSEEK = dict(num_hidden_layers=2, first_k_dense_replace=1)


def small_model(model_type: str, **overrides):
    """Returns a model in f32 of two layers; DeepSeek's first is dense."""
    sizes = DEEPSEEK if model_type.startswith("deepseek") else dict(num_hidden_layers=2)
    return load_ours(reference(model_type, seeds.integer(), **sizes | overrides))


def with_adapters(model, **settings):
    """Adds adapters of rank 6, 2 an expert, to all matrices of the layers; returns the model."""
    of_layers = dict.fromkeys(target.kind for target in targets_of(model) if target.kind not in OUTSIDE)
    targets = settings.pop("targets", tuple(of_layers))
    add_lora(model, LoraSettings(**dict(rank=6, alpha=9.0, targets=targets) | settings), rngs=nnx.Rngs(seeds.integer()))
    randomise(model)
    return model


def randomise(model) -> None:
    """Draws all factors anew, in place."""
    rng = seeds.rng()
    nnx.update(
        model,
        jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.1, a.dtype), nnx.state(model, nnx.LoRAParam)),
    )


def logits_of(model, tokens):
    """Returns the logits, by a program that is compiled once for all models of the same structure."""
    return _logits(*nnx.split(model), tokens)


@partial(jax.jit, static_argnums=0)
def _logits(graph, state, tokens):
    return nnx.merge(graph, state)(tokens).logits


def make_batch(batch=2, seq=12, vocab=97):
    """Returns random tokens; each predicts the next."""
    tokens = jnp.asarray(seeds.rng().integers(0, vocab, (batch, seq + 1)), jnp.int32)
    ones = jnp.ones((batch, seq), jnp.int32)
    positions = jnp.tile(jnp.arange(seq, dtype=jnp.int32), (batch, 1))
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "positions": positions,
        "segment_ids": ones,
        "loss_mask": ones.at[0, 3].set(0),
    }


def assert_near(actual, expected, what, tolerance=1e-5):
    """Relative error in the Frobenius norm."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, what
    error, size = np.linalg.norm(actual - expected), np.linalg.norm(expected)
    assert size > 0 and error <= tolerance * size, f"{what}: relative error {error / max(size, 1e-300):.1e}"
