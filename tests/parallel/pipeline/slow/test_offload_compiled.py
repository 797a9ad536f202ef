"""A pipeline with remat "offload", compiled for two H200s: the inputs that layers keep are in the host's memory."""

import re

import pytest

from tests.helpers.h200 import needs_compiler, run_script

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

chunks = 2
sizes = dict(vocab_size=512, hidden_size=1024, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
             num_key_value_heads=4, head_dim=128, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256,
             mlp_only_layers=tuple(range(8)))
config = moe_jax.Qwen3MoeConfig(**sizes)
model = nnx.eval_shape(lambda: moe_jax.from_config(config, dtype=bf16, param_dtype=bf16, rngs=nnx.Rngs(0)))
graph, params, fixed = nnx.split(model, nnx.Param, ExpertBias)
mesh = Mesh(make_mesh(2, "x").devices.reshape(2, 1, 1, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 5)
parallelism = Parallelism(mesh, pipe_chunks=chunks)

def placed(key_path, a):
    path = parameter_path(key_path)
    if path[0] == "stages":
        a = jax.eval_shape(lambda a: split_layers(a, 2, chunks), a)
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=parameter_sharding(path, a.shape, mesh))

whole = NamedSharding(mesh, PartitionSpec())
names = "tokens", "labels", "loss_mask", "positions", "segment_ids"
batch = {name: jax.ShapeDtypeStruct((8, 2048), i32, sharding=whole) for name in names}
batch["num_labels"] = jax.ShapeDtypeStruct((), f32, sharding=whole)
call = accumulate_pipelined(as_objective(NextToken(), 8), graph, Execution(remat="offload"), parallelism, 8)
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    lowered = jax.jit(call).lower(jax.tree.map_with_path(placed, params), fixed, batch)
compiled = lowered.compile(compiler_options=parallelism.compiler_options)
print("host", compiled.memory_analysis().host_temp_size_in_bytes)
print(compiled.as_text())
"""


@pytest.mark.thorough
@needs_compiler
def test_slots():
    """Six slots, one for passes that do not exist, of two layers; written and read there, with no second stack."""
    program = run_script(MODEL)
    assert f"host {7 * 2 * 2048 * 1024 * 2}\n" in program
    slots = re.findall(r"bf16\[(?:7,2|14),1,2048,1024\]\{[\d,]+(\S*?)\}", program)
    assert len(slots) > 20 and set(slots) == {":S(5)"}
    copies = re.findall(r"= \(*bf16\[([\d,]+)\]\S* (?:copy|copy-start)\(", program)
    assert not [shape for shape in copies if shape.startswith(("7,2,", "14,"))]
