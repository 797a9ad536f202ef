"""Experts gathered in FP8: the bits of experts that are rounded after a gather, and half the bytes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moe_jax.kernels import Precision
from moe_jax.kernels.experts.call import TokenPart
from moe_jax.kernels.experts.call import experts as compute
from moe_jax.kernels.experts.weights import ExpertWeights
from moe_jax.layers.passes import LayerArrays, Layers, run_layers
from moe_jax.parallel import ExpertParallel
from moe_jax.parallel.expert import expert_parallel_mlp
from moe_jax.parallel.fsdp import ShardedParameters
from tests.helpers import meshes, seeds

HIDDEN, INTER, EXPERTS, TOKENS = 256, 128, 4, 64


def of_device(shared, own, x, parameters, _):
    experts = parameters["mlp"]["experts"]
    matrices = ExpertWeights.of(experts["gate_up_proj"][...], experts["down_proj"][...])
    return x + compute([TokenPart(x, *shared)], matrices, precision=Precision())[0], ()


def of_devices(shared, own, x, parameters, _):
    experts, how = parameters["mlp"]["experts"], ExpertParallel(capacity_factor=0.5)
    matrices = experts["gate_up_proj"][...], experts["down_proj"][...]
    return x + expert_parallel_mlp(x, *matrices, *shared, how, precision=Precision())[0], ()


def make_program(mesh, params, hops, remat, experts_in_fp8):
    axes, body = mesh.axis_names, of_devices if "expert" in mesh.axis_names else of_device
    options = dict(dtype=jnp.bfloat16, token_axes=axes, hops=hops, experts_in_fp8=experts_in_fp8)
    sharded = ShardedParameters.of(params, mesh, **options)

    def local(params, x, *routing):
        def loss(params, x):
            stage = sharded.enter(params)["stages"][0]
            y, _ = run_layers(Layers(body, sharded.layers[0], remat), LayerArrays(routing, (), stage), x)
            return jax.lax.psum((y.astype(jnp.float32) ** 2).sum(), axes)

        return jax.value_and_grad(loss, (0, 1))(params, x)

    split = P(axes)
    in_specs, out_specs = (sharded.specs, split, split, split), (P(), (sharded.specs, split))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def make_arguments(rng):
    def param(*shape):
        return nnx.Param(jnp.asarray(rng.normal(size=shape) / 16, jnp.float32))

    experts = {"down_proj": param(2, EXPERTS, HIDDEN, INTER), "gate_up_proj": param(2, EXPERTS, 2 * INTER, HIDDEN)}
    x = jnp.asarray(rng.normal(size=(TOKENS, HIDDEN)), jnp.bfloat16)
    weights, chosen = rng.random((TOKENS, 2)), rng.integers(0, EXPERTS, (TOKENS, 2))
    state = nnx.State({"stages": {0: {"mlp": {"experts": experts}}}})
    return state, x, jnp.asarray(weights, jnp.float32), jnp.asarray(chosen, jnp.int32)


@pytest.mark.parametrize(
    "sizes, hops, remat",
    [
        ({"fsdp": 4, "context": 2}, "nccl", True),
        pytest.param({"fsdp": 2}, "copies", False, marks=pytest.mark.thorough),
        pytest.param({"fsdp": 2, "expert": 2}, "nccl", True, marks=pytest.mark.thorough),
        pytest.param({"fsdp": 2, "expert": 2}, "copies", False, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_bits_are_those_of_rounding_behind_a_gather(sizes, hops, remat):
    mesh = meshes.make_mesh(**sizes)
    arguments = make_arguments(seeds.rng())
    found, programs = [], []
    for in_fp8 in (True, False):
        program = make_program(mesh, arguments[0], hops, remat, in_fp8).lower(*arguments).compile()
        programs.append(program.as_text())
        found.append(program(*arguments))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        assert np.abs(np.asarray(b, np.float32)).max() > 0
        np.testing.assert_array_equal(a, b)
    if hops == "nccl":
        travelling = [set(re.findall(r"= (\w+)\[[24],\d{3},\d{3}\]\S* all-gather", text)) for text in programs]
        # XLA on CPUs widens bf16 to f32.
        assert travelling == [{"u8"}, {"f32"}]
