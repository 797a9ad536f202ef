"""A run that is killed resumes with the losses it would have had, bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

import moe_jax
from moe_jax.checkpoint.training import TrainingCheckpoints, finished_steps
from moe_jax.recipes import FinetuneSettings, finetune
from moe_jax.recipes.finetuning.prepare import prepare_run
from moe_jax.recipes.run.identity import same_run
from moe_jax.train.compiled_step import TrainStep
from moe_jax.train.metrics import MetricsWriter, read_records
from moe_jax.train.optimizer import warmup_cosine
from moe_jax.train.starting_weights import MODEL
from tests.helpers import run_tiny, tiny

ROOT = Path(__file__).parents[3]


def comparable(output: Path) -> list[dict]:
    timed = ("tokens_per_second", "model_tflops", "step_time")
    return [{k: v for k, v in r.items() if k not in timed} for r in read_records(output / "metrics.jsonl")]


def test_kill_minus_nine_and_resume_gives_the_same_losses(tmp_path, steps_that_add, without_torch):
    data, output = tiny.write_texts(tmp_path / "texts"), tmp_path / "killed"
    run_tiny.run(data, tmp_path / "whole")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.helpers.run_tiny", str(data), str(output)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 240
    while not finished_steps(output / "checkpoints") or len(read_records(output / "metrics.jsonl")) < 7:
        assert process.poll() is None, process.stderr.read().decode()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    run_tiny.run(data, output)
    assert comparable(output) == comparable(tmp_path / "whole") and len(comparable(output)) == 24
    assert finished_steps(output / "checkpoints") == [20, 24]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_alone_saves_when_it_is_told_to_stop(tmp_path, monkeypatch, steps_that_learn_nothing, number):
    settings = tiny.settings(tmp_path)
    handler, write = signal.getsignal(number), MetricsWriter.write

    def write_and_be_told(self, record, of_layers):
        write(self, record, of_layers)
        if record["step"] == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(MetricsWriter, "write", write_and_be_told)
    if number == signal.SIGTERM:
        assert finetune(settings, model=tiny.dense(), tokenizer=tiny.tokenizer()).step == 2
    else:
        with pytest.raises(KeyboardInterrupt, match="interrupted after step 2 and saved; the same command resumes"):
            finetune(settings, model=tiny.dense(), tokenizer=tiny.tokenizer())
    assert signal.getsignal(number) is handler
    assert finished_steps(tmp_path / "run" / "checkpoints") == [2]


def test_a_second_ctrl_c_interrupts_at_once(tmp_path):
    # Programs started in the background of a shell ignore Ctrl-C, and so would this one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        checkpoints = TrainingCheckpoints(tmp_path)
        checkpoints.listen()
        signal.raise_signal(signal.SIGINT)
        assert checkpoints.told_to_stop(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        checkpoints.close()
    finally:
        signal.signal(signal.SIGINT, before)


def test_more_steps_after_the_end(tmp_path, monkeypatch, steps_that_add):
    """A run that has ended continues with more steps, and not with fewer."""
    lengths, schedule = [], warmup_cosine
    monkeypatch.setattr(
        sys.modules["moe_jax.recipes.run.model"],
        "warmup_cosine",
        lambda rate, *, steps, **options: lengths.append(steps) or schedule(rate, steps=steps, **options),
    )

    def run(folder, steps):
        paths = dict(model="none", data=str(tiny.write_texts(tmp_path / "texts")), output=str(tmp_path / folder))
        # The same rate in runs of any length, so that all else can be compared.
        rate = dict(learning_rate=1e-2, min_learning_rate_ratio=1.0)
        settings = FinetuneSettings(**paths, **rate, steps=steps, seq_len=16, batch_size=2, dtype="float32")
        assert finetune(settings, model=tiny.dense(), tokenizer=tiny.tokenizer()).step == steps

    run("lengthened", steps=2)
    with pytest.raises(ValueError, match="lengthened holds 2 steps of this run: steps=1 would end before; use 2 or more"):
        run("lengthened", steps=1)
    run("lengthened", steps=4)
    run("whole", steps=4)
    assert comparable(tmp_path / "lengthened") == comparable(tmp_path / "whole")
    assert lengths == [2, 4, 4]


def test_a_run_keeps_the_layers_and_parts_of_its_beginning(tmp_path, monkeypatch, steps_that_add):
    """The choice of "auto" on another GPU would change the last bits. Runs that noted none recomputed all layers."""
    reused = []
    monkeypatch.setattr(TrainStep, "set_remat", lambda step, remat: reused.append(remat))

    def run(steps, **options):
        paths = dict(model="none", data=str(tiny.write_texts(tmp_path / "texts")), output=str(tmp_path / "run"))
        rate = dict(learning_rate=1e-2, min_learning_rate_ratio=1.0, warmup_steps=1)
        settings = FinetuneSettings(**paths, **rate, steps=steps, seq_len=16, batch_size=2, dtype="float32", **options)
        finetune(settings, model=tiny.dense(), tokenizer=tiny.tokenizer())

    run(1, remat=1)
    run(2, remat="3,attention")
    assert reused == []
    position = TrainingCheckpoints.position
    found = position(TrainingCheckpoints(tmp_path / "run" / "checkpoints", keep=3), 2)
    assert found["remat"] == "3,attention"
    run(3)
    assert reused == ["3,attention"]
    monkeypatch.setattr(
        TrainingCheckpoints, "position", lambda *a: {name: x for name, x in position(*a).items() if name != "remat"}
    )
    run(4)
    assert reused == ["3,attention", True]


def test_a_run_that_began_without_a_bos_token_goes_on_without(tmp_path, monkeypatch):
    paths = dict(model="none", data=str(tiny.write_texts(tmp_path / "texts")), output=str(tmp_path / "run"))
    settings = FinetuneSettings(**paths, seq_len=512, batch_size=2, steps=2, warmup_steps=0, dtype="float32")
    tokenizer = tiny.tokenizer_with_a_beginning()

    def prepared():
        with ExitStack() as until_end:
            run, begun = prepare_run(settings, tiny.dense(), tokenizer, until_end)
            begun.checkpoints.close()
            return begun, run.batches.get_state(), next(run.batches)["tokens"]

    begun, data, first = prepared()
    assert begun.fixed["identity"]["begin_texts"] and (first == 1).any()
    old = {name: value for name, value in begun.fixed["identity"].items() if name != "begin_texts"}
    checkpoints = TrainingCheckpoints(tmp_path / "run" / "checkpoints")
    checkpoints.save(1, {"x": jnp.zeros(1)}, {"data": data, "identity": old})
    checkpoints.close()
    begun, _, rows = prepared()
    assert begun.step == 1 and "begin_texts" not in begun.fixed["identity"] and not (rows == 1).any()


def test_folder_of_another_run(tmp_path, monkeypatch, steps_that_learn_nothing):
    """A folder with another run is refused before weights are read."""
    checkpoint = tmp_path / "model"
    moe_jax.save_pretrained(tiny.dense(), checkpoint)
    settings = tiny.settings(tmp_path, model=str(checkpoint))
    result = finetune(settings, model=tiny.dense(), tokenizer=tiny.tokenizer(), stop_after=2)
    assert result.step == 2 and len(result.metrics) == 2
    monkeypatch.setattr(sys.modules["moe_jax.recipes.run.model"], "from_pretrained", None)
    with pytest.raises(ValueError, match="holds another run.*seed: checkpoint 0, now 1"):
        finetune(replace(settings, seed=1), tokenizer=tiny.tokenizer())
    in_bf16 = tiny.dense(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    with pytest.raises(
        ValueError, match="dtype: checkpoint 'float32', now 'bfloat16'; param_dtype: checkpoint 'float32', now 'bfloat16'"
    ):
        finetune(settings, model=in_bf16, tokenizer=tiny.tokenizer())
    moe_jax.save_pretrained(tiny.biased_model(), checkpoint)
    with pytest.raises(
        ValueError,
        match="holds another run.*config.model_type: checkpoint 'qwen3', now 'deepseek_v3'.*; and .* more in config",
    ):
        finetune(settings, tokenizer=tiny.tokenizer())
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])


def test_the_same_settings_with_another_model_are_another_run(tmp_path, caplog, steps_that_add):
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    for name, seed in (("base", 0), ("other", 1)):
        moe_jax.save_pretrained(tiny.dense(rngs=nnx.Rngs(seed)), tmp_path / name)
    shutil.copytree(tmp_path / "base", tmp_path / "copied")

    def run(steps, name=None, **passed):
        paths = dict(model=str(tmp_path / (name or "none")), tokenizer=str(tmp_path / "tokenizer"))
        return finetune(tiny.settings(tmp_path, steps=steps, warmup_steps=0, **paths), **passed)

    run(1, "base")
    for steps in (1, 2):
        with pytest.raises(
            ValueError, match="holds another run.*Different: model: its weights are not those that the run began"
        ):
            run(steps, "other")
    assert run(2, "copied").step == 2 and not caplog.messages
    run(3, model=tiny.dense())
    assert "noted its starting weights in another way, so nothing tells whether `model` is the one" in caplog.text
    with pytest.raises(ValueError, match="Different: model"):
        run(4, "other")


def test_another_model_that_is_passed_is_another_run(tmp_path, steps_that_add):
    def run(steps, seed):
        settings = tiny.settings(tmp_path, steps=steps, warmup_steps=0)
        finetune(settings, model=tiny.dense(rngs=nnx.Rngs(seed)), tokenizer=tiny.tokenizer())

    run(1, seed=0)
    with pytest.raises(ValueError, match="holds another run.*Different: model: its weights are not those that the run began"):
        run(1, seed=1)
    run(2, seed=0)


def test_a_run_that_did_not_note_its_model_goes_on(tmp_path, caplog):
    now = {"seed": 0, MODEL: "abc"}
    assert same_run({"seed": 0}, now, tmp_path) == {"seed": 0}
    assert f"the run in {tmp_path} did not note its starting weights, so nothing tells whether `model` is the" in caplog.text


@pytest.mark.parametrize("name, had, other", [("moment_dtype", "float32", "bfloat16"), ("optimizer", "adamw", "muon")])
def test_entries_that_older_runs_did_not_note(tmp_path, name, had, other):
    saved, now = {"seed": 0, MODEL: "abc"}, {"seed": 0, MODEL: "abc"}
    assert same_run(saved, now | {name: had}, tmp_path) == now | {name: had}
    with pytest.raises(ValueError, match=f"{name}: checkpoint '{had}', now '{other}'"):
        same_run(saved, now | {name: other}, tmp_path)
