"""Steps of families on several devices equal one device's; the gate of shared experts and all biases are replicated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.config import config_from_dict
from moe_jax.parallel import Parallelism
from tests.helpers import seeds
from tests.helpers.families import FAMILIES, SIZES
from tests.helpers.meshes import mesh_of, relative_error
from tests.helpers.train_steps import make_batch, train

FEWER_LAYERS = {"qwen2_moe": {"num_hidden_layers": 1, "mlp_only_layers": []}, "gpt_oss": {"num_hidden_layers": 2}}
"""Families whose parameters have places on a mesh that no others have. The others are thorough."""


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.thorough] * (name not in FEWER_LAYERS)) for name in FAMILIES]
)
def test_a_step_is_that_of_one_device(model_type):
    fields = {name: value for name, value in SIZES.items() if "implementation" not in name} | {"vocab_size": 264}
    fields |= FAMILIES[model_type] | FEWER_LAYERS.get(model_type, {})
    config = config_from_dict(fields | {"model_type": model_type, "initializer_range": 0.1})

    def make_model():
        model, rng = moe_jax.from_config(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), np.random.default_rng(0)
        for path, vector in nnx.to_flat_state(nnx.state(model)):
            if path[-1].endswith(("bias", "sinks")):
                vector[...] = 0.1 * rng.normal(size=vector.shape).astype(np.float32)
        return model

    batch = make_batch(seeds.rng())
    options = dict(steps=1, make_model=make_model)
    (one, (expected,)), (state, (metrics,)) = (
        train(batch, **options),
        train(batch, Parallelism(mesh_of(fsdp=2, expert=2)), **options),
    )
    for name in ("total_loss", "grad_norm", "expert_load"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=2e-5, err_msg=name)
    for (path, found), wanted in zip(jax.tree.leaves_with_path(state.params), jax.tree.leaves(one.params), strict=True):
        # AdamW's first step is the sign of the gradient, up to eps; a gradient of nearly 0 may have either.
        assert relative_error(found, wanted) < 1e-3, jax.tree_util.keystr(path)
