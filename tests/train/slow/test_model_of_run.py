"""The model of a stopped run, from its newest checkpoint or an earlier one, is the model that was trained."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax import from_pretrained
from moe_jax.checkpoint.training import TrainingCheckpoints
from moe_jax.cli import main
from moe_jax.config import config_to_dict
from moe_jax.train import init_state, make_optimizer, model_of_run
from moe_jax.train.master_weights import split
from moe_jax.train.step import TrainState
from tests.helpers import tiny


def assert_same(ours, theirs, dtype):
    for (path, a), (other, b) in zip(*(nnx.to_flat_state(nnx.state(model)) for model in (ours, theirs)), strict=True):
        assert path == other
        if "expert_bias" not in path:
            b = b[...].astype(dtype)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a[...], b[...])


def test_of_bf16_parameters_it_has_the_f32_masters(tmp_path):
    model = tiny.dense()
    params, low_halves = split(nnx.state(model, nnx.Param))
    state = TrainState(jnp.int32(2), params, (), low_halves)
    checkpoints = TrainingCheckpoints(tmp_path / "checkpoints")
    checkpoints.save(2, state, {"identity": {"config": config_to_dict(model.config), "param_dtype": "bfloat16"}})
    checkpoints.close()
    assert_same(model_of_run(tmp_path, param_dtype=jnp.float32), model, jnp.float32)
    nnx.update(model, params)
    assert_same(model_of_run(tmp_path), model, jnp.bfloat16)


def test_it_is_the_model_of_the_step_with_its_biases(tmp_path):
    run, checkpoints = tmp_path / "run", TrainingCheckpoints(tmp_path / "run" / "checkpoints")
    second, third = tiny.biased_model(), tiny.biased_model()
    for step, model in ((2, second), (3, third)):
        for array in (model.norm.weight, model.stages[0].mlp.router.expert_bias):
            array[...] = jnp.full(array.shape, float(step))
        identity = {"config": config_to_dict(model.config), "param_dtype": "float32"}
        checkpoints.save(step, init_state(model, make_optimizer(1e-2)), {"identity": identity})
    checkpoints.close()
    assert_same(model_of_run(run, dtype=jnp.float32), third, jnp.float32)
    assert_same(model_of_run(run, dtype=jnp.float32, param_dtype=jnp.bfloat16), third, jnp.bfloat16)
    assert_same(model_of_run(run, step=2, dtype=jnp.float32), second, jnp.float32)

    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    target, tokenizer = tmp_path / "hf", ["--tokenizer", str(tmp_path / "tokenizer")]
    main(["convert", str(run), str(target), "--to", "hf", "--dtype", "float32", "--step", "2", *tokenizer])
    assert_same(from_pretrained(target, dtype=jnp.float32), second, jnp.float32)
    assert (target / "tokenizer.json").is_file()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 5; its checkpoints are 2, 3"):
        model_of_run(run, step=5)
    with pytest.raises(FileNotFoundError, match="no checkpoints in .*hf: give the output folder of a training run"):
        model_of_run(target)
