"""A prefill in two halves, compiled for two H200s: the tokens of one half travel while the other computes its attention."""

import re

import pytest

from tests.helpers.h200 import needs_compiler, run_script, scopes_beside_copies

PREFILL = """
from typing import Any, NamedTuple
from flax import nnx
import moe_jax
from moe_jax.generation import devices
from moe_jax.generation.generate import prefill
from moe_jax.generation.request import DecodeOptions
from moe_jax.parallel.collectives.hops import COPIES, MANY_AT_ONCE
from moe_jax.parallel.fsdp import ShardedParameters

config = moe_jax.Qwen3MoeConfig(
    vocab_size=256, hidden_size=2048, intermediate_size=6144, num_hidden_layers=2, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=())
devices_of_x = make_mesh(2, "x")
mesh = Mesh(devices_of_x.devices.reshape(1, 2), devices.AXES, axis_types=(AxisType.Auto,) * 2)

class Cached(NamedTuple):
    hidden: Any
    kept: Any

def prefilled(options, inputs):
    positions = jnp.maximum(jnp.cumsum(inputs.segment_ids, axis=1) - 1, 0)
    hidden, cache = prefill(inputs, positions, inputs.tokens.shape[1] + 64, overlap=options.overlap_prefill)
    return Cached(hidden, tuple(jnp.moveaxis(a, 1, 0) for a in cache.kept))

model = nnx.eval_shape(lambda: moe_jax.from_config(config, dtype=bf16, rngs=nnx.Rngs(0)))
graph, parameters, others = nnx.split(model, nnx.Param, ...)
specs = ShardedParameters.of(parameters, mesh, dtype=bf16, token_axes=devices.AXES).specs

def place(a, spec):
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

parameters = jax.tree.map(place, parameters, specs)
others = jax.tree.map(lambda a: place(a, PartitionSpec()), others)
tokens = jax.ShapeDtypeStruct((4, 4096), i32, sharding=NamedSharding(mesh, PartitionSpec(devices.AXES)))
seed = place(jax.ShapeDtypeStruct((), jnp.uint32), PartitionSpec())
options = DecodeOptions(1, 0.0, None, None, (), True)
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    f = jax.jit(devices.program(prefilled, options, mesh, "copies"), static_argnums=0)
    program = f.lower(graph, parameters, others, tokens, tokens, seed).compile(compiler_options=COPIES | MANY_AT_ONCE)
print(program.as_text())
"""


@pytest.mark.thorough
@needs_compiler
def test_exchange_hides_behind_the_other_half():
    """Two layers of Qwen3-30B-A3B: each copy overlaps a kernel, and three of four a kernel of the other half."""
    program = run_script(PREFILL)
    halves = "forward_1", "forward_2"
    beside = scopes_beside_copies(program, halves)
    assert sorted(half for half, _ in beside) == sorted(2 * halves)
    other = dict(zip(halves, reversed(halves), strict=True))
    assert all(kernels for _, kernels in beside) and sum(other[half] in kernels for half, kernels in beside) >= 3
    # No stack has a cache for each layer, though the loop is that of a forward pass which keeps its layers' inputs.
    assert not re.search(r"bf16\[2,2,1,4160,", program)
