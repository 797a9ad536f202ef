"""Steps of families on several devices equal one device's: shared experts' gates, biases, and repeated patterns of layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moe_jax
from moe_jax.config import config_from_dict
from moe_jax.parallel import Parallelism
from tests.helpers import seeds
from tests.helpers.families import FAMILIES, SIZES
from tests.helpers.meshes import mesh_of, relative_error
from tests.helpers.toy_hybrid import hybrid
from tests.helpers.train_steps import make_batch, train
from tests.parallel.eight_devices.test_pipelined import compare, uniform

FEWER_LAYERS = {"qwen2_moe": {"num_hidden_layers": 1, "mlp_only_layers": []}, "gpt_oss": {"num_hidden_layers": 1}}


def family(model_type):
    """A model of the family with random biases."""
    fields = {name: value for name, value in SIZES.items() if "implementation" not in name} | {"vocab_size": 264}
    fields |= FAMILIES[model_type] | FEWER_LAYERS.get(model_type, {})
    config = config_from_dict(fields | {"model_type": model_type, "initializer_range": 0.1})
    model, rng = moe_jax.from_config(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), np.random.default_rng(0)
    for path, vector in nnx.to_flat_state(nnx.state(model)):
        if path[-1].endswith(("bias", "sinks")):
            vector[...] = 0.1 * rng.normal(size=vector.shape).astype(np.float32)
    return model


def pairs():
    """Two times (recurrent, attention)."""
    return hybrid(num_hidden_layers=4, full_attention_interval=2)


def step_equals_one_devices(make_model, **sizes):
    """Compares a step on four devices with one device's; returns its state, whose momentum is the gradients."""
    batch, options = make_batch(seeds.rng()), dict(steps=1, make_model=make_model, optimizer=optax.sgd(0.1, momentum=0.5))
    one, (expected,) = train(batch, **options)
    state, (metrics,) = train(batch, Parallelism(mesh_of(**sizes)), **options)
    for name in ("total_loss", "grad_norm", "expert_load"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=2e-5, err_msg=name)
    for (path, found), wanted in zip(jax.tree.leaves_with_path(state.opt_state), jax.tree.leaves(one.opt_state), strict=True):
        assert relative_error(found, wanted) < 2e-5, jax.tree_util.keystr(path)
    return state


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.thorough] * (name != "gpt_oss")) for name in FAMILIES]
)
def test_families(model_type):
    """gpt-oss has biases where no other family has them, and sinks."""
    step_equals_one_devices(lambda: family(model_type), fsdp=2, expert=2)


def test_a_pattern_of_layers():
    """Parameters of its stage are split like others."""
    state = step_equals_one_devices(pairs, fsdp=4)
    for path, matrix in nnx.to_flat_state(state.params["stages"]):
        if path[-2].endswith("_proj"):
            assert matrix[...].addressable_shards[0].data.size * 4 == matrix[...].size, path


@pytest.mark.thorough
def test_a_pipeline_deals_out_whole_bodies():
    compare(pairs(), 2, uniform(pipe=2), 2, True)
