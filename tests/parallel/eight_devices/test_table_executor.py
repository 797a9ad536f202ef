"""Schedules that run from a table: value, aux, statistics and every gradient of a step equal one device's."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from meshes import relative_error
from train_steps import make_batch

from moe_jax.layers.router import ExpertBias
from moe_jax.models.execution import Execution
from moe_jax.parallel import ExpertParallel, Parallelism, make_mesh
from moe_jax.parallel.pipeline.chunks import from_chunks, to_chunks
from moe_jax.parallel.sequence.attention import ContextParallel
from moe_jax.train import LossWeights, NextToken, accumulate, gradients_fn, put_batch
from moe_jax.train.objective import as_objective
from moe_jax.train.scheduled import accumulate_scheduled

ALL_LOSSES = NextToken(LossWeights(aux_loss_coef=0.1, sequence_loss_coef=0.1, z_loss_coef=0.1))
ALL_TO_ALL = ExpertParallel(transport="all_to_all")
CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}


@functools.cache
def model_of(make_model, layers):
    config = replace(make_model().config, num_hidden_layers=layers)
    return nnx.split(type(make_model())(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), nnx.Param, ExpertBias)


@functools.cache
def batch_of_test():
    return make_batch(np.random.default_rng(3))


@functools.cache
def expected_of(make_model, layers, micro_batches):
    """What one device computes, with all layers recomputed: the same numbers as without."""
    graph, params, fixed = model_of(make_model, layers)
    batch = batch_of_test()
    objective = as_objective(ALL_LOSSES, micro_batches)
    plain = jax.jit(accumulate(gradients_fn(objective, graph, Execution(remat=True)), micro_batches))
    return plain(params, fixed, objective.prepare(batch, jnp.float32(batch["loss_mask"].sum())))


def found_of(make_model, layers, micro_batches, parallelism, remat):
    graph, params, fixed = model_of(make_model, layers)
    batch = batch_of_test()
    objective = as_objective(ALL_LOSSES, micro_batches)
    laid_out = to_chunks(params, parallelism.mesh, parallelism.pipe_chunks)
    run = jax.jit(accumulate_scheduled(objective, graph, Execution(remat=remat), parallelism, micro_batches))
    arrays, everywhere = put_batch(batch, laid_out, parallelism), NamedSharding(parallelism.mesh, PartitionSpec())
    prepared = objective.prepare(arrays, jnp.float32(batch["loss_mask"].sum()))
    found = run(laid_out, jax.device_put(fixed, everywhere), prepared)
    return found._replace(gradients=from_chunks(found.gradients, layers))


def mesh_of(**sizes):
    return make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


@pytest.mark.parametrize(
    "name, make_model, layers, sizes, micro_batches, remat",
    [
        ("1f1b", tiny.model, 3, dict(pipe=2), 4, True),
        ("interleaved", tiny.model, 4, dict(pipe=2), 4, True),
        ("zb-h1", tiny.model, 4, dict(pipe=4), 8, True),
        ("zb-v", tiny.model, 3, dict(pipe=2), 4, False),
        ("dualpipe", tiny.model, 4, dict(pipe=4), 8, True),
        ("dualpipe-v", tiny.model, 4, dict(pipe=2), 4, True),
        ("dualpipe", tiny.model, 3, dict(pipe=2, expert=2), 4, True),
    ],
)
def test_gradients(name, make_model, layers, sizes, micro_batches, remat):
    parallelism = Parallelism(
        mesh_of(**sizes),
        expert=ALL_TO_ALL,
        context=ContextParallel(method="all_gather"),
        pipe_chunks=CHUNKS.get(name, 1),
        pipe_schedule=name,
    )
    found = found_of(make_model, layers, micro_batches, parallelism, remat)
    expected = expected_of(make_model, layers, micro_batches)
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(x, y) <= 1e-5, jax.tree_util.keystr(path)
