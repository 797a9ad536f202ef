"""Experts in FP8 on a mesh: steps beside those of one device, and the meshes that are refused."""

import math

import jax
import numpy as np
import pytest
import seeds
import tiny
from train_steps import make_batch, train

from moe_jax.parallel import Parallelism, make_mesh


def _mesh(**sizes):
    return make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])


def _model():
    made = tiny.model_for_fp8()
    made.set_precision("fp8")
    return made


@pytest.mark.parametrize(
    "sizes",
    [{"data": 2}, {"fsdp": 2}, pytest.param({"data": 2, "fsdp": 2, "context": 2}, marks=pytest.mark.thorough)],
    ids=str,
)
def test_steps_are_near_those_of_one_device(sizes):
    """Weights travel in bf16 before they are rounded again: numbers differ by a rounding of FP8 now and then."""
    batch = make_batch(seeds.rng())
    options = dict(steps=1, make_model=_model, gradient_accumulation=2)
    _, (expected,) = train(batch, **options)
    _, (metrics,) = train(batch, Parallelism(_mesh(**sizes)), **options)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-2)
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=0.05)


def test_refused_meshes():
    batch = make_batch(seeds.rng())
    options = dict(steps=1, make_model=_model)
    with pytest.raises(ValueError, match="FP8 needs experts that lie on one device"):
        train(batch, Parallelism(_mesh(expert=2)), **options)
