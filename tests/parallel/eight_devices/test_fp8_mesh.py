"""Experts in FP8 on a mesh: steps beside those of one device, and the meshes that are refused."""

import math

import expert_layers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import seeds
import tiny
from jax.sharding import PartitionSpec as P
from train_steps import make_batch, train

from moe_jax.kernels import Precision, experts_mlp
from moe_jax.parallel import ExpertParallel, Parallelism, make_mesh
from moe_jax.parallel.expert import expert_parallel_mlp


def _mesh(**sizes):
    return make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])


def _model():
    made = tiny.model_for_fp8()
    made.set_precision("fp8")
    return made


@pytest.mark.parametrize(
    "sizes",
    [{"data": 2}, {"fsdp": 2}, {"expert": 2}, pytest.param({"data": 2, "fsdp": 2, "context": 2}, marks=pytest.mark.thorough)],
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


def test_experts_over_devices():
    """Outputs and gradients are those of one device, although sums over choices are in another order."""
    rng = seeds.rng()
    x, w_gate_up, w_down, weights, chosen = expert_layers.make_layer(rng, "random", 64, 4, 2, 128, 128)
    dy = jnp.asarray(rng.normal(size=x.shape), x.dtype)
    arrays = x, w_gate_up, w_down, weights
    mesh, spread, whole = meshes.make_mesh(expert=2), P("expert"), Precision(kept="fp8")

    def on_one(*arrays):
        return experts_mlp(*arrays, chosen, precision=whole)

    def on_two(x, w_gate_up, w_down, weights):
        def local(x, w_gate_up, w_down, weights, chosen):
            how = ExpertParallel(shadow_experts=0)
            return expert_parallel_mlp(x, w_gate_up, w_down, weights, chosen, how, precision=whole)[0]

        on_mesh = jax.shard_map(local, mesh=mesh, in_specs=(spread,) * 5, out_specs=spread)
        return on_mesh(x, w_gate_up, w_down, weights, chosen)

    found, expected = (jax.jit(lambda dy, f=f: _with_gradients(f, arrays, dy))(dy) for f in (on_two, on_one))
    for a, b in zip(found, expected, strict=True):
        assert meshes.relative_error(a, b) < 0.01


def _with_gradients(f, arrays, dy):
    y, pullback = jax.vjp(f, *arrays)
    return y, *pullback(dy)


@pytest.mark.thorough
def test_overlapping_micro_batches():
    batch = make_batch(seeds.rng())
    options = dict(steps=1, make_model=_model, gradient_accumulation=2)
    found = [
        train(batch, Parallelism(_mesh(expert=2), overlap_micro_batches=overlap), **options)[1][0] for overlap in (False, True)
    ]
    np.testing.assert_allclose(found[0]["loss"], found[1]["loss"], rtol=1e-2)
    np.testing.assert_allclose(found[0]["grad_norm"], found[1]["grad_norm"], rtol=0.05)


def test_pipes_are_refused():
    with pytest.raises(ValueError, match="a mesh without pipe"):
        train(make_batch(seeds.rng()), Parallelism(_mesh(pipe=2)), steps=1, make_model=_model, gradient_accumulation=2)
