"""Tables compiled for two H200s: no branch copies the slots or the sums that pass through it."""

import math
import re

import pytest

from tests.helpers.h200 import needs_compiler, run_script

TOY = """
from tests.helpers import pipelines
from tests.helpers.toy_pipeline import toy_passes
from moe_jax.kernels.shapes import vary_as
from moe_jax.parallel.collectives.hops import NO_COPIES
from moe_jax.parallel.pipeline.executor import run_table
from moe_jax.parallel.pipeline.table import lockstep_table

LONG, name = 2**20, sys.argv[1]
table = lockstep_table(pipelines.MAKE[name](2, 1, 4))
chunks = 2 if name == "dualpipe" else 1

def local(weights, inputs):
    own, inputs = vary_as((weights, inputs), jax.lax.axis_index("pipe"))
    totals = jnp.zeros(()), jnp.zeros_like(own), jnp.zeros_like(inputs)
    value, *gradients = run_table(toy_passes(own, inputs, lambda x: x), table, totals)
    return value, gradients

mesh = make_mesh(2, "pipe")
whole, split = PartitionSpec(), PartitionSpec("pipe")
shapes = [((2 * chunks, LONG), split), ((4, LONG), whole)]
arguments = [jax.ShapeDtypeStruct(shape, f32, sharding=NamedSharding(mesh, spec)) for shape, spec in shapes]
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(split, whole), out_specs=(whole, [split, split])))
    print(program.lower(*arguments).compile(compiler_options=NO_COPIES).as_text())
"""


MODEL = """
import moe_jax
from flax import nnx
from moe_jax.layers.router import ExpertBias
from moe_jax.models.execution import Execution
from moe_jax.parallel import Parallelism
from moe_jax.parallel.choices import MESH_AXES
from moe_jax.parallel.layout import parameter_path, parameter_sharding
from moe_jax.parallel.pipeline.chunks import split_layers
from moe_jax.train import NextToken
from moe_jax.train.objective import as_objective
from moe_jax.train.pipelined import accumulate_pipelined

sizes = dict(vocab_size=4096, hidden_size=1024, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
             num_key_value_heads=4, head_dim=128, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=512)
config = moe_jax.Qwen3MoeConfig(**sizes)
model = nnx.eval_shape(lambda: moe_jax.from_config(config, dtype=bf16, param_dtype=bf16, rngs=nnx.Rngs(0)))
graph, params, fixed = nnx.split(model, nnx.Param, ExpertBias)
mesh = Mesh(make_mesh(2, "x").devices.reshape(2, 1, 1, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 5)
parallelism = Parallelism(mesh, pipe_chunks=2, pipe_schedule="zb-v")

def placed(key_path, a):
    path = parameter_path(key_path)
    if path[0] == "stages":
        a = jax.eval_shape(lambda a: split_layers(a, 2, 2), a)
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=parameter_sharding(path, a.shape, mesh))

whole = NamedSharding(mesh, PartitionSpec())
names = "tokens", "labels", "loss_mask", "positions", "segment_ids"
batch = {name: jax.ShapeDtypeStruct((4, 1024), i32, sharding=whole) for name in names}
batch["num_labels"] = jax.ShapeDtypeStruct((), f32, sharding=whole)
call = accumulate_pipelined(as_objective(NextToken(), 4), graph, Execution(remat=True), parallelism, 4)
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    lowered = jax.jit(call).lower(jax.tree.map_with_path(placed, params), fixed, batch)
print(lowered.compile(compiler_options=parallelism.compiler_options).as_text())
"""


def large_copies(program, least):
    """The copies of at least `least` numbers in the loop over ticks and in its branches."""
    computations = re.split(r"\n(?=%|ENTRY)", program)
    assert any(" conditional(" in computation for computation in computations)
    inner = [line for c in computations if c.startswith("%region_") for line in c.splitlines()]
    copies = [(line, re.search(r"= \(?\w+\[([\d,]+)\]\S* (copy|copy-start)\(", line)) for line in inner]
    return [line for line, found in copies if found and math.prod(map(int, found[1].split(","))) >= least]


@needs_compiler
@pytest.mark.parametrize("name", [pytest.param("dualpipe", marks=pytest.mark.thorough), "zb-h1"])
def test_toy(name):
    assert not large_copies(run_script(TOY, name), 2**20)


@needs_compiler
@pytest.mark.thorough
def test_model():
    """ZB-V of a model with experts, in which XLA copied every product twice a tick without `NO_COPIES`."""
    assert not large_copies(run_script(MODEL), 2**20)
