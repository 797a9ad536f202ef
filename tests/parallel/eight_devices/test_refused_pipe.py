"""Work that does not run through a pipe refuses a mesh with one, before anything is read, computed or written."""

import jax
import jax.numpy as jnp
import pytest
import tiny
from meshes import laid_out

import moe_jax
from moe_jax.check.report import check_model
from moe_jax.models.random_weights import random_model
from moe_jax.parallel import make_mesh
from moe_jax.recipes import finetune


def pipe():
    return make_mesh(pipe=2, fsdp=2, devices=jax.devices()[:4])


def test_from_pretrained():
    message = "from_pretrained has no pipe yet, and the mesh has pipe=2: load onto a mesh without pipe, or onto one device, and"
    with pytest.raises(ValueError, match=message):
        moe_jax.from_pretrained("no such folder", mesh=pipe())


def test_random_model():
    with pytest.raises(ValueError, match="random_model has no pipe yet, and the mesh has pipe=2: draw on a mesh without pipe"):
        random_model(tiny.model().config, jnp.float32, mesh=pipe())


def test_save_pretrained(tmp_path):
    with pytest.raises(ValueError, match="save_pretrained has no pipe yet, and the mesh has pipe=2: move the layers out"):
        moe_jax.save_pretrained(laid_out(tiny.model(), pipe=2), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_generate():
    with pytest.raises(ValueError, match="generation has no pipe yet, and the mesh has pipe=2: move the layers out"):
        moe_jax.generate(laid_out(tiny.model(), pipe=2), [[1, 2]], max_new_tokens=1)


def test_check_model():
    with pytest.raises(ValueError, match="check_model has no pipe yet, and the mesh has pipe=2: move the layers out"):
        check_model(laid_out(tiny.model(), pipe=2), [1, 2, 3])


def test_finetune(tmp_path):
    with pytest.raises(ValueError, match="finetune has no pipe yet, and the mesh has pipe=2: train through a pipe with"):
        finetune(tiny.settings(tmp_path), model=laid_out(tiny.model(), pipe=2), tokenizer=tiny.tokenizer())
    assert not (tmp_path / "run").exists()
