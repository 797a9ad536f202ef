"""Fine-tuning through a pipe: a killed run resumes bit for bit, and on another mesh with the same losses."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.checkpoint.training import TrainingCheckpoints, finished_steps
from moe_jax.parallel.choices import MeshShape
from moe_jax.parallel.pipeline.chunks import from_chunks, to_chunks
from moe_jax.recipes import finetune
from moe_jax.train import model_of_run
from moe_jax.train.metrics import read_records
from tests.helpers import shared_steps, tiny
from tests.helpers.meshes import laid_out, mesh_of
from tests.helpers.run_pipe import run

ROOT = Path(__file__).parents[3]


def comparable(output: Path) -> list[dict]:
    timed = ("tokens_per_second", "model_tflops", "step_time")
    records = [{k: v for k, v in r.items() if k not in timed} for r in read_records(output / "metrics.jsonl")]
    return records + [r for path in output.glob("expert_load.jsonl") for r in read_records(path)]


def losses(output: Path) -> list[float]:
    return [
        record[name] for record in read_records(output / "metrics.jsonl") for name in ("loss", "eval_loss") if name in record
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run through a pipe of two ranks, and its data."""
    return make_run(tmp_path_factory.mktemp("whole"))


def make_run(folder: Path, **options):
    data = tiny.write_texts(folder / "texts")
    (folder / "held_out").mkdir()
    (folder / "held_out" / "0.txt").write_text("other words, which nobody trains on, come once. " * 20)
    result = run(data, folder / "run", mesh_of(pipe=2), **options)
    return data, folder / "run", result.model


@pytest.fixture(scope="module")
def one(whole, tmp_path_factory):
    """The same run on one device."""
    folder = tmp_path_factory.mktemp("one")
    return folder, run(whole[0], folder, None).model


@pytest.mark.thorough
def test_losses_are_those_of_one_device(whole, one, tmp_path):
    (_, output, model), (alone, one) = whole, one
    np.testing.assert_allclose(losses(output), losses(alone), rtol=1e-6)
    moe_jax.save_pretrained(model, tmp_path / "piped", progress=False)
    piped = moe_jax.from_pretrained(tmp_path / "piped", dtype=np.float32, progress=False)
    for (path, x), y in zip(jax.tree.leaves_with_path(nnx.state(piped)), jax.tree.leaves(nnx.state(one)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-2, atol=1e-4, err_msg=jax.tree_util.keystr(path))


def test_a_dense_run_goes_on(tmp_path, monkeypatch):
    """From a checkpoint of the pipe, bit for bit."""
    shared_steps.share(monkeypatch)
    data, expected, _ = make_run(tmp_path, make_model=tiny.dense)
    output = tmp_path / "again"
    shutil.copytree(expected, output)
    for later in (4, 6):
        shutil.rmtree(output / "checkpoints" / str(later))
    run(data, output, mesh_of(pipe=2), make_model=tiny.dense)
    assert 6 in finished_steps(output / "checkpoints")
    assert comparable(output) == comparable(expected)


@pytest.mark.thorough
def test_killed_in_a_step_and_in_a_save(whole, tmp_path):
    """The run resumes bit for bit."""
    data, expected, _ = whole
    for step, where in ((3, "step"), (4, "save")):
        process = subprocess.run(
            [sys.executable, "-m", "tests.helpers.run_pipe", str(data), str(tmp_path / "run"), str(step), where],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
        )
        assert process.returncode == -signal.SIGKILL, process.stderr.decode()[-3000:]
    assert finished_steps(tmp_path / "run" / "checkpoints")[0] == 2
    run(data, tmp_path / "run", mesh_of(pipe=2))
    assert comparable(tmp_path / "run") == comparable(expected)


@pytest.mark.thorough
def test_a_run_goes_on_without_a_pipe_and_through_another(whole, one, tmp_path):
    """pipe=2 to step 2; fsdp=2 to step 4; then pipe=2 in two chunks, with the optimizer split over `data`."""
    data, output = whole[0], tmp_path / "run"
    shutil.copytree(whole[1], output)
    for later in (4, 6):
        shutil.rmtree(output / "checkpoints" / str(later))
    run(data, output, mesh_of(fsdp=2), stop_after=4)
    model = run(data, output, mesh_of(pipe=2, data=2), chunks=2, shard_optimizer=True).model
    np.testing.assert_allclose(losses(output), losses(one[0]), rtol=1e-6)
    assert model.stages[0].mlp.router.weight.shape[:3] == (2, 2, 1)
    checkpoints = TrainingCheckpoints(output / "checkpoints")
    pipes = [checkpoints.position(step)["pipe"] for step in (2, 4, 6)]
    checkpoints.close()
    assert pipes == [{"ranks": ranks, "chunks": chunks} for ranks, chunks in ((2, 1), (1, 1), (2, 2))]
    off, onto = (model_of_run(output, dtype=np.float32, **options) for options in ({}, dict(mesh=mesh_of(pipe=3))))
    back = from_chunks(nnx.state(model), 3)
    for other in (nnx.state(off), from_chunks(nnx.state(onto), 3)):
        for x, y in zip(jax.tree.leaves(other), jax.tree.leaves(back), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.thorough
def test_losses_with_another_schedule(whole, one, tmp_path):
    """A run that began in uniform ticks resumes in another order, with evaluations."""
    output = tmp_path / "run"
    shutil.copytree(whole[1], output)
    for later in (4, 6):
        shutil.rmtree(output / "checkpoints" / str(later))
    run(whole[0], output, mesh_of(pipe=2), chunks=2, pipe_schedule="zb-v")
    np.testing.assert_allclose(losses(output), losses(one[0]), rtol=1e-6)


def test_a_model_on_a_pipe_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    def refused(message, loss=None, model=None, expert=1, **changes):
        settings = tiny.settings(tmp_path, **{"gradient_accumulation": 2, **changes})
        mesh = mesh_of(pipe=2, expert=expert)
        if model is None:
            model = tiny.model()
            nnx.update(model, to_chunks(nnx.state(model), mesh))
        with pytest.raises(ValueError, match=message):
            finetune(settings, model=model, tokenizer=tiny.tokenizer(), loss=loss)
        assert not (tmp_path / "run").exists()

    refused("mesh.pipe=2 needs a gradient_accumulation of 2 or more", gradient_accumulation=1)
    refused("a pipe needs the built-in loss, and the mesh has pipe=2", loss=lambda model, batch: (0.0, {}))
    refused("the mesh has pipe=2, and the model's layers are not split into chunks", model=laid_out(tiny.model(), pipe=2))
    refused("settings.mesh=.*pipe=1.*, but the model is on .*pipe=2", mesh=MeshShape(fsdp=2))
    refused("settings.pipe_chunks=2, but the model is split into 1 chunks a rank", mesh=MeshShape(pipe=2), pipe_chunks=2)
    # GPUs of one process have this default: copies, and so pairwise exchanges.
    monkeypatch.setattr("moe_jax.parallel.collectives.hops._obstacle", lambda mesh: "")
    options = dict(mesh=MeshShape(pipe=2, expert=2), pipe_schedule="uniform-w", capacity_factor=2.0)
    refused("let experts compute in one call .*hops='nccl'", expert=2, **options)
