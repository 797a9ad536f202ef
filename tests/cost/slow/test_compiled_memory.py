"""The memory that a training step needs when it is compiled for an H200 is what the model of cost predicts."""

import json

import pytest

from tests.helpers.h200 import needs_compiler, run_script

STEP = """
import json
from dataclasses import replace
from flax import nnx
import moe_jax
from moe_jax.config import NAMED_CONFIGS
from moe_jax.cost.memory import memory_bytes
from moe_jax.layers.lora import Frozen
from moe_jax.layers.router import ExpertBias
from moe_jax.models.execution import Execution
from moe_jax.train import NextToken, make_optimizer, make_train_step
from moe_jax.train.compiled_step import needed_bytes, planned_step
from moe_jax.train.master_weights import initial_low_halves
from moe_jax.train.state import TrainState

layers, remat, micro_batches, name = json.loads(sys.argv[1])
config = replace(NAMED_CONFIGS["qwen3-30b-a3b"], num_hidden_layers=layers)
model = nnx.eval_shape(lambda: moe_jax.from_config(config, dtype=bf16, param_dtype=bf16, rngs=nnx.Rngs(0)))
optimizer, graph = make_optimizer(1e-3, name=name), nnx.graphdef(model)

def start(params, bias, frozen):
    moments = optimizer.init(jax.tree.map(lambda a: a.astype(f32), params))
    return TrainState(jnp.zeros((), i32), params, moments, initial_low_halves(params), bias, frozen)

mesh = make_mesh(1, "x")
place = NamedSharding(mesh, PartitionSpec())
state = jax.eval_shape(start, *(nnx.state(model, kind) for kind in (nnx.Param, ExpertBias, Frozen)))
batch = {name: jax.ShapeDtypeStruct((8, 4096), i32) for name in ("tokens", "labels", "loss_mask", "positions", "segment_ids")}
state, batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), (state, batch))
step = make_train_step(graph, optimizer, NextToken(), remat=remat, gradient_accumulation=micro_batches)
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    program = step.compiled(state, batch)
planned = planned_step(graph, None, micro_batches, False, state, batch)
chosen = Execution().with_remat(remat)
kept = dict(optimizer=name, remat=chosen.remat, num_kept=chosen.num_kept, keep=chosen.keep)
predicted = sum(memory_bytes(replace(planned, **kept)).values())
print(json.dumps([needed_bytes(program) + program.memory_analysis().argument_size_in_bytes, predicted]))
"""


@needs_compiler
@pytest.mark.parametrize(
    "layers, remat, micro_batches, optimizer",
    [
        pytest.param(2, 0, 1, "muon", marks=pytest.mark.thorough),
        pytest.param(6, False, 1, "adamw", marks=pytest.mark.thorough),
        pytest.param(6, 3, 4, "adamw", marks=pytest.mark.thorough),
        pytest.param(6, "0,experts", 1, "adamw", marks=pytest.mark.thorough),
        pytest.param(6, "2,router,attention,experts", 4, "adamw", marks=pytest.mark.thorough),
    ],
)
def test_memory_of_a_step(layers, remat, micro_batches, optimizer):
    """One GPU, 8 x 4096 tokens, bf16 parameters."""
    compiled, predicted = json.loads(run_script(STEP, json.dumps([layers, remat, micro_batches, optimizer])).splitlines()[-1])
    assert predicted == pytest.approx(compiled, rel=0.03)
