"""A router's bias goes through training untouched by gradients and optimizer, and through a run's checkpoints bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from flax import nnx
from test_step import make_batch

from moe_jax.checkpoint.training import TrainingCheckpoints
from moe_jax.layers.router import ExpertBias
from moe_jax.train import init_state, make_optimizer, make_train_step
from moe_jax.train.rebalance import move_experts


def test_a_step_moves_every_parameter_and_no_bias(tmp_path):
    model = tiny.deepseek(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    optimizer, graph = make_optimizer(1e-2), nnx.graphdef(model)
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param, ExpertBias))
    state, metrics = make_train_step(graph, optimizer, remat=False)(
        init_state(model, optimizer), make_batch(np.random.default_rng())
    )
    assert np.isfinite(float(metrics["total_loss"])) and metrics["expert_load"].shape == (2, 8)
    after = nnx.state(nnx.merge(graph, state.params, state.expert_bias), nnx.Param, ExpertBias)
    moved, bias = (jax.tree.map(lambda a, b: bool((a != b).any()), *pair) for pair in zip(before, after, strict=True))
    assert all(jax.tree.leaves(moved)) and jax.tree.leaves(bias) == [False]
    assert jax.tree.leaves(state.expert_bias)[0].dtype == jnp.float32

    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(1, state, {})
    restored = checkpoints.restore(1, state)
    checkpoints.close()
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_a_bias_changes_places_with_its_expert():
    model = tiny.deepseek()
    bias = np.asarray(model.stages[1].mlp.router.expert_bias[...])
    orders = np.stack([np.random.default_rng().permutation(8) for _ in range(2)])
    state = move_experts(init_state(model, make_optimizer(1e-2)), orders)
    np.testing.assert_array_equal(jax.tree.leaves(state.expert_bias)[0], np.take_along_axis(bias, orders, axis=1))
