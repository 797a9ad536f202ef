"""A step of adapters compiled for an H200: of frozen weights it has no gradients, no kernels that make them, and no moments."""

import re

import pytest

from tests.helpers.h200 import needs_compiler, run_script

STEP = """
import moe_jax
from flax import nnx
from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.layers.lora import Frozen
from moe_jax.layers.router import ExpertBias
from moe_jax.models.execution import Execution
from moe_jax.train import NextToken, gradients_fn, make_optimizer
from moe_jax.train.master_weights import initial_low_halves
from moe_jax.train.objective import as_objective
from moe_jax.train.state import TrainState, apply_gradients

sizes = dict(vocab_size=4096, hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=128, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)

def make():
    model = moe_jax.from_config(moe_jax.Qwen3MoeConfig(**sizes), dtype=bf16, param_dtype=bf16, rngs=nnx.Rngs(0))
    if sys.argv[1] == "adapters":
        add_lora(model, LoraSettings(rank=8), rngs=nnx.Rngs(0))
    return model

model = nnx.eval_shape(make)
optimizer, objective = make_optimizer(1e-3), as_objective(NextToken(), 1)
compute = gradients_fn(objective, nnx.graphdef(model), Execution(remat=True))

def start(params, bias, frozen):
    return TrainState(jnp.zeros((), i32), params, optimizer.init(params), initial_low_halves(params), bias, frozen)

def step(state, batch):
    gradients = compute(state.params, state.fixed, objective.prepare(batch, jnp.ones(()))).gradients
    return apply_gradients(optimizer, state.without_frozen, gradients, None)

names = "tokens", "labels", "loss_mask", "positions", "segment_ids"
batch = {name: jax.ShapeDtypeStruct((2, 1024), i32) for name in names}
state = jax.eval_shape(start, *(nnx.state(model, kind) for kind in (nnx.Param, ExpertBias, Frozen)))
mesh = make_mesh(1, "x")
place = NamedSharding(mesh, PartitionSpec())
shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), (state, batch))
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    print(jax.jit(step).lower(*shapes).compile().as_text())
"""

MATRICES = {"gate_up": "8,512,512", "down": "8,512,256", "head": "4096,512", "q and o": "512,512", "k and v": "256,512"}
"""Shapes of one layer's matrices. Weights are bf16; gradients, moments and masters would be f32."""


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize("trained", ["adapters", "all"])
def test_step(trained):
    """The step of all parameters has what that of adapters must not have."""
    program = run_script(STEP, trained)
    assert "gated_matmul_backward" in program and "grouped_outer" in program
    made = re.findall(r"= \(?\w+\[([\d,]+)\][^\n]* custom-call\([^\n]*/grouped_outer/", program)
    assert len(made) == (2 if trained == "all" else 4)
    for name, shape in MATRICES.items():
        assert re.search(rf"bf16\[(2,)?{shape}\]", program), name
        assert bool(re.search(rf"f32\[(2,)?{shape}\]", program)) == (trained == "all"), name
        if name in ("gate_up", "down"):
            assert (shape in made or f"2,{shape}" in made) == (trained == "all"), (name, made)


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize("remat, stacks", [(False, 3), ("0,attention", 1)])
def test_attention_runs_once_in_layers_that_keep_its_result(remat, stacks):
    """XLA would run it again to write the stack of residuals, since the next operation reads the result too.

    All residuals have q before and after its norm, and the result. The part has the result, once.
    """
    program = run_script(STEP.replace("Execution(remat=True)", f"Execution().with_remat({remat!r})"), "all")
    assert len(re.findall(r"custom-call\([^\n]*/flash_attention_forward/", program)) == 1
    assert len(re.findall(r"= bf16\[2,2,1024,4,128\][^\n]* dynamic-update-slice\(", program)) == stacks
