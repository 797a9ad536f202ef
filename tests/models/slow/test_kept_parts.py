"""Recomputed layers that keep parts of their residuals have the bits of layers that keep none."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.models.remat import KEPT_PARTS
from tests.helpers import tiny
from tests.helpers.train_steps import make_batch, train

ALL = ",".join(KEPT_PARTS)


def assert_equal_bits(batch, remats, **options):
    """Two steps with each `remat` end with equal metrics and parameters."""
    (state, metrics), *others = (train(batch, remat=remat, **options) for remat in remats)
    for found in others:
        jax.tree.map(np.testing.assert_array_equal, found, (state, metrics))


@pytest.mark.parametrize("remats", [[True, ALL], pytest.param([True, *KEPT_PARTS], marks=pytest.mark.thorough)], ids=len)
def test_all_parts_and_each_alone(rng, remats):
    make_model = partial(tiny.model, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    assert_equal_bits(make_batch(rng), remats, make_model=make_model)


@pytest.mark.thorough
def test_families(rng):
    assert_equal_bits(make_batch(rng), [1, f"1,{ALL}"], make_model=partial(tiny.deepseek, mtp=1))


@pytest.mark.thorough
def test_adapters(rng):
    def make_model():
        model = tiny.model()
        add_lora(model, LoraSettings(rank=4, targets=("attention", "experts", "router")), rngs=nnx.Rngs(0))
        return model

    assert_equal_bits(make_batch(rng), [True, ALL], make_model=make_model)
