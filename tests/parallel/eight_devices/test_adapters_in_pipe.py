"""Adapters in a pipeline: loss, metrics, gradients and two steps equal one device's, and files have equal bytes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from moe_jax.adapters import LoraSettings, add_lora, merge_adapter, save_adapter
from moe_jax.models.auto import from_config
from moe_jax.models.execution import Execution
from moe_jax.parallel import Parallelism
from moe_jax.parallel.pipeline.chunks import from_chunks, to_chunks
from moe_jax.train import NextToken, put_batch
from moe_jax.train.objective import as_objective
from moe_jax.train.pipelined import accumulate_pipelined
from tests.helpers import seeds, tiny
from tests.helpers.meshes import mesh_of
from tests.helpers.train_steps import make_batch
from tests.parallel.eight_devices.test_adapters import check, two_steps, with_random_factors

LAYERS = LoraSettings(rank=4, alpha=6, targets=("attention", "experts", "router", "head"), ranks={"q_proj": 3})
CASES = {
    "moe": (tiny.model, 3, LAYERS),
    "shared outer": (tiny.model, 4, LoraSettings(rank=4, alpha=6, shared_outer=True)),
    "rows and whole modules": (
        tiny.model,
        3,
        LoraSettings(rank=4, targets=("attention",), modules_to_save=("gate", "norm"), trainable_token_indices=(264, 5)),
    ),
    "dense": (tiny.dense, 2, LoraSettings(rank=4, targets=("attention", "mlp", "embedding"))),
    "head alone": (tiny.dense, 2, LoraSettings(rank=4, targets=("head",))),
    "deepseek": (tiny.deepseek, 4, LoraSettings(rank=4, alpha=6, targets=("attention", "mlp", "experts", "router"))),
}


def made(case):
    make_model, layers, settings = CASES[case]
    config = replace(make_model().config, num_hidden_layers=layers)
    return from_config(config, rngs=nnx.Rngs(0)), settings


def adapted(case, mesh=None, chunks=1):
    """Returns the model with adapters; on a mesh its layers are in chunks before they get them."""
    model, settings = made(case)
    if mesh is not None:
        nnx.update(model, to_chunks(nnx.state(model), mesh, chunks))
    add_lora(model, settings, rngs=nnx.Rngs(0))
    return model


@pytest.mark.parametrize(
    "case, sizes, options",
    [
        ("dense", {"pipe": 2}, {}),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("head alone", {"pipe": 2}, {}),
                ("moe", {"pipe": 2, "expert": 2}, {}),
                ("deepseek", {"pipe": 2, "fsdp": 2}, {"pipe_schedule": "1f1b", "remat": False}),
                ("rows and whole modules", {"pipe": 2}, {"pipe_schedule": "dualpipe-v", "pipe_chunks": 2}),
                ("shared outer", {"pipe": 2, "data": 2}, {"pipe_chunks": 2, "shard_optimizer": True}),
                ("dense", {"pipe": 2, "context": 2}, {"remat": "offload"}),
            )
        ),
    ],
    ids=str,
)
def test_two_steps(case, sizes, options):
    # A step donates trained arrays, so each run has its own.
    one, same = (with_random_factors(adapted(case)) for _ in range(2))
    options = {"gradient_accumulation": 4} | options
    of_pipe = {name: options.pop(name) for name in ("pipe_chunks", "pipe_schedule", "shard_optimizer") if name in options}
    parallelism = Parallelism(mesh_of(**sizes), **{"pipe_chunks": 1} | of_pipe)
    model = adapted(case, parallelism.mesh, parallelism.pipe_chunks)
    nnx.update(model, to_chunks(nnx.state(same), parallelism.mesh, parallelism.pipe_chunks))
    expected = two_steps(one, gradient_accumulation=4)
    state, metrics = two_steps(model, parallelism, **options)
    layers = model.config.stages[-1].repeats
    home = {name: from_chunks(getattr(state, name), layers) for name in ("params", "opt_state")}
    check((replace(state, **home), metrics), expected)


def test_a_pipe_without_adapters():
    """Layers whose passes have no gradients of weights, here only traced."""
    mesh, objective = mesh_of(pipe=2), as_objective(NextToken(), 2)
    graph, params, fixed = nnx.split(adapted("head alone", mesh), nnx.Param, ...)
    step = accumulate_pipelined(objective, graph, Execution(remat=True), Parallelism(mesh), 2)
    batch = objective.prepare(put_batch(make_batch(seeds.rng()), params, Parallelism(mesh)), jnp.ones(()))
    gradients = jax.eval_shape(step, params, fixed, batch).gradients
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize("case", ["moe", pytest.param("rows and whole modules", marks=pytest.mark.thorough)])
def test_files_have_equal_bytes(case, tmp_path):
    """Factors of layers in chunks are drawn as on one device; padding is not saved."""
    for name, model in (("one", adapted(case)), ("pipe", adapted(case, mesh_of(pipe=2, fsdp=2), 2))):
        save_adapter(model, tmp_path / name)
    one, pipe = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "pipe"))
    assert one == pipe and len(one) > 1
    with pytest.raises(ValueError, match="merge_adapter needs a model's layers along one axis"):
        merge_adapter(model)


@pytest.mark.parametrize("schedule", ["zb-h1", "uniform-w"])
def test_frozen_weights_have_no_gradients_to_postpone(schedule):
    parallelism = Parallelism(mesh_of(pipe=2), pipe_schedule=schedule)
    with pytest.raises(ValueError, match="postpones gradients of weights, and frozen weights have none: use"):
        two_steps(adapted("dense", parallelism.mesh), parallelism, gradient_accumulation=4)


def test_dropout_is_refused():
    model, _ = made("dense")
    mesh = mesh_of(pipe=2)
    nnx.update(model, to_chunks(nnx.state(model), mesh))
    add_lora(model, LoraSettings(targets=("attention",), dropout=0.1), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dropout of adapters needs a mesh without pipe"):
        two_steps(model, Parallelism(mesh), gradient_accumulation=2)
