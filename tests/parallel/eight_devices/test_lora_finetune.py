"""Fine-tuning with adapters on meshes: the losses of one device, and a run that dies, resumes and moves between meshes."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.adapters import LoraSettings, add_lora, save_adapter
from moe_jax.parallel import make_mesh
from moe_jax.parallel.choices import MeshShape
from moe_jax.recipes import FinetuneSettings, finetune
from moe_jax.recipes.run.folder import export
from moe_jax.train.metrics import read_records
from moe_jax.train.model_of_run import model_of_run
from tests.helpers import shared_steps, tiny


@pytest.fixture
def base(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.model(), tmp_path / "base", tokenizer_from=tmp_path / "tokenizer")
    return str(tmp_path / "base")


def settings_of(folder, base, **changes):
    """A run of four steps of a dense model, on texts."""
    moe_jax.save_pretrained(tiny.dense(), folder / "dense", tokenizer_from=base)
    paths = dict(model=str(folder / "dense"), data=str(tiny.write_texts(folder / "texts")), output=str(folder / "one"))
    options = dict(seq_len=32, batch_size=8, steps=4, learning_rate=2e-2, warmup_steps=0, checkpoint_every=2, dtype="float32")
    return FinetuneSettings(**paths, **options, **changes)


def losses(result):
    return [record["loss"] for record in result.metrics]


def die_at_step_three(record):
    if record["step"] == 3:
        raise InterruptedError


@pytest.mark.long
def test_losses_are_those_of_one_device(tmp_path, base, monkeypatch):
    """A run with dropout, its optimizer in parts, dies. It resumes on its mesh, with equal bits, and on one device."""
    shared_steps.share(monkeypatch)
    one = settings_of(tmp_path, base, lora=LoraSettings(rank=4, dropout=0.3))
    many = replace(one, output=str(tmp_path / "many"), mesh=MeshShape(data=2, fsdp=2, context=2), shard_optimizer=True)
    expected = losses(finetune(one))
    with pytest.raises(InterruptedError):
        finetune(many, on_step=die_at_step_three)
    died = [record["loss"] for record in read_records(tmp_path / "many" / "metrics.jsonl")]
    shutil.copytree(tmp_path / "many", tmp_path / "moved")
    found = losses(finetune(many))
    assert found[:3] == died
    for of_run in (found, losses(finetune(replace(one, output=str(tmp_path / "moved"))))):
        np.testing.assert_allclose(of_run, expected, rtol=1e-4)
    read = [model_of_run(tmp_path / "many", dtype=jnp.float32, mesh=mesh) for mesh in (None, make_mesh(fsdp=4, context=2))]
    leaves = (jax.tree.leaves(nnx.state(model, nnx.LoRAParam)) for model in read)
    assert all(np.array_equal(a, b) for a, b in zip(*leaves, strict=True))


@pytest.mark.thorough
def test_a_run_in_a_pipe(tmp_path, base):
    """It has the losses of one device, resumes bit for bit after it died, and resumes on a mesh without a pipe."""
    lora = LoraSettings(rank=4, targets=("attention", "mlp"), trainable_token_indices=(3, 264))
    one = settings_of(tmp_path, base, gradient_accumulation=2, lora=lora)

    def run(name, sizes, **stop):
        return finetune(replace(one, output=str(tmp_path / name), mesh=MeshShape(**sizes)), **stop)

    expected, sizes = losses(finetune(one)), dict(pipe=2, fsdp=2, data=2)
    with pytest.raises(InterruptedError):
        run("pipe", sizes, on_step=die_at_step_three)
    for name in ("moved", "again"):
        shutil.copytree(tmp_path / "pipe", tmp_path / name)
    pipe, again = run("pipe", sizes), run("again", sizes)
    np.testing.assert_allclose(losses(pipe), expected, rtol=1e-4)
    np.testing.assert_allclose(losses(run("moved", dict(fsdp=4, context=2))), expected, rtol=1e-4)
    assert losses(pipe) == losses(again)
    export(pipe.model, replace(one, output=str(tmp_path / "pipe")))
    saved = moe_jax.from_pretrained(tmp_path / "pipe", dtype=jnp.float32)
    read = model_of_run(tmp_path / "pipe", dtype=jnp.float32)
    tokens = jnp.arange(257, 265)[None]
    np.testing.assert_allclose(read(tokens).logits, saved(tokens).logits, rtol=1e-5, atol=1e-6)


def test_files_have_equal_bytes_from_any_mesh(tmp_path, base):
    written = []
    for sizes in ({}, dict(data=2, fsdp=2, expert=2)):
        model = moe_jax.from_pretrained(base, dtype=jnp.float32, mesh=make_mesh(**sizes) if sizes else None)
        add_lora(model, LoraSettings(rank=4, targets=("attention", "experts", "head")), rngs=nnx.Rngs(3))
        folder = tmp_path / "-".join(["adapter", *sizes])
        save_adapter(model, folder)
        written.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert written[0] == written[1] and len(written[0]) > 2


def test_refused_pipes_and_moving_experts(tmp_path):
    def settings(**options):
        return tiny.settings(tmp_path, **{"batch_size": 8, "gradient_accumulation": 2, "lora": LoraSettings()} | options)

    pipe = dict(mesh=MeshShape(pipe=2, fsdp=4))
    with pytest.raises(ValueError, match="lora.dropout=0.1 needs a mesh without pipe, .*; got mesh.pipe=2"):
        settings(**pipe, lora=LoraSettings(dropout=0.1, targets=("attention",)))
    with pytest.raises(ValueError, match="weights='nf4' needs a mesh without pipe, which holds whole matrices"):
        settings(**pipe, weights="nf4")
    with pytest.raises(ValueError, match="pipe_schedule='zb-h1' postpones gradients of weights, and frozen weights have none"):
        settings(mesh=MeshShape(pipe=2, data=4), pipe_schedule="zb-h1")
    with pytest.raises(ValueError, match="rebalance_every=2 is for runs without lora: frozen experts stay as they are"):
        settings(mesh=MeshShape(expert=2), rebalance_every=2)
