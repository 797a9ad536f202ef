"""The train step of a model with adapters: they alone change, and nothing of the frozen weights' shapes is computed in f32."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from moe_jax.layers.lora import Frozen
from moe_jax.models.execution import Execution
from moe_jax.parallel import Parallelism, make_mesh
from moe_jax.train import NextToken, gradients_fn, init_state, make_train_step, put_batch
from moe_jax.train.compiled_step import needed_bytes
from moe_jax.train.objective import as_objective
from tests.helpers import tiny
from tests.helpers.adapted_models import make_batch, small_model, with_adapters


@pytest.fixture(scope="module")
def adapted():
    """(model, optimizer, state before the first step)."""
    model, optimizer = with_adapters(small_model("qwen3_moe")), optax.adamw(1e-2)
    return model, optimizer, init_state(model, optimizer)


def test_the_state_holds_adapters_alone(adapted):
    model, _, state = adapted
    sizes = {jax.tree_util.keystr(path): a.size for path, a in jax.tree.leaves_with_path(state.params)}
    assert sizes and all("lora" in path for path in sizes)
    moments = [a for a in jax.tree.leaves(state.opt_state) if a.ndim]
    assert sum(a.size for a in moments) == 2 * sum(sizes.values())
    assert len(jax.tree.leaves(state.frozen)) > 10 and not jax.tree.leaves(state.without_frozen.frozen)


def test_no_gradients_of_frozen_weights():
    """In bf16, f32 arrays of the experts' shapes would be their gradients."""
    model = with_adapters(small_model("qwen3_moe", hidden_size=48, num_experts=8, moe_intermediate_size=40))
    model.dtype = jnp.bfloat16
    nnx.update(model, jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.state(model, Frozen)))
    objective, state, batch = as_objective(NextToken(), 1), init_state(model, optax.adamw(1e-2)), make_batch()
    gradients = gradients_fn(objective, nnx.graphdef(model), Execution(remat=True))
    program = str(jax.make_jaxpr(gradients)(state.params, state.fixed, objective.prepare(batch, jnp.ones(()))))
    for shape in ("8,80,48", "8,48,40"):
        assert f"bf16[2,{shape}]" in program
        assert not re.search(rf"f32\[(2,)?{shape}\]", program)


def test_states_without_adapters_have_no_frozen_entry():
    """Checkpoints that were written before adapters existed have none, and are restored as they are."""
    state = init_state(small_model("qwen3"), optax.adamw(1e-2))
    names = {str(path[0]) for path, _ in jax.tree.leaves_with_path(state, is_leaf=lambda node: isinstance(node, nnx.State))}
    assert ".params" in names and ".frozen" not in names


@pytest.mark.thorough
def test_kept_residuals_hold_no_frozen_weights():
    """Casts of weights to vary as tokens do would be residuals, a copy of every layer's weights."""
    model, optimizer = with_adapters(tiny.model_for_fp8()), optax.sgd(0.1)
    needed = []
    for parallelism in (None, Parallelism(make_mesh(devices=jax.devices()[:1]))):
        state = init_state(model, optimizer, parallelism)
        batch = put_batch(make_batch(), state.params, parallelism)
        step = make_train_step(nnx.graphdef(model), optimizer, NextToken(), remat=False, parallelism=parallelism)
        needed.append(needed_bytes(step.compiled(state, batch)))
    assert needed[1] - needed[0] < sum(a.nbytes for a in jax.tree.leaves(state.frozen)) / 4
