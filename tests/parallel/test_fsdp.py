"""Layouts that are refused, parts that cut blocks of FP8, and gathers of FP8 on H200s. `test_fsdp_fp8.py` computes."""

import re
from collections import Counter

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from moe_jax.parallel import ShardedParameters
from tests.helpers import tiny
from tests.helpers.h200 import needs_compiler, run_script


def test_experts_that_do_not_divide():
    mesh = AbstractMesh((8,), ("expert",), axis_types=(AxisType.Auto,))
    params = nnx.state(tiny.model(), nnx.Param)
    with pytest.raises(ValueError, match="4 experts cannot be divided among expert=8 devices; use a divisor"):
        ShardedParameters.of(params, mesh, dtype=jnp.float32, token_axes=("expert",))


@pytest.mark.parametrize("devices, travels", [(2, True), (4, True), (8, False)])
def test_parts_that_cut_blocks_travel_in_bf16(devices, travels):
    """Eight devices keep 32 or 16 rows of a matrix each if there are four experts, and four devices keep a whole one."""
    mesh = AbstractMesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,))
    params = nnx.state(tiny.model_for_fp8(), nnx.Param)
    options = dict(dtype=jnp.bfloat16, token_axes=("fsdp",))
    (gather,) = ShardedParameters.of(params, mesh, experts_in_fp8=True, **options).layers
    assert len(gather.in_fp8) == (2 if travels else 0)
    (gather,) = ShardedParameters.of(params, mesh, **options).layers
    assert not gather.in_fp8
    left_out = [i < 1 for i in range(len(gather.gathers))]
    (gather,) = ShardedParameters.of(params, mesh, experts_in_fp8=True, **options).layers
    assert gather.without(left_out).in_fp8 == {i - 1 for i in gather.in_fp8 if i}


GATHERED = """
from moe_jax.kernels import Precision
from moe_jax.kernels.experts.call import TokenPart, experts
from moe_jax.kernels.experts.weights import ExpertWeights
from moe_jax.layers.passes import LayerArrays, Layers
from moe_jax.layers.passes import run_layers
from moe_jax.parallel.fsdp import LayerGather
from moe_jax.parallel.collectives.hops import COPIES, MANY_AT_ONCE

mesh, hops = make_mesh(2, "fsdp"), sys.argv[1]
gather = LayerGather((((-3, ("fsdp",)),),) * 2, bf16, hops, frozenset({0, 1}))

def body(shared, per_layer, x, w, _):
    (y,) = experts([TokenPart(x, *shared)], ExpertWeights.of(*w), precision=Precision(), backend="mosaic")
    return x + y, ()

def local(w, x, *routing):
    def loss(w):
        return run_layers(Layers(body, gather, True), LayerArrays(routing, (), w), x)[0].astype(f32).sum()
    return jax.grad(loss)(w)

split, of_layers = PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")
f = jax.shard_map(local, mesh=mesh, in_specs=(of_layers, split, split, split), out_specs=of_layers)
place = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
w = place((3, 8, 1024, 512), bf16, of_layers), place((3, 8, 512, 512), bf16, of_layers)
tokens = place((4096, 512), bf16, split), place((4096, 2), f32, split), place((4096, 2), i32, split)
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    print(jax.jit(f).lower(w, *tokens).compile(COPIES | MANY_AT_ONCE if hops == "copies" else None).as_text())
"""


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("hops", ["nccl", "copies"])
def test_h200s_gather_bytes(hops):
    """Matrices arrive as bytes before the loops and in them, forward and backward; gradients leave in bf16."""
    text = run_script(GATHERED, hops)
    name = "all-gather" if hops == "nccl" else "collective-permute"
    lines = [line for line in text.splitlines() if re.search(rf" {name}(-start)?\(", line)]
    of_matrices = re.compile(r"(\w+)\[(?:\d,)?[48],(?:1024|512),512\]")
    found = Counter(dtype for line in lines for dtype in set(of_matrices.findall(line)))
    # Each brings both matrices of a layer and their scales.
    assert found == ({"u8": 3} if hops == "nccl" else {"u8": 3, "bf16": 2})
