"""Layers go straight to the ranks of a pipe, come back as the same files, and move between pipes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.checkpoint import streaming
from moe_jax.models.random_weights import random_model
from moe_jax.parallel import Parallelism
from moe_jax.parallel.layout import parameter_path
from moe_jax.parallel.pipeline.chunks import LayersInPipe, PipeShape, is_dealt_out, restack, split_layers, stacked_as, to_chunks
from moe_jax.train import init_state, make_optimizer
from tests.helpers import tiny
from tests.helpers.meshes import mesh_of


def three_layers():
    return replace(tiny.biased_model().config, num_hidden_layers=3)


def assert_same_layout_and_bits(ours, theirs):
    for (path, x), y in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), jax.tree_util.keystr(path)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of three layers in bf16, with zeros of both signs."""
    model = random_model(three_layers(), jnp.bfloat16)
    with_zeros = jax.jit(partial(jax.tree.map, lambda x: jnp.where(jnp.abs(x) < 0.01, -0.0, x)))
    nnx.update(model, with_zeros(nnx.state(model, nnx.Param)))
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    moe_jax.save_pretrained(model, path, progress=False)
    return path


CHUNKS = [pytest.param(1, marks=pytest.mark.thorough), 2]


@pytest.mark.parametrize("chunks", CHUNKS)
def test_each_rank_reads_its_own_layers(folder, tmp_path, monkeypatch, chunks):
    """They are laid out as `to_chunks` does, each byte is read once, and saving writes the same bytes."""
    mesh, read, copy = mesh_of(pipe=2, fsdp=2), [], streaming._copy
    whole = moe_jax.from_pretrained(folder, progress=False)
    monkeypatch.setattr(streaming, "_copy", lambda stored, source, to: read.append(to.nbytes) or copy(stored, source, to))
    model = moe_jax.from_pretrained(folder, mesh=mesh, pipe_chunks=chunks, progress=False)
    assert_same_layout_and_bits(nnx.state(model), to_chunks(nnx.state(whole), mesh, chunks))
    in_bf16 = sum(x.nbytes for x in jax.tree.leaves(nnx.state(whole)))
    assert sum(read) == in_bf16
    largest = max(x.nbytes for x in jax.tree.leaves(nnx.state(whole)["stages"]))
    assert max(read) <= largest / 3
    moe_jax.save_pretrained(model, tmp_path / "saved", progress=False)
    for file in folder.glob("*.safetensors"):
        assert (tmp_path / "saved" / file.name).read_bytes() == file.read_bytes()


def test_layers_beside_the_pipe(tmp_path):
    """Dense first layers, and modules for further tokens, are read and written as on any mesh."""
    whole, mesh = tiny.deepseek(mtp=1, layers=3), mesh_of(pipe=2)
    moe_jax.save_pretrained(whole, tmp_path / "model", progress=False)
    model = moe_jax.from_pretrained(tmp_path / "model", dtype=jnp.float32, mesh=mesh, pipe_chunks=1, progress=False)
    assert_same_layout_and_bits(nnx.state(model), to_chunks(nnx.state(whole), mesh))
    moe_jax.save_pretrained(model, tmp_path / "saved", progress=False)
    for file in (tmp_path / "model").glob("*.safetensors"):
        assert (tmp_path / "saved" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize("chunks", CHUNKS)
def test_random_weights_do_not_depend_on_the_pipe(chunks):
    mesh = mesh_of(pipe=2, fsdp=2)
    ours, theirs = (
        random_model(three_layers(), jnp.float32, 1, mesh=on, pipe_chunks=v) for on, v in ((mesh, chunks), (None, 1))
    )
    assert_same_layout_and_bits(nnx.state(ours), to_chunks(nnx.state(theirs), mesh, chunks))


def state_on(sizes, chunks=1):
    """A training state with bf16 parameters and random moments; its optimizer is split over `data` if there is one."""
    mesh = mesh_of(**sizes)
    parallelism = Parallelism(mesh, pipe_chunks=chunks, shard_optimizer=True)
    model = random_model(three_layers(), jnp.bfloat16, mesh=mesh, pipe_chunks=chunks)
    return init_state(model, make_optimizer(1e-2), parallelism), parallelism.pipe


@pytest.mark.thorough
@pytest.mark.parametrize(
    "start, end",
    [
        ((dict(pipe=2, data=2), 1), (dict(fsdp=2), 1)),
        ((dict(data=2, expert=2), 1), (dict(pipe=2, data=2, fsdp=2), 2)),
        ((dict(pipe=2, expert=2), 2), (dict(pipe=3), 1)),
    ],
    ids=["off", "onto", "other-pipe"],
)
def test_states_move_between_pipes(start, end):
    """Parameters, low halves and moments of a state, as laid out in the other."""
    (state, pipe), (like, other) = state_on(*start), state_on(*end)

    filled = jax.tree.map_with_path(lambda path, x: numbered(path, x, pipe), state)
    expected = jax.tree.map_with_path(lambda path, x: numbered(path, x, other), like)
    # As a checkpoint would be read.
    asked = stacked_as(like, LayersInPipe(0, 3), pipe)
    read = jax.tree.map(lambda x, place: jax.device_put(np.asarray(x), place.sharding), filled, asked)
    assert_same_layout_and_bits(restack(read, like, 3), expected)


def numbered(key_path, x, pipe: PipeShape):
    """Returns the array with other values, which depend on the layer and not on the pipe; places without a layer are zeros."""
    path = parameter_path(key_path)
    if not is_dealt_out(path, 0):
        return x
    own = x.shape[3:] if pipe.ranks > 1 else x.shape[1:]
    values = np.arange(1, 3 * int(np.prod(own)) + 1).reshape(3, *own) % 251
    values = values if pipe.ranks == 1 else split_layers(jnp.asarray(values), *pipe)
    return jax.device_put(jnp.asarray(values, x.dtype), x.sharding)


def wrong_chunks(folder, config, mesh):
    moe_jax.from_pretrained(folder, mesh=mesh, pipe_chunks=3, progress=False)


def chunks_without_pipe(folder, config, mesh):
    random_model(config, jnp.float32, pipe_chunks=2)


def experts_before(folder, config, mesh):
    random_model(replace(tiny.model().config, num_hidden_layers=3, mlp_only_layers=(1,)), jnp.float32, mesh=mesh)


@pytest.mark.parametrize(
    "call, message",
    [
        (wrong_chunks, "3 layers do not reach the last of 3 chunks on pipe=2 ranks; use fewer chunks"),
        (
            chunks_without_pipe,
            "pipe_chunks must be at least 1, and 1 where the mesh axis pipe has one device; got 2 with pipe=1",
        ),
        (experts_before, "a pipeline deals out a model's last layers of one kind, .* has 3 runs of layers, and experts before"),
    ],
)
def test_refusals(folder, monkeypatch, call, message):
    monkeypatch.setattr(streaming, "_copy", None)
    with pytest.raises(ValueError, match=message):
        call(folder, three_layers(), mesh_of(pipe=2))
