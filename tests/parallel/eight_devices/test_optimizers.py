"""Muon and Adafactor on meshes: from equal gradients, updates equal one device's. Their state is split as parameters are."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from moe_jax.adapters import LoraSettings, add_lora
from moe_jax.checkpoint.training import TrainingCheckpoints
from moe_jax.parallel import Parallelism, make_mesh, parameter_sharding
from moe_jax.parallel.layout import parameter_path
from moe_jax.parallel.pipeline.chunks import LayersInPipe, PipeShape, from_chunks, to_chunks
from moe_jax.train import apply_gradients, init_state, make_optimizer
from moe_jax.train.run_checkpoints import PIPE, restored
from tests.helpers import seeds, tiny
from tests.helpers.meshes import mesh_of, relative_error
from tests.helpers.train_steps import make_batch, train


def adapted():
    model = tiny.model()
    add_lora(model, LoraSettings(rank=4), rngs=nnx.Rngs(0))
    return model


def placed(tree, mesh):
    def place(path, p):
        return jax.device_put(p, parameter_sharding(parameter_path(path), p.shape, mesh))

    return tree if mesh is None else jax.tree.map_with_path(place, tree)


@cache
def updated(make_model, name, parallelism=None):
    """The state after two updates from random gradients; with a pipe the layers are in chunks."""
    model, rng, optimizer = make_model(), seeds.rng(name), make_optimizer(1e-2, name=name)
    mesh = None if parallelism is None else parallelism.mesh
    lay_out = partial(to_chunks if parallelism is not None and parallelism.pipelined else placed, mesh=mesh)
    params = nnx.state(model, nnx.Param)
    gradients = [jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params) for _ in range(2)]
    nnx.update(model, lay_out(nnx.state(model)))
    state = init_state(model, optimizer, parallelism)
    step = jax.jit(partial(apply_gradients, optimizer, parallelism=parallelism))
    for g in gradients:
        state = step(state, lay_out(g))
    return state


MUON_IN_A_PIPE = Parallelism(mesh_of(pipe=2, fsdp=2, expert=2))


@pytest.mark.parametrize(
    "name, make_model, parallelism",
    [
        ("muon", tiny.model, MUON_IN_A_PIPE),
        ("adafactor", tiny.model, Parallelism(mesh_of(data=2, fsdp=4), shard_optimizer=True)),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("muon", tiny.model, Parallelism(mesh_of(data=2, fsdp=4), shard_optimizer=True)),
                ("muon", adapted, Parallelism(mesh_of(fsdp=2, expert=2, context=2))),
                ("adafactor", adapted, Parallelism(mesh_of(fsdp=2, expert=2, context=2))),
                ("adafactor", tiny.model, Parallelism(mesh_of(pipe=2, fsdp=2))),
            )
        ),
    ],
    ids=["muon in a pipe", "adafactor in parts", "muon in parts", "muon adapters", "adafactor adapters", "adafactor in a pipe"],
)
def test_updates(name, make_model, parallelism):
    expected, found = updated(make_model, name).params, updated(make_model, name, parallelism).params
    found = from_chunks(found, 2) if parallelism.pipelined else found
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(ours, theirs) < 2e-5, jax.tree_util.keystr(path)


def test_layouts_of_the_state():
    """Moments of rows and columns are split where the matrix's rows and columns are."""
    parallelism = Parallelism(make_mesh(data=2, fsdp=2, expert=2), shard_optimizer=True)
    model = tiny.model()
    nnx.update(model, placed(nnx.state(model), parallelism.mesh))
    adafactor, muon = (init_state(model, make_optimizer(1e-2, name=name), parallelism) for name in ("adafactor", "muon"))
    rows, columns = adafactor.opt_state[1][0].moments["stages"][0]["self_attn"]["q_proj"]["weight"].get_value()
    momentum = muon.opt_state[1][0][0].inner_state[0].trace["stages"][0]["self_attn"]["q_proj"]["weight"]
    assert momentum.sharding.spec == rows.sharding.spec == P("data", ("fsdp", "expert"), None)
    assert columns.sharding.spec == P("data", None, None)


@pytest.mark.thorough
def test_two_steps_of_muon():
    batch, options = make_batch(seeds.rng()), {"optimizer": make_optimizer(1e-2, name="muon", eps=1e-3)}
    _, expected = train(batch, **options)
    _, metrics = train(batch, Parallelism(make_mesh(data=2, fsdp=2, expert=2)), **options)
    np.testing.assert_allclose([m["loss"] for m in metrics], [m["loss"] for m in expected], rtol=1e-5)


def test_checkpoints_on_another_pipe(tmp_path):
    """Every moment keeps its layer."""
    layers, (piped, plain) = LayersInPipe(0, 2), (updated(tiny.model, "muon", on) for on in (MUON_IN_A_PIPE, None))
    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(2, piped, {PIPE: PipeShape(2)._asdict()})
    read = restored(partial(checkpoints.restore, 2), plain, layers, checkpoints.position(2), PipeShape())
    checkpoints.close()
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(read), jax.tree.leaves(plain), strict=True):
        assert relative_error(ours, theirs) < 2e-5, jax.tree_util.keystr(path)
