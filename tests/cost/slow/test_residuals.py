"""The arrays that a layer keeps for its backward pass are those that the model of cost counts, at full size on an H200."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from moe_jax import from_config
from moe_jax.config import NAMED_CONFIGS
from moe_jax.cost import PlannedStep
from moe_jax.cost.memory import kept_by_layer
from moe_jax.layers.loops import run_loops
from moe_jax.layers.passes import forward_loop
from moe_jax.models.execution import Execution
from moe_jax.models.forward import stage_layers
from moe_jax.parallel.choices import MeshShape

ROWS, SEQ = 2, 4096
QWEN = replace(NAMED_CONFIGS["qwen3-30b-a3b"], num_hidden_layers=1)
DEVICE = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
H200 = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=DEVICE)


def kept(config, remat, **options) -> list[jax.ShapeDtypeStruct]:
    """Returns what the layers of a model's last stage keep."""

    def saved(tokens):
        model = from_config(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options)
        inputs, per_layer, carry = model.enter(tokens)
        number = len(model.stages) - 1
        layers, arrays = stage_layers(model.stages[number], number, inputs, per_layer[number], Execution(remat=remat))
        return run_loops(forward_loop(layers, arrays, carry))[0].saved

    with jax.sharding.use_abstract_mesh(H200):
        return jax.tree.leaves(jax.eval_shape(saved, jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)))


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("param_dtype", [jnp.bfloat16, jnp.float32])
def test_a_layer_keeps_what_the_model_of_cost_counts(param_dtype, remat):
    """Attention's result is there once, and neither a weight that was cast nor anything that all layers read."""
    arrays = kept(QWEN, remat, param_dtype=param_dtype)
    step = PlannedStep(QWEN, MeshShape(), ROWS, SEQ, remat=remat)
    assert sum(a.size * a.dtype.itemsize for a in arrays) == pytest.approx(kept_by_layer(step, QWEN.stages[0]), rel=0.003)


def test_a_result_of_latent_attention_is_kept_once():
    """Values and the result have one size, which no other array has."""
    config = replace(NAMED_CONFIGS["deepseek-v3"], num_hidden_layers=2, first_k_dense_replace=1, num_nextn_predict_layers=0)
    size = ROWS * SEQ * config.num_attention_heads * config.mixer.value_dim
    assert [a.size for a in kept(config, False)].count(size) == 2
