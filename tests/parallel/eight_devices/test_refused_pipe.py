"""Work that does not run through a pipe refuses a mesh with one, before anything is read, computed or written."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moe_jax
from moe_jax.check.report import check_model
from moe_jax.checkpoint import load_orbax, save_orbax
from moe_jax.parallel import make_mesh
from moe_jax.parallel.layout import mesh_of
from moe_jax.parallel.pipeline.chunks import to_chunks
from moe_jax.train import init_state, make_evaluation, make_optimizer, make_train_step
from moe_jax.train.rebalance import move_experts
from tests.helpers import seeds, tiny
from tests.helpers.meshes import laid_out
from tests.helpers.train_steps import make_batch


def in_chunks():
    """A model that was laid out for a pipe, and whose arrays are on one device."""
    model = tiny.model()
    on_pipe = to_chunks(nnx.state(model), make_mesh(pipe=2, devices=jax.devices()[:2]))
    nnx.update(model, jax.device_put(on_pipe, jax.devices()[0]))
    return model


def batch():
    return {name: jnp.asarray(x) for name, x in make_batch(seeds.rng()).items()}


def train(model):
    optimizer = make_optimizer(1e-3)
    make_train_step(nnx.graphdef(model), optimizer)(init_state(model, optimizer), batch())


@pytest.mark.parametrize(
    "work, call",
    [
        ("a call of the model", lambda model, folder: model(jnp.ones((1, 4), jnp.int32))),
        ("a call of the model", lambda model, folder: train(model)),
        (
            "a call of the model",
            lambda model, folder: make_evaluation(nnx.graphdef(model))(init_state(model, make_optimizer(1e-3)), [batch()]),
        ),
        ("generation", lambda model, folder: moe_jax.generate(model, [[1, 2]], max_new_tokens=1)),
        ("to_chunks", lambda model, folder: to_chunks(nnx.state(model), make_mesh(pipe=2, devices=jax.devices()[:2]))),
        ("moving experts", lambda model, folder: move_experts(nnx.state(model), model.config, [[1, 0, 2, 3]] * 2)),
    ],
    ids=["call", "train", "evaluate", "generate", "to_chunks", "move"],
)
def test_layers_in_chunks(work, call, tmp_path):
    """Wherever the arrays are, work that needs the layers along one axis raises an error."""
    with pytest.raises(ValueError, match=rf"{work} needs a model's layers along one axis.*\[1, 2, 1, 16\].*from_chunks"):
        call(in_chunks(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_generate():
    with pytest.raises(
        ValueError, match="generation has no pipe yet, and the mesh has pipe=2: load the model's folder onto another mesh"
    ):
        moe_jax.generate(laid_out(tiny.model(), pipe=2), [[1, 2]], max_new_tokens=1)


def test_orbax(tmp_path):
    with pytest.raises(ValueError, match="save_orbax has no pipe yet, and the mesh has pipe=2: save_pretrained writes"):
        save_orbax(laid_out(tiny.model(), pipe=2), tmp_path / "model")
    assert not (tmp_path / "model").exists()
    moe_jax.save_pretrained(tiny.model(), tmp_path / "model", progress=False)
    with pytest.raises(ValueError, match="load_orbax has no pipe yet, and the mesh has pipe=2: from_pretrained reads"):
        load_orbax(tmp_path / "model", mesh=mesh_of(nnx.state(laid_out(tiny.model(), pipe=2))))


def test_check_model():
    with pytest.raises(
        ValueError, match="check_model has no pipe yet, and the mesh has pipe=2: load the model's folder onto another mesh"
    ):
        check_model(laid_out(tiny.model(), pipe=2), [1, 2, 3])
