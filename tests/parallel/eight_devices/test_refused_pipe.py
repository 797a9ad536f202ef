"""Work that does not run through a pipe refuses a mesh with one, before anything is read, computed or written."""

import pytest
import tiny
from flax import nnx
from meshes import laid_out

import moe_jax
from moe_jax.check.report import check_model
from moe_jax.checkpoint import load_orbax, save_orbax
from moe_jax.parallel.layout import mesh_of


def test_generate():
    with pytest.raises(ValueError, match="generation has no pipe yet, and the mesh has pipe=2: move the layers out"):
        moe_jax.generate(laid_out(tiny.model(), pipe=2), [[1, 2]], max_new_tokens=1)


def test_orbax(tmp_path):
    with pytest.raises(ValueError, match="save_orbax has no pipe yet, and the mesh has pipe=2: save_pretrained writes"):
        save_orbax(laid_out(tiny.model(), pipe=2), tmp_path / "model")
    assert not (tmp_path / "model").exists()
    moe_jax.save_pretrained(tiny.model(), tmp_path / "model", progress=False)
    with pytest.raises(ValueError, match="load_orbax has no pipe yet, and the mesh has pipe=2: from_pretrained reads"):
        load_orbax(tmp_path / "model", mesh=mesh_of(nnx.state(laid_out(tiny.model(), pipe=2))))


def test_check_model():
    with pytest.raises(ValueError, match="check_model has no pipe yet, and the mesh has pipe=2: move the layers out"):
        check_model(laid_out(tiny.model(), pipe=2), [1, 2, 3])
