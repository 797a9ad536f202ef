"""Recomputed layers that keep parts of their residuals have the bits of layers that keep none."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.models.remat import KEPT_PARTS
from tests.helpers import tiny
from tests.helpers.train_steps import make_batch, train

ALL = ",".join(KEPT_PARTS)


def assert_equal_bits(batch, remats, **options):
    """A step with each `remat` ends with equal metrics, gradients (the momentum) and parameters."""
    options |= dict(steps=1, optimizer=optax.sgd(0.1, momentum=0.5))
    (state, metrics), *others = (train(batch, remat=remat, **options) for remat in remats)
    for found in others:
        jax.tree.map(np.testing.assert_array_equal, found, (state, metrics))


def adapted():
    model = tiny.model()
    add_lora(model, LoraSettings(rank=4, targets=("attention", "experts", "router")), rngs=nnx.Rngs(0))
    return model


def test_all_parts(rng):
    """Each part alone is not computed again: `test_remat`."""
    make_model = partial(tiny.model, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    assert_equal_bits(make_batch(rng), [True, ALL], make_model=make_model)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make_model, micro_batches, remats",
    [
        (tiny.model, 2, [True, *KEPT_PARTS]),
        (partial(tiny.deepseek, mtp=1), 1, [1, f"1,{ALL}"]),
        (tiny.dense, 1, [1, f"1,{ALL}"]),
        (adapted, 1, [True, ALL]),
    ],
    ids=["each part", "mtp", "dense", "adapters"],
)
def test_families(rng, make_model, micro_batches, remats):
    assert_equal_bits(make_batch(rng), remats, make_model=make_model, gradient_accumulation=micro_batches)
