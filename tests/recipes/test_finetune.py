"""The loop learns, logs, refuses nonsense, and stops at a loss that is not finite."""

import json
import re
import sys

import numpy as np
import pytest

from moe_jax.recipes import finetune
from moe_jax.recipes.run.run_log import default_log_every
from moe_jax.train import open_documents, survey
from moe_jax.train.metrics import read_records
from tests.helpers import steps_without_passes, tiny
from tests.helpers.tiny import settings


def held_out_text(folder):
    tiny.write_texts(folder / "held-out")
    (folder / "held-out" / "more.txt").write_text("words that nobody trains on")
    return str(folder / "held-out")


def test_tensorboard_gets_every_scalar(tmp_path, capsys, steps_that_learn_nothing):
    finetune(settings(tmp_path, tensorboard=True), model=tiny.dense(), tokenizer=tiny.tokenizer(), stop_after=2)
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    content = events.read_bytes()
    assert all(name in content for name in (b"loss", b"grad_norm", b"max_mean_expert_load"))
    assert "step 2: loss" in capsys.readouterr().out


def test_steps_are_announced_where_there_are_any(tmp_path, capsys, steps_that_learn_nothing):
    for announced in (True, False):
        finetune(settings(tmp_path, steps=2), model=tiny.dense(), tokenizer=tiny.tokenizer())
        printed = capsys.readouterr().out
        assert ("9 documents: 1,746 tokens, 99% of them learned; rows of 32 tokens with " in printed) == announced
        assert ("\n9 of 9 documents are longer than a row and are cut\nsteps 1 to 2, 4 x 32 tokens a" in printed) == announced


def test_settings_are_noted_with_the_steps_that_epochs_come_to(tmp_path, monkeypatch, steps_that_learn_nothing):
    found = survey(open_documents(tiny.write_texts(tmp_path / "texts")), tiny.tokenizer(), seq_len=32)
    surveys, steps = [], {}
    monkeypatch.setattr(
        sys.modules["moe_jax.recipes.finetuning.prepare"],
        "survey",
        lambda *_, **options: surveys.append(options) or survey(*_, **options),
    )
    for epochs in (0.5, 0.5, 1.0):
        asked = settings(tmp_path, epochs=epochs, steps=1000, warmup_steps=0)
        result = finetune(asked, model=tiny.dense(), tokenizer=tiny.tokenizer())
        noted = json.loads((tmp_path / "run" / "settings.json").read_text())
        assert result.finished and (noted["epochs"], noted["steps"]) == (epochs, result.step)
        steps[epochs] = result.step
    assert steps == {epochs: found.steps(epochs, batch_size=4) for epochs in (0.5, 1.0)}
    # The second run reads its steps from the file.
    assert len(surveys) == 2 and all(options["max_documents"] is None for options in surveys)
    assert noted["seq_len"] == 32 and set(noted["versions"]) == {"moe_jax", "jax"}


def test_console_lines(tmp_path, capsys, steps_that_learn_nothing):
    """A line before the first step and its own line tell that it compiled; later steps tell the time left."""
    finetune(settings(tmp_path, steps=3), model=tiny.dense(), tokenizer=tiny.tokenizer())
    compiling, first, second, third = capsys.readouterr().out.splitlines()[-4:]
    assert compiling == "compiling step 1 ..."
    assert re.search(r"compiled in this step, \d+ s", first) and "tokens/s" not in first
    assert "tokens/s" in second and second.endswith(" left") and not third.endswith(" left")


@pytest.mark.parametrize(
    "steps, every", [(1, 1), (99, 1), (100, 2), (249, 2), (250, 5), (1000, 20), (1100, 20), (10**6, 20000)]
)
def test_a_run_prints_some_fifty_lines(steps, every):
    assert default_log_every(steps) == every


def test_a_line_every_few_steps(tmp_path, capsys, steps_that_learn_nothing):
    """The first and the last step and those that measure have one; the files have every step."""
    asked = settings(tmp_path, steps=11, log_every=4, eval_data=held_out_text(tmp_path), eval_every=6, eval_batches=1)
    for last, printed in ((5, [1, 4, 5]), (None, [6, 8, 11])):
        result = finetune(asked, model=tiny.dense(), tokenizer=tiny.tokenizer(), stop_after=last)
        output = capsys.readouterr().out
        assert [int(line.split()[1][:-1]) for line in output.splitlines() if line.startswith("step ")] == printed
        assert "held out: 10 documents; their loss is measured every 6 steps, on 1 batch of 4 rows\n" in output
    assert [record["step"] for record in result.metrics] == list(range(1, 12))


def test_a_checkpoint_that_was_never_finished_is_removed(tmp_path, steps_that_learn_nothing):
    (tmp_path / "run" / "checkpoints" / "1.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    finetune(settings(tmp_path, steps=2), model=tiny.dense(), tokenizer=tiny.tokenizer())
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]


def test_a_home_folder_may_be_written_short(tmp_path, monkeypatch, steps_that_learn_nothing):
    monkeypatch.setenv("HOME", str(tmp_path))
    finetune(settings(tmp_path, output="~/run"), model=tiny.dense(), tokenizer=tiny.tokenizer(), stop_after=1)
    assert len(read_records(tmp_path / "run" / "metrics.jsonl")) == 1


def test_loss_that_is_not_finite(tmp_path, monkeypatch):
    """The error names the step and the files."""
    numbers = steps_without_passes.numbers_of(1) | dict.fromkeys(("loss", "total_loss"), np.float32("nan"))
    steps_without_passes.put_in_place(monkeypatch, lambda state, _: (state, numbers))
    with pytest.raises(FloatingPointError, match=r"(?s)step 1: loss nan.*texts/\d\.txt"):
        finetune(settings(tmp_path), model=tiny.dense(), tokenizer=tiny.tokenizer())


def test_a_held_out_loss_that_is_not_finite_stops_too(tmp_path, monkeypatch, steps_that_learn_nothing):
    monkeypatch.setattr(
        sys.modules["moe_jax.recipes.finetuning.loop"], "make_evaluation", lambda *_, **__: lambda *_: float("nan")
    )
    held_out = dict(eval_data=held_out_text(tmp_path), eval_every=1)
    with pytest.raises(FloatingPointError, match="step 1: the held-out loss nan is not finite"):
        finetune(settings(tmp_path, **held_out), model=tiny.dense(), tokenizer=tiny.tokenizer())
