"""Families that differ by switches compute what transformers' models compute, and come back from files; a row adds a family."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import moe_jax
from moe_jax.checkpoint.hf_names import export
from tests.helpers.families import FAMILIES, build, saved_gradients


@pytest.fixture(params=FAMILIES)
def theirs(request, rng):
    return build(request.param, rng)


@pytest.fixture
def ours(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    return moe_jax.from_pretrained(tmp_path, dtype=jnp.float32, progress=False)


def test_logits_and_gradients_equal_those_of_transformers(theirs, ours, rng):
    tokens = rng.integers(3, 96, size=(2, 23))
    direction = rng.normal(size=(2, 23, 96)).astype(np.float32)
    graph, params, biases = nnx.split(ours, nnx.Param, ...)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def value_and_gradients(params):
        logits = nnx.merge(graph, params, biases)(jnp.asarray(tokens)).logits
        return jnp.sum(logits * direction), logits

    (_, logits), gradients = value_and_gradients(params)
    expected = theirs(torch.tensor(tokens)).logits
    (expected * torch.tensor(direction)).sum().backward()
    assert error(logits, expected.detach().numpy()) < 1e-5
    flat = {path: leaf[...] for path, leaf in nnx.to_flat_state(gradients)}
    found, wanted = dict(export(ours.config, flat)), saved_gradients(theirs)
    assert found.keys() == wanted.keys()
    errors = {name: error(found[name], wanted[name]) for name in wanted}
    assert max(errors.values()) < 1e-5, sorted(errors.items(), key=lambda item: -item[1])[:5]


def error(found, wanted):
    """The largest difference, as a part of the largest number."""
    return np.abs(np.asarray(found) - wanted).max() / max(np.abs(wanted).max(), 1e-6)  # an expert without tokens has zeros
