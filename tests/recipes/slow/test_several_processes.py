"""Two processes train as one does; told to stop they save, and one process resumes from there."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import moe_jax
from moe_jax.cli import main
from moe_jax.train.metrics import read_records
from tests.helpers import cpu_flags, tiny

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-m", "moe_jax.cli"]
LAUNCH = [*PROGRAM, "launch", "--processes", "2", "--cpu-devices", "1", "--", *PROGRAM]
STEPS = 8
SECONDS = 300

pytestmark = pytest.mark.usefixtures("without_torch")


def environment() -> dict[str, str]:
    # Each device blocks a thread of XLA's pool in a collective.
    flags, paths = cpu_flags.UNOPTIMISED, os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    return {**os.environ, "PYTHONPATH": paths, "XLA_FLAGS": flags, "NPROC": "16", "JAX_PLATFORMS": "cpu"}


def launched(*arguments):
    """Runs a command in two processes."""
    done = subprocess.run([*LAUNCH, *arguments], env=environment(), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def moments(checkpoint: Path) -> dict[str, np.ndarray]:
    """Returns AdamW's first moments by parameter: after the first step a tenth of each clipped gradient."""
    checkpointer = ocp.PyTreeCheckpointer()
    tree = checkpointer.metadata(checkpoint / "state").item_metadata.tree
    arrays = checkpointer.restore(
        checkpoint / "state", restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    )
    named = {jax.tree_util.keystr(path): array for path, array in jax.tree.leaves_with_path(arrays)}
    return {name: array for name, array in named.items() if "'mu'" in name}


def saved(folder: Path) -> list[str]:
    """Saves a dense model; returns the options that name it."""
    tiny.tokenizer().save_pretrained(folder / "tokenizer")
    moe_jax.save_pretrained(tiny.dense(), folder / "model", tokenizer_from=folder / "tokenizer")
    return ["--model", str(folder / "model"), "--dtype", "float32"]


@pytest.mark.long
def test_two_processes_are_one_and_stop_when_told(tmp_path, one_step_for_all):
    """One process without a mesh resumes their run."""
    sizes = f"--seq-len 32 --batch-size 16 --steps {STEPS} --warmup-steps 1 --learning-rate 1e-2".split()
    data = tiny.write_texts(tmp_path / "texts")
    options = [*saved(tmp_path), "--data", str(data), *sizes, "--checkpoint-every", "1", "--keep-checkpoints", "100"]
    one, two = tmp_path / "one", tmp_path / "two"
    command = [*LAUNCH, "finetune", *options, "--mesh.fsdp", "2", "--output", str(two)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + SECONDS
    while len(read_records(two / "metrics.jsonl")) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 143, printed[-5000:]
    records = read_records(two / "metrics.jsonl")
    assert 3 <= len(records) < STEPS
    assert f"[0] stopped after step {len(records)} and saved" in printed
    assert "[0] step 1: loss" in printed and "[1] step" not in printed

    for output in (one, two):
        main(["finetune", *options, "--output", str(output)])
    expected, actual = read_records(one / "metrics.jsonl"), read_records(two / "metrics.jsonl")
    assert actual[: len(records)] == records and len(actual) == len(expected) == STEPS
    for name in ("loss", "grad_norm"):
        # Later steps inherit f32's noise through AdamW, which divides small gradients by their size.
        for steps, tolerance in ((slice(0, 2), 1e-5), (slice(2, STEPS), 1e-3)):
            pairs = ([record[name] for record in run[steps]] for run in (actual, expected))
            np.testing.assert_allclose(*pairs, rtol=tolerance, err_msg=name)
    gradients = moments(one / "checkpoints" / "1")
    assert len(gradients) == 14
    for name, array in moments(two / "checkpoints" / "1").items():
        assert np.linalg.norm(array - gradients[name]) <= 1e-5 * np.linalg.norm(gradients[name]), name


@pytest.mark.thorough
def test_a_pipe_over_two_processes(tmp_path):
    """Each process reads and saves its own layers. The run resumes in one process without a pipe."""
    data = tiny.write_texts(tmp_path / "texts")
    options = [*saved(tmp_path), *f"--data {data} --seq-len 16 --batch-size 8 --gradient-accumulation 2".split()]
    options += "--warmup-steps 1 --learning-rate 1e-2 --min-learning-rate-ratio 1".split()
    launched("finetune", *options, "--steps", "2", "--mesh.pipe", "2", "--output", str(tmp_path / "two"))
    for folder in ("two", "one"):
        main(["finetune", *options, "--steps", "3", "--output", str(tmp_path / folder)])
    piped, alone = ([record["loss"] for record in read_records(tmp_path / name / "metrics.jsonl")] for name in ("two", "one"))
    assert len(alone) == 3
    np.testing.assert_allclose(piped, alone, rtol=1e-5)


@pytest.mark.thorough
def test_two_processes_learn_preferences_as_one(tmp_path):
    """The first process decides if the reference is computed, and writes it."""
    pairs = [dict(prompt=f"ask {i}?", chosen=f"please, {i}", rejected="no!") for i in range(9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = [*saved(tmp_path), *f"--data {tmp_path}/pairs.jsonl --seq-len 128 --batch-size 4".split()]
    options += ["--steps", "2", "--learning-rate", "1e-4"]
    launched("prefer", *options, "--mesh.fsdp", "2", "--output", str(tmp_path / "two"))
    main(["prefer", *options, "--output", str(tmp_path / "one")])
    tables, records = zip(
        *((np.load(f / "reference_data.npy"), read_records(f / "metrics.jsonl")) for f in (tmp_path / "two", tmp_path / "one")),
        strict=True,
    )
    np.testing.assert_allclose(*tables, rtol=1e-5)
    for two, one in zip(*records, strict=True):
        np.testing.assert_allclose(
            [two[n] for n in ("loss", "kl", "grad_norm")], [one[n] for n in ("loss", "kl", "grad_norm")], rtol=1e-4, atol=1e-6
        )
