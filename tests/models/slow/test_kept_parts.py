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


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.thorough), jnp.bfloat16])
def test_each_part_alone_and_all(rng, dtype):
    make_model = partial(tiny.model, dtype=dtype, param_dtype=dtype)
    assert_equal_bits(make_batch(rng), [True, *KEPT_PARTS, ALL], make_model=make_model)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make_model",
    [*(pytest.param(make, marks=pytest.mark.thorough) for make in (tiny.deepseek, tiny.dense)), partial(tiny.deepseek, mtp=1)],
    ids=["deepseek", "dense", "mtp"],
)
def test_families(rng, make_model):
    assert_equal_bits(make_batch(rng), [1, f"1,{ALL}"], make_model=make_model)


@pytest.mark.thorough
def test_micro_batches(rng):
    assert_equal_bits(make_batch(rng), [True, ALL], gradient_accumulation=2)


@pytest.mark.thorough
def test_adapters(rng):
    def make_model():
        model = tiny.model()
        add_lora(model, LoraSettings(rank=4, targets=("attention", "experts", "router")), rngs=nnx.Rngs(0))
        return model

    assert_equal_bits(make_batch(rng), [True, ALL], make_model=make_model)
