"""A stage of a repeated pattern of layers on several devices: its parameters are split, and steps equal one device's."""

import jax
import numpy as np
import pytest
from flax import nnx

from moe_jax.parallel import Parallelism
from tests.helpers import seeds
from tests.helpers.meshes import mesh_of, relative_error
from tests.helpers.toy_hybrid import hybrid
from tests.helpers.train_steps import make_batch, train
from tests.parallel.eight_devices.test_pipelined import compare


def pairs():
    """Two times (recurrent, attention)."""
    return hybrid(num_hidden_layers=4, full_attention_interval=2)


@pytest.mark.parametrize("sizes", [dict(fsdp=4), pytest.param(dict(fsdp=2, expert=2), marks=pytest.mark.thorough)], ids=str)
def test_a_step_is_that_of_one_device(sizes):
    batch = make_batch(seeds.rng())
    parallelism = Parallelism(mesh_of(**sizes))
    options = dict(steps=1, make_model=pairs)
    (one, (expected,)), (state, (metrics,)) = train(batch, **options), train(batch, parallelism, **options)
    for name in ("total_loss", "grad_norm", "expert_load"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=2e-5, err_msg=name)
    for (path, found), wanted in zip(jax.tree.leaves_with_path(state.params), jax.tree.leaves(one.params), strict=True):
        # AdamW's first step is the sign of the gradient, up to eps; a gradient of nearly 0 may have either.
        assert relative_error(found, wanted) < 1e-3, jax.tree_util.keystr(path)
    for path, matrix in nnx.to_flat_state(state.params["stages"]):
        if path[-2].endswith("_proj"):
            assert matrix[...].addressable_shards[0].data.size * 4 == matrix[...].size, path


@pytest.mark.thorough
def test_a_pipeline_deals_out_whole_bodies():
    compare(pairs(), 2, dict(pipe=2), 1, 2, True)
