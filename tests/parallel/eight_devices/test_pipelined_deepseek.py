"""A pipeline of a model with dense first layers and MTP modules: only layers with experts are in it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moe_jax
from moe_jax.parallel import Parallelism
from moe_jax.parallel.pipeline.chunks import to_chunks
from moe_jax.train import init_state, make_evaluation, make_optimizer, make_train_step, put_batch
from tests.helpers import seeds, tiny
from tests.helpers.meshes import mesh_of, relative_error
from tests.helpers.train_steps import make_batch
from tests.parallel.eight_devices.test_pipelined import ALL_LOSSES, compare, uniform


def three_dense_layers(mtp=0, layers=5):
    """A model with three dense layers, and two with experts."""
    config = replace(tiny.deepseek(mtp, layers).config, first_k_dense_replace=3)
    return moe_jax.from_config(config, rngs=nnx.Rngs(0), dtype=jnp.float32)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make_model, mtp, layers, sizes, chunks, micro_batches, remat",
    [
        (tiny.deepseek, 0, 3, dict(pipe=2), 2, 2, False),
        (tiny.deepseek, 1, 3, dict(pipe=2, expert=2), 1, 3, True),
        (three_dense_layers, 2, 2, dict(pipe=2, fsdp=2, expert=2), 1, 1, True),
        (tiny.deepseek, 1, 3, dict(pipe=2, context=2), 1, 2, True),
    ],
    ids=["dense-first-layer", "further-tokens-odd-experts", "three-dense-fsdp", "context"],
)
def test_gradients(make_model, mtp, layers, sizes, chunks, micro_batches, remat):
    """Rows of a micro-batch that the ranks do not divide, and micro-batches that they do not divide, are among them."""
    model = make_model(mtp, layers + (3 if make_model is three_dense_layers else 1))
    compare(model, layers, uniform(chunks, **sizes), micro_batches, remat, rows=6 if micro_batches == 3 else 8)


def trained(batch, parallelism=None):
    """Returns the metrics of two steps of AdamW, the biases after them, and the mean cross-entropy."""
    model = tiny.deepseek(mtp=1, layers=3)
    graph, optimizer = nnx.graphdef(model), make_optimizer(1e-2, eps=1e-3)
    if parallelism is not None:
        nnx.update(model, to_chunks(nnx.state(model), parallelism.mesh, parallelism.pipe_chunks))
    state = init_state(model, optimizer, parallelism)
    step = make_train_step(graph, optimizer, ALL_LOSSES, parallelism=parallelism, gradient_accumulation=2)
    put = put_batch(batch, state.params, parallelism)
    metrics = []
    for _ in range(2):
        state, of_step = step(state, put)
        metrics.append(of_step)
    return metrics, state.expert_bias, make_evaluation(graph, parallelism=parallelism)(state, [put, put])


@pytest.mark.thorough
def test_two_steps_and_evaluation():
    """Metrics of every layer and module, moved biases, and an evaluation that leaves the module out."""
    batch = make_batch(seeds.rng())
    found = trained(batch, Parallelism(mesh_of(pipe=2)))
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(trained(batch)), strict=True):
        assert relative_error(x, y) <= 2e-5, jax.tree_util.keystr(path)
