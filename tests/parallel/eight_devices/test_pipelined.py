"""A pipeline: value, aux and every gradient of a step equal one device's, and so do evaluations and two steps of AdamW."""

from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.layers.router import ExpertBias
from moe_jax.models.execution import Execution
from moe_jax.parallel import Parallelism
from moe_jax.parallel.pipeline.chunks import from_chunks, to_chunks
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
from moe_jax.train.pipelined import accumulate_pipelined, evaluate_pipelined
from tests.helpers import seeds, tiny
from tests.helpers.meshes import mesh_of, relative_error
from tests.helpers.train_steps import make_batch, weighted

ALL_LOSSES = NextToken(LossWeights(aux_loss_coef=0.1, sequence_loss_coef=0.1, z_loss_coef=0.1))


def with_layers(make_model, layers):
    """A model as `make_model` makes it, with another number of layers."""
    config = replace(make_model().config, num_hidden_layers=layers)
    return type(make_model())(config, dtype=jnp.float32, rngs=nnx.Rngs(0))


def tied():
    """A dense model with one table for both ends."""
    config = replace(tiny.dense().config, tie_word_embeddings=True)
    return type(tiny.dense())(config, dtype=jnp.float32, rngs=nnx.Rngs(0))


def test_gradients_and_evaluation():
    """A dense layer is before the pipe, experts are in padded chunks, and 2 ranks do not divide 3 micro-batches."""
    compare(tiny.deepseek(layers=4), 3, uniform(2, pipe=2, expert=2), 3, "offload", rows=6, evaluates=True)


# In CI `test_adapters_in_pipe` recomputes layers in place of offloading them.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "make_model, layers, sizes, chunks, micro_batches, remat",
    [
        (tiny.model, 7, dict(pipe=2, expert=2), 2, 2, True),
        (tied, 3, dict(pipe=3), 1, 4, False),
        (tiny.dense, 3, dict(pipe=2), 2, 4, "offload"),
        (tiny.model, 3, dict(pipe=2, data=2), 2, 2, False),
        (tiny.biased_model, 4, dict(pipe=4, fsdp=2), 1, 2, True),
        (tiny.model, 8, dict(pipe=2, data=2, context=2), 4, 1, True),
        (tiny.model, 4, dict(pipe=2, fsdp=2, expert=2), 2, 2, True),
        (tiny.dense, 8, dict(pipe=8), 1, 8, True),
    ],
    ids=[
        "experts-padded-chunks",
        "tied-kept-three-ranks",
        "dense-offload",
        "whole-experts-kept-data",
        "fsdp-few-micro-batches",
        "context",
        "fsdp-expert-kept",
        "eight-ranks",
    ],
)
def test_gradients(make_model, layers, sizes, chunks, micro_batches, remat):
    """Loss, its parts, the statistics of every layer, and all gradients."""
    compare(with_layers(make_model, layers), layers, uniform(chunks, **sizes), micro_batches, remat)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make_model, layers, sizes, chunks, remat",
    [
        (tiny.model, 3, dict(pipe=2, data=2), 2, False),
        (tiny.model, 7, dict(pipe=4), 2, True),
        (tiny.dense, 3, dict(pipe=3), 1, "offload"),
    ],
    ids=["experts-kept", "experts-four-ranks", "offload"],
)
def test_weights_put_off(make_model, layers, sizes, chunks, remat):
    """Labels have weights here, too."""
    compare(with_layers(make_model, layers), layers, uniform(chunks, "uniform-w", **sizes), 4, remat, prepare=weighted)


def uniform(chunks=1, schedule="uniform", **sizes):
    """Parallelism with a pipe of uniform ticks, whose transfers are as on GPUs with copies where experts are split."""
    # A CPU would refuse the setting, and runs them all the same.
    with mock.patch("moe_jax.parallel.collectives.hops._obstacle", return_value=""):
        hops = "copies" if "expert" in sizes else "nccl"
        return Parallelism(mesh_of(**sizes), pipe_chunks=chunks, pipe_schedule=schedule, hops=hops)


def compare(model, layers, parallelism, micro_batches, remat, rows=8, prepare=dict, evaluates=False):
    """Compares a step's value, aux and gradients with one device's, and an evaluation's value and aux.

    `layers` is the number of those in the pipe.
    """
    graph, params, fixed = nnx.split(model, nnx.Param, ExpertBias)
    objective, execution = as_objective(ALL_LOSSES, micro_batches), Execution(remat=remat)
    batch = {name: x[:rows] for name, x in prepare(make_batch(seeds.rng())).items()}
    num_labels = jnp.float32(batch["loss_mask"].sum())

    plain = jax.jit(accumulate(gradients_fn(objective, graph, execution), micro_batches))
    expected = plain(params, fixed, objective.prepare(batch, num_labels))
    laid_out = to_chunks(params, parallelism.mesh, parallelism.pipe_chunks)
    pipelined = jax.jit(accumulate_pipelined(objective, graph, execution, parallelism, micro_batches))
    fixed = jax.device_put(fixed, NamedSharding(parallelism.mesh, PartitionSpec()))
    arguments = laid_out, fixed, objective.prepare(put_batch(batch, laid_out, parallelism), num_labels)
    with mock.patch.object(jax.lax, "empty", without_values):
        found = pipelined(*arguments)
    found = found._replace(gradients=from_chunks(found.gradients, layers))
    assert_close(found, expected)
    if evaluates:
        evaluate = jax.jit(evaluate_pipelined(objective, graph, parallelism, micro_batches))
        assert_close(evaluate(*arguments), (expected.value, expected.aux))


def assert_close(found, expected):
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(x, y) <= 1e-5, jax.tree_util.keystr(path)


def without_values(shape, dtype):
    """Fills memory that nobody has written: with NaN, which must not reach a gradient."""
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 0, dtype)


def trained(make_model, batch, parallelism=None):
    """Returns the model's arrays after two steps of AdamW, and the metrics of each step."""
    model = with_layers(make_model, 3)
    graph, optimizer = nnx.graphdef(model), make_optimizer(1e-2, eps=1e-3, max_grad_norm=0.1)
    if parallelism is not None:
        nnx.update(model, to_chunks(nnx.state(model), parallelism.mesh, parallelism.pipe_chunks))
    state = init_state(model, optimizer, parallelism)
    step = make_train_step(graph, optimizer, ALL_LOSSES, parallelism=parallelism, gradient_accumulation=4)
    metrics = []
    for _ in range(2):
        state, of_step = step(state, put_batch(batch, state.params, parallelism))
        metrics.append(of_step)
    params = state.params if parallelism is None else from_chunks(state.params, 3)
    return (params, state.expert_bias), metrics


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make_model, options",
    [
        (tiny.dense, dict(shard_optimizer=True)),
        (tiny.biased_model, {}),
        (tiny.biased_model, dict(pipe_schedule="dualpipe-v", pipe_chunks=2, shard_optimizer=True)),
    ],
)
def test_two_steps(make_model, options):
    """Parameters, moved biases and metrics; padded layers and clipped gradients included."""
    batch = make_batch(seeds.rng())
    parallelism = Parallelism(mesh_of(pipe=2, data=2), **{"pipe_chunks": 1} | options)
    for ours, theirs in zip(trained(make_model, batch, parallelism), trained(make_model, batch), strict=True):
        for (path, x), y in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
            assert relative_error(x, y) <= 2e-5, jax.tree_util.keystr(path)


def test_chunks_and_back():
    """Five layers with experts are in chunks; a dense first layer and an MTP module are not."""
    params = nnx.state(tiny.deepseek(mtp=1, layers=6), nnx.Param)
    there = to_chunks(params, mesh_of(pipe=2, fsdp=2), 2)
    for number, layers in there["stages"].items():
        norm = layers["block"]["input_layernorm"]["weight"] if "block" in layers else layers["input_layernorm"]["weight"]
        assert norm.shape == ((2, 2, 2, 16) if number == 1 else (1, 16))
        assert ("pipe" in str(norm.sharding.spec)) == (number == 1)
    back = from_chunks(there, 5, mesh_of(fsdp=2))
    for (path, x), y in zip(jax.tree.leaves_with_path(back), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


def refused_order(mesh):
    params = nnx.state(tiny.deepseek(), nnx.Param)
    to_chunks(nnx.State({"stages": {0: params["stages"][1], 1: params["stages"][0]}}), mesh)


def refused_chunks(mesh):
    to_chunks(nnx.state(tiny.model(), nnx.Param), mesh, chunks=2)


def refused_layout(mesh):
    graph, params, fixed = nnx.split(tiny.model(), nnx.Param, ExpertBias)
    batch = {name: jnp.asarray(x) for name, x in make_batch(seeds.rng()).items()}
    call = accumulate_pipelined(as_objective(ALL_LOSSES, 1), graph, Execution(), Parallelism(mesh), 1)
    call(params, fixed, ALL_LOSSES.prepare(batch, jnp.float32(1)))


def refused_function(mesh):
    def loss(model, batch):
        return jnp.zeros(()), {}

    make_train_step(nnx.graphdef(tiny.model()), make_optimizer(1e-3), loss, parallelism=Parallelism(mesh))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (refused_order, ValueError, "this model has 2 runs of layers, and experts before the last"),
        (refused_chunks, ValueError, "2 layers do not reach the last of 2 chunks on pipe=2"),
        (refused_layout, ValueError, "lay the parameters out with parallel.pipeline.chunks.to_chunks"),
        (refused_function, TypeError, "an objective of a pipeline must define of_states"),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call(mesh_of(pipe=2))
