"""Schedules that run from a table: value, aux, statistics and every gradient of a step equal one device's."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.layers.router import ExpertBias
from moe_jax.models.execution import Execution
from moe_jax.parallel import ExpertParallel, Parallelism
from moe_jax.parallel.pipeline.chunks import from_chunks, to_chunks
from moe_jax.parallel.sequence.attention import ContextParallel
from moe_jax.train import (
    LossWeights,
    NextToken,
    accumulate,
    gradients_fn,
    init_state,
    make_optimizer,
    make_train_step,
    put_batch,
)
from moe_jax.train.objective import as_objective
from moe_jax.train.pipelined import accumulate_pipelined, check_branches, schedule_of
from tests.helpers import tiny
from tests.helpers.meshes import mesh_of, relative_error
from tests.helpers.train_steps import make_batch, weighted

ALL_LOSSES = NextToken(LossWeights(aux_loss_coef=0.1, sequence_loss_coef=0.1, z_loss_coef=0.1))
CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}


ONE_ROUND = dict(capacity_factor=2)
"""Two devices' experts compute all tokens in one call of the kernels."""


def parallelism_of(name, transport="all_to_all", method="all_gather", capacity_factor=1.25, **sizes):
    mesh = mesh_of(**sizes)
    settings = ExpertParallel(transport=transport, capacity_factor=capacity_factor), ContextParallel(method=method)
    return Parallelism(mesh, *settings, pipe_chunks=CHUNKS.get(name, 1), pipe_schedule=name)


@functools.cache
def model_of(make_model, layers):
    config = replace(make_model().config, num_hidden_layers=layers)
    return type(make_model())(config, dtype=jnp.float32, rngs=nnx.Rngs(0))


def tied():
    """A dense model with one table for both ends."""
    config = replace(tiny.dense().config, tie_word_embeddings=True)
    return type(tiny.dense())(config, dtype=jnp.float32, rngs=nnx.Rngs(0))


@functools.cache
def batch_of_tests():
    return make_batch(np.random.default_rng(3))


thorough = functools.partial(pytest.param, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    "name, make_model, layers, sizes, micro_batches, remat",
    [
        thorough("1f1b", tiny.model, 3, dict(pipe=2), 4, True),
        thorough("interleaved", tiny.model, 4, dict(pipe=2), 4, True),
        thorough("zb-h1", tiny.model, 4, dict(pipe=4), 8, True),
        ("zb-v", tiny.dense, 3, dict(pipe=2), 4, False),
        thorough("zb-v", tiny.model, 3, dict(pipe=2), 4, False),
        thorough("dualpipe", tiny.model, 4, dict(pipe=4), 8, True),
        thorough("dualpipe-v", tiny.dense, 4, dict(pipe=2), 4, True),
        thorough("dualpipe-v", tiny.model, 4, dict(pipe=2), 4, True),
        thorough("dualpipe", tiny.model, 3, dict(pipe=2, expert=2), 4, True),
        thorough("1f1b", tiny.dense, 3, dict(pipe=3), 4, False),
        thorough("1f1b", tiny.model, 4, dict(pipe=4, expert=2), 2, True),
        thorough("1f1b", tiny.biased_model, 3, dict(pipe=2, fsdp=2, context=2), 4, False),
        thorough("interleaved", tiny.model, 7, dict(pipe=4, data=2), 4, False),
        thorough("zb-h1", tiny.dense, 3, dict(pipe=2, data=2), 2, False),
        thorough("zb-v", tiny.biased_model, 8, dict(pipe=4), 8, True),
        thorough("dualpipe", tiny.biased_model, 3, dict(pipe=4), 8, False),
        thorough("zb-v", tied, 4, dict(pipe=2), 4, True),
        thorough("1f1b", tiny.model, 4, dict(pipe=2, fsdp=2, expert=2), 2, False),
        thorough("dualpipe", tiny.model, 4, dict(pipe=2, fsdp=2, context=2), 4, False),
        thorough("dualpipe-v", tiny.model, 7, dict(pipe=4), 8, False),
        thorough("dualpipe-v", tiny.model, 4, dict(pipe=2, expert=2), 4, True),
        thorough("zb-h1", tiny.model, 3, dict(pipe=2, expert=2, **ONE_ROUND), 4, True),
        thorough("zb-h1", tiny.model, 3, dict(pipe=2, expert=2, data=2, transport="gather", **ONE_ROUND), 2, False),
        thorough("zb-v", tiny.biased_model, 3, dict(pipe=2, expert=2, **ONE_ROUND), 4, False),
        thorough("zb-v", tiny.dense, 4, dict(pipe=2, expert=2, **ONE_ROUND), 4, True),
        thorough("uniform-w", tiny.model, 3, dict(pipe=2, expert=2, **ONE_ROUND), 4, True),
        thorough("dualpipe", tiny.model, 3, dict(pipe=2, expert=2, **ONE_ROUND), 4, True),
    ],
)
def test_gradients(name, make_model, layers, sizes, micro_batches, remat):
    compare(name, model_of(make_model, layers), layers, sizes, micro_batches, remat)


@pytest.mark.thorough
@pytest.mark.parametrize("name, sizes", [("dualpipe", dict(pipe=2)), ("zb-v", dict(pipe=2, data=2))])
def test_dense_first_layers_and_further_tokens(name, sizes):
    """The pipe holds the four layers with experts, of five, and labels have weights."""
    compare(name, tiny.deepseek(mtp=1, layers=5), 4, sizes, 4, True, prepare=weighted)


def compare(name, model, layers, sizes, micro_batches, remat, prepare=dict):
    """Compares a step with one device's; `layers` of the model are in the pipe."""
    parallelism = parallelism_of(name, **sizes)
    graph, params, fixed = nnx.split(model, nnx.Param, ExpertBias)
    objective, batch = as_objective(ALL_LOSSES, micro_batches), prepare(batch_of_tests())
    num_labels = jnp.float32(batch["loss_mask"].sum())
    plain = jax.jit(accumulate(gradients_fn(objective, graph, Execution(remat=True)), micro_batches))
    expected = plain(params, fixed, objective.prepare(batch, num_labels))
    laid_out = to_chunks(params, parallelism.mesh, parallelism.pipe_chunks)
    run = jax.jit(accumulate_pipelined(objective, graph, Execution(remat=remat), parallelism, micro_batches))
    arrays, everywhere = put_batch(batch, laid_out, parallelism), NamedSharding(parallelism.mesh, PartitionSpec())
    found = run(laid_out, jax.device_put(fixed, everywhere), objective.prepare(arrays, num_labels))
    found = found._replace(gradients=from_chunks(found.gradients, layers))
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(x, y) <= 1e-5, jax.tree_util.keystr(path)


def trained(parallelism=None):
    """Returns the arrays after two steps of AdamW, and the metrics of each step."""
    graph, state = nnx.split(model_of(tiny.biased_model, 3))
    optimizer = make_optimizer(1e-2, eps=1e-3, max_grad_norm=0.1)
    if parallelism is not None:
        state = to_chunks(state, parallelism.mesh, parallelism.pipe_chunks)
    # A step donates its state: the model of other tests is left alone.
    state = init_state(nnx.merge(graph, jax.tree.map(jnp.copy, state)), optimizer, parallelism)
    step = make_train_step(graph, optimizer, ALL_LOSSES, parallelism=parallelism, gradient_accumulation=4)
    metrics = []
    for _ in range(2):
        state, of_step = step(state, put_batch(batch_of_tests(), state.params, parallelism))
        metrics.append(of_step)
    params = state.params if parallelism is None else from_chunks(state.params, 3)
    return (params, state.expert_bias), metrics


@pytest.mark.thorough
def test_two_steps():
    """Parameters, moved biases and metrics; the optimizer's state is split over `data`, and layers fill up a chunk."""
    parallelism = replace(parallelism_of("dualpipe-v", pipe=2, data=2), shard_optimizer=True)
    for ours, theirs in zip(trained(parallelism), trained(), strict=True):
        for (path, x), y in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
            assert relative_error(x, y) <= 2e-5, jax.tree_util.keystr(path)


def step_of(name, micro_batches=4, remat=True, **settings):
    options = dict(gradient_accumulation=micro_batches, remat=remat, parallelism=parallelism_of(name, **settings))
    make_train_step(nnx.graphdef(tiny.model()), make_optimizer(1e-3), **options)


@pytest.mark.parametrize(
    "refused, message",
    [
        (dict(name="1f1b", transport="pairwise", pipe=2, expert=2), "the transport 'pairwise' would wait for ranks that never"),
        (dict(name="dualpipe", method="ring", pipe=2, context=2), "the method 'ring' would wait for ranks that never send"),
        (dict(name="zb-h1", pipe=2, fsdp=2), "'zb-h1' divides the backward pass, for which each rank must hold whole matrices"),
        (dict(name="uniform-w", pipe=2, fsdp=2), "fsdp of this mesh split them: use 'uniform'"),
        (dict(name="zb-v", pipe=2, expert=2, fsdp=2), "fsdp, expert of this mesh split them: use '1f1b', 'interleaved', 'dua"),
        (
            dict(name="zb-h1", pipe=2, expert=2),
            "use '1f1b', .*, or let experts compute in one call .weight tickets hold the operands of one call",
        ),
        (dict(name="uniform-w", pipe=2, expert=2, transport="pairwise", **ONE_ROUND), "expert of this mesh split them: use"),
        (dict(name="dualpipe", pipe=2, micro_batches=2), "micro_batches must be at least 2 \\* ranks = 4 for DualPipe; got 2"),
        (dict(name="dualpipe", pipe=3), "pipe_schedule='dualpipe' needs an even number of ranks, for it starts at both"),
        (
            dict(name="1f1b", pipe=2, remat="offload"),
            "remat='offload' needs pipe_schedule='uniform': slots of '1f1b' stay in the GPU's memory",
        ),
        (dict(name="1f1b", data=2), "pipe_schedule='1f1b' needs several devices along the mesh axis pipe"),
        (dict(name="gpipe", pipe=2), "pipe_schedule='gpipe' must be one of uniform, uniform-w, 1f1b, interleaved, zb-h1, zb-v"),
    ],
)
def test_refusals(refused, message):
    with pytest.raises(ValueError, match=message):
        step_of(**refused)


def test_refused_chunks():
    with pytest.raises(ValueError, match="pipe_schedule='zb-v' needs pipe_chunks=2; got 1"):
        Parallelism(mesh_of(pipe=2), pipe_schedule="zb-v")


def test_divided_where_matrices_are_whole():
    """DualPipe divides its backward passes, unless the mesh splits matrices, or experts that compute in several calls."""
    for sizes, kinds in (
        (dict(pipe=4, data=2), "FBbW"),
        (dict(pipe=4, fsdp=2), "FB"),
        (dict(pipe=4, expert=2), "FB"),
        (dict(pipe=4, expert=2, **ONE_ROUND), "FBbW"),
    ):
        schedule = schedule_of(parallelism_of("dualpipe", **sizes), 8)
        assert {part.kind for slots in schedule.ranks for slot in slots for part in slot} == set(kinds)


def test_refused_copies(monkeypatch):
    """Peer-to-peer copies are refused inside the layers alone: hops of the pipe itself are the same on all ranks."""
    monkeypatch.setattr("moe_jax.parallel.parallelism.check_hops", lambda hops, mesh: None)
    check_branches(replace(parallelism_of("dualpipe", pipe=2, data=2), hops="copies"))
    with pytest.raises(ValueError, match="hops='copies' inside the layers would wait for ranks that never send"):
        check_branches(replace(parallelism_of("dualpipe", pipe=2, fsdp=2), hops="copies"))
