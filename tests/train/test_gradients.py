"""The pieces of a step alone: micro-batches of any gradients function, and gradients applied to a state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from moe_jax.train import accumulate, apply_gradients, gradients_fn, init_state, master_weights, put_batch
from moe_jax.train.gradients import Gradients
from tests.helpers import tiny


def sums_of_rows(params, fixed, batch):
    """A gradients function without a model, as a pipeline could bring its own."""
    summed = batch["x"].sum(axis=0)
    return Gradients(summed.sum() * batch["scale"], {"rows": batch["x"][:, 0]}, {"w": params["w"] * fixed["factor"] * summed})


def test_micro_batches_are_strided_and_share_scalars():
    batch = {"x": jnp.arange(12.0).reshape(6, 2), "scale": jnp.asarray(2.0)}
    params, fixed = {"w": jnp.asarray([1.0, 3.0])}, {"factor": jnp.asarray(0.5)}
    whole = sums_of_rows(params, fixed, batch)
    value, aux, gradients = accumulate(sums_of_rows, 3)(params, fixed, batch)
    np.testing.assert_allclose(value, whole.value)
    np.testing.assert_allclose(gradients["w"], whole.gradients["w"])
    # Micro-batch i has the rows i and i + 3; their first entries are 2 i and 2 i + 6.
    np.testing.assert_array_equal(aux["rows"], [0 + 2 + 4, 6 + 8 + 10])


def test_one_micro_batch_is_the_function_itself():
    assert accumulate(sums_of_rows, 1) is sums_of_rows


def test_rows_that_micro_batches_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="4 rows, which gradient_accumulation=3 does not divide"):
        accumulate(sums_of_rows, 3)({}, {}, {"x": jnp.zeros((4, 2))})


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_any_objective_are_applied(dtype):
    """An objective of the embedding alone: sgd moves its f32 master by the gradient, and nothing else."""

    def objective(model, batch):
        return (model.embed_tokens.weight[...].astype(jnp.float32) * batch["weight"].mean()).sum(), None

    model, optimizer = tiny.dense(param_dtype=dtype), optax.sgd(1.0)
    graph, state = nnx.graphdef(model), init_state(model, optimizer)
    batch = put_batch({"weight": np.full((2,), 2.0**-12, np.float32)}, state.params)
    value, aux, gradients = gradients_fn(objective, graph)(state.params, state.expert_bias, batch)
    assert aux is None and value.dtype == jnp.float32
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    after = apply_gradients(optimizer, state, gradients)
    assert int(after.step) == 1
    for (path, new), old in zip(jax.tree.leaves_with_path(masters(after)), jax.tree.leaves(masters(state)), strict=True):
        moved = 2.0**-12 if "embed_tokens" in jax.tree_util.keystr(path) else 0.0
        np.testing.assert_array_equal(new, old - jnp.float32(moved), err_msg=jax.tree_util.keystr(path))


def masters(state):
    """The f32 masters of a state."""
    return state.params if state.low_halves is None else master_weights.join(state.params, state.low_halves)
