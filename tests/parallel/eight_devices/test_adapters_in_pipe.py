"""Adapters in a pipeline: loss, metrics, gradients and two steps equal one device's, and files have equal bytes."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from moe_jax.adapters import LoraSettings, add_lora, merge_adapter, save_adapter
from moe_jax.models.auto import from_config
from moe_jax.parallel import Parallelism, make_mesh
from moe_jax.parallel.pipeline.chunks import from_chunks, to_chunks
from tests.helpers import tiny
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
    "dense": (tiny.dense, 4, LoraSettings(rank=4, targets=("attention", "mlp", "embedding"))),
    "head alone": (tiny.dense, 4, LoraSettings(rank=4, targets=("head",))),
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


def mesh_of(**sizes):
    return make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


def layers_in_pipe(model):
    return model.config.stages[-1].repeats


@pytest.mark.parametrize(
    "case, sizes, options",
    [
        ("dense", {"pipe": 2}, {}),
        pytest.param("moe", {"pipe": 2, "expert": 2}, {}, marks=pytest.mark.thorough),
        pytest.param("deepseek", {"pipe": 2, "fsdp": 2}, {"pipe_schedule": "1f1b", "remat": False}, marks=pytest.mark.thorough),
        pytest.param(
            "rows and whole modules",
            {"pipe": 2},
            {"pipe_schedule": "dualpipe-v", "pipe_chunks": 2},
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "shared outer", {"pipe": 2, "data": 2}, {"pipe_chunks": 2, "shard_optimizer": True}, marks=pytest.mark.thorough
        ),
        pytest.param("dense", {"pipe": 2, "context": 2}, {"remat": "offload"}, marks=pytest.mark.thorough),
        ("head alone", {"pipe": 2}, {}),
    ],
    ids=str,
)
def test_two_steps(case, sizes, options):
    # A step donates trained arrays, so each run has its own.
    one, same = (with_random_factors(adapted(case)) for _ in range(2))
    options = dict(options)
    of_pipe = {name: options.pop(name) for name in ("pipe_chunks", "pipe_schedule", "shard_optimizer") if name in options}
    parallelism = Parallelism(mesh_of(**sizes), **{"pipe_chunks": 1} | of_pipe)
    model = adapted(case, parallelism.mesh, parallelism.pipe_chunks)
    nnx.update(model, to_chunks(nnx.state(same), parallelism.mesh, parallelism.pipe_chunks))
    expected = two_steps(one, gradient_accumulation=4)
    state, metrics = two_steps(model, parallelism, gradient_accumulation=4, **options)
    layers = layers_in_pipe(model)
    home = {name: from_chunks(getattr(state, name), layers) for name in ("params", "opt_state")}
    check((replace(state, **home), metrics), expected)


@pytest.mark.parametrize("case", ["moe", pytest.param("rows and whole modules", marks=pytest.mark.thorough)])
def test_files_have_equal_bytes(case, tmp_path):
    """Factors of layers in chunks are drawn as on one device; padding is not saved."""
    for name, model in (("one", adapted(case)), ("pipe", adapted(case, mesh_of(pipe=2, fsdp=2), 2))):
        save_adapter(model, tmp_path / name)
    one, pipe = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "pipe"))
    assert one == pipe and len(one) > 1
    with pytest.raises(ValueError, match="merge_adapter needs a model's layers along one axis"):
        merge_adapter(model)


@pytest.mark.parametrize("schedule, chunks", [("zb-h1", 1), ("uniform-w", 1)])
def test_frozen_weights_have_no_gradients_to_postpone(schedule, chunks):
    parallelism = Parallelism(mesh_of(pipe=2), pipe_chunks=chunks, pipe_schedule=schedule)
    with pytest.raises(ValueError, match="postpones gradients of weights, and frozen weights have none: use"):
        two_steps(adapted("dense", parallelism.mesh, chunks), parallelism, gradient_accumulation=4)


def test_dropout_is_refused():
    model, _ = made("dense")
    mesh = mesh_of(pipe=2)
    nnx.update(model, to_chunks(nnx.state(model), mesh))
    add_lora(model, LoraSettings(targets=("attention",), dropout=0.1), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dropout of adapters needs a mesh without pipe"):
        two_steps(model, Parallelism(mesh), gradient_accumulation=2)
