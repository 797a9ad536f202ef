"""The loop learns, logs, refuses nonsense, and stops at a loss that is not finite."""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from tiny import settings

from moe_jax.recipes import finetune
from moe_jax.recipes.run.run_log import default_log_every
from moe_jax.train import batches, loss, open_documents, survey
from moe_jax.train.metrics import read_records
from moe_jax.train.plots import plot_run


def held_out_text(folder):
    tiny.write_texts(folder / "held-out")
    (folder / "held-out" / "more.txt").write_text("words that nobody trains on")
    return str(folder / "held-out")


def test_the_loss_falls_and_every_step_is_logged(tmp_path):
    result = finetune(settings(tmp_path, sequence_loss_coef=1e-4), model=tiny.biased_model(), tokenizer=tiny.tokenizer())
    assert [record["step"] for record in result.metrics] == list(range(1, 31))
    assert result.metrics[-1]["loss"] < 0.6 * result.metrics[0]["loss"]
    assert set(result.metrics[0]) == {
        "step", "loss", "aux_loss", "sequence_loss", "z_loss", "grad_norm", "learning_rate", "tokens_per_second",
        "model_tflops", "max_mean_expert_load", "min_mean_expert_load", "num_dropped", "router_entropy", "num_rounds",
        "num_shadows", "max_expert_bias_range",
    }  # fmt: skip
    loads = read_records(tmp_path / "run" / "expert_load.jsonl")
    assert [record["step"] for record in loads] == list(range(1, 31))
    assert all(record["layers"] == [0, 1] and len(record["router_entropy"]) == 2 for record in loads)
    assert all(record["num_rounds"] == [1, 1] and record["num_shadows"] == [0, 0] for record in loads)
    bias = np.asarray(result.model.stages[0].mlp.router.expert_bias[...])
    np.testing.assert_allclose(loads[-1]["expert_bias_range"], np.stack([bias.min(axis=1), bias.max(axis=1)], axis=1))
    np.testing.assert_allclose(result.metrics[-1]["max_expert_bias_range"], np.ptp(bias, axis=1).max(), rtol=1e-6)
    assert result.metrics[-1]["sequence_loss"] > 0 and np.ptp(bias) > 0
    assert all(0 < sum(layer) <= 4 * 32 * 2 for record in loads for layer in record["expert_load"])
    assert result.model(jnp.zeros((1, 4), jnp.int32)).logits.shape == (1, 4, 264)
    pictures = plot_run(tmp_path / "run", tmp_path / "pictures", step=2)
    assert [picture.name for picture in pictures] == ["loss.png", "expert_load.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_held_out_text_is_measured_and_not_trained_on(tmp_path, one_step_for_all):
    options = dict(steps=5, eval_data=held_out_text(tmp_path), eval_every=2, eval_batches=3, batch_size=2)
    result = finetune(settings(tmp_path, **options), model=tiny.dense(), tokenizer=tiny.tokenizer())
    found = {record["step"]: record["eval_loss"] for record in result.metrics if "eval_loss" in record}
    assert sorted(found) == [2, 4, 5] and found[5] < found[2]
    stream = batches(open_documents(options["eval_data"]), tiny.tokenizer(), seq_len=32, batch_size=2)
    graph, state = nnx.split(result.model)
    losses = jax.jit(lambda state, batch: loss(nnx.merge(graph, state), batch)[1])
    parts = [losses(state, next(stream)) for _ in range(3)]
    expected = sum(p.cross_entropy for p in parts) / sum(p.num_labels for p in parts)
    np.testing.assert_allclose(found[5], expected, rtol=1e-5)
    alone = finetune(
        settings(tmp_path, steps=5, batch_size=2, output=str(tmp_path / "alone")),
        model=tiny.dense(),
        tokenizer=tiny.tokenizer(),
    )
    assert [record["loss"] for record in alone.metrics] == [record["loss"] for record in result.metrics]


def test_further_tokens_are_learned_and_logged_or_refused(tmp_path):
    model = tiny.deepseek(mtp=1, layers=1)
    with pytest.raises(ValueError, match="mtp_loss_coef=0 would leave the model's modules"):
        finetune(settings(tmp_path, mtp_loss_coef=0), model=model, tokenizer=tiny.tokenizer())
    result = finetune(settings(tmp_path, steps=12), model=model, tokenizer=tiny.tokenizer())
    losses = [record["mtp_loss"] for record in result.metrics]
    assert losses[-1] < 0.9 * losses[0] and result.model.config.num_nextn_predict_layers == 1
    assert len(read_records(tmp_path / "run" / "expert_load.jsonl")[0]["expert_load"]) == 1


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


def test_bf16_compute_keeps_f32_weights(tmp_path):
    model = tiny.dense(dtype=jnp.bfloat16, param_dtype=jnp.float32)
    result = finetune(settings(tmp_path, dtype="bfloat16", steps=3), model=model, tokenizer=tiny.tokenizer())
    assert result.model.head_weight.dtype == jnp.float32
    assert result.model(jnp.zeros((1, 4), jnp.int32)).logits.dtype == jnp.bfloat16


def test_loss_that_is_not_finite(tmp_path):
    """The error names the step and the files."""
    model = tiny.dense()
    model.norm.weight[...] = jnp.full(16, jnp.nan)
    with pytest.raises(FloatingPointError, match=r"(?s)step 1: loss nan.*texts/\d\.txt"):
        finetune(settings(tmp_path), model=model, tokenizer=tiny.tokenizer())


def test_a_held_out_loss_that_is_not_finite_stops_too(tmp_path, monkeypatch, steps_that_learn_nothing):
    monkeypatch.setattr(
        sys.modules["moe_jax.recipes.finetuning.loop"], "make_evaluation", lambda *_, **__: lambda *_: float("nan")
    )
    held_out = dict(eval_data=held_out_text(tmp_path), eval_every=1)
    with pytest.raises(FloatingPointError, match="step 1: the held-out loss nan is not finite"):
        finetune(settings(tmp_path, **held_out), model=tiny.dense(), tokenizer=tiny.tokenizer())
