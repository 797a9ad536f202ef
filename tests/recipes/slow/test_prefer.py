"""Runs on preferences: the margin rises, interrupted runs continue bit for bit, other runs are refused."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.adapters import LoraSettings
from moe_jax.checkpoint.training import finished_steps
from moe_jax.kernels import Precision
from moe_jax.layers.quantised import is_quantised
from moe_jax.preferences import PreferenceSettings
from moe_jax.recipes import PreferSettings, dry_run, prefer
from moe_jax.recipes.preferring import loop
from moe_jax.recipes.preferring.loop import plan_preferences
from tests.helpers import tiny
from tests.helpers.adapted_models import with_adapters

pytestmark = pytest.mark.usefixtures("one_step_for_all")

LORA = LoraSettings(rank=4, alpha=8, targets=("attention",))
DPO_METRICS = {
    *("step", "loss", "reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "log_prob_chosen", "kl"),
    *("log_prob_rejected", "grad_norm", "learning_rate", "tokens_per_second", "model_tflops", "step_time", "num_examples"),
}


def write(folder, name="pairs.jsonl", number=6):
    """Chats whose chosen answers are polite."""
    file = folder / name
    pairs = [dict(prompt=f"ask {i}?", chosen=f"please, {i}", rejected=f"no, {i}!") for i in range(number)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(file)


def settings(folder, **changes):
    options = dict(
        model="none", data=write(folder), output=str(folder / "run"), lora=LORA, seq_len=128, batch_size=2, steps=6,
        learning_rate=2e-2, warmup_steps=1, dtype="float32", preference=PreferenceSettings("dpo", beta=0.3),
    )  # fmt: skip
    return PreferSettings(**{**options, **changes})


def run(chosen, make_model=tiny.dense, **options):
    return prefer(chosen, model=make_model(), tokenizer=tiny.tokenizer(), **options)


def arrays_of(result):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(result.model, nnx.Param))]


def test_adapters(tmp_path, capsys):
    """Rewards part, on held-out pairs too; the log has all metrics, and an interrupted run has the same last bits."""
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    held_out = dict(eval_data=write(tmp_path, "held_out.jsonl", 5), eval_every=3, eval_batches=1)
    whole = run(settings(tmp_path / "one", **held_out))
    first, *_, last = whole.metrics
    assert whole.finished and [record["step"] for record in whole.metrics] == [1, 2, 3, 4, 5, 6]
    assert abs(first["reward_margin"]) < 1e-6 and abs(first["loss"] - np.log(2)) < 1e-6
    assert last["loss"] < first["loss"] - 0.1 and last["reward_margin"] > 0.3 and last["reward_accuracy"] == 1
    assert first.keys() == DPO_METRICS
    assert last.keys() == DPO_METRICS | {"eval_loss", "eval_reward_margin", "eval_reward_accuracy"}
    assert last["eval_reward_margin"] > 0.3 and last["eval_loss"] < np.log(2)
    printed = capsys.readouterr()
    assert "LoRA trains" in printed.out and "6 pairs, loss dpo with beta 0.3\nheld out: 5 pairs; their loss" in printed.out
    assert ", 2 packed rows of 128 tokens a step, " in printed.out
    measured = f"eval loss {last['eval_loss']:.4f}, eval margin {last['eval_reward_margin']:.3f}, eval accuracy 1.00, "
    assert measured in printed.out and f", {first['num_examples']} examples, compiled in this step" in printed.out

    part = run(settings(tmp_path / "two"), stop_after=3)
    assert part.step == 3 and not part.finished
    resumed = run(settings(tmp_path / "two"))
    assert resumed.metrics[3]["step"] == 4 and resumed.finished
    for a, b in zip(arrays_of(whole), arrays_of(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="holds 6 steps of this run: steps=5 would end before; use 6 or more"):
        run(settings(tmp_path / "two", steps=5, warmup_steps=1))
    with pytest.raises(ValueError, match="holds another run; .* .*preference.beta: checkpoint 0.3, now 0.2$"):
        run(settings(tmp_path / "two", preference=PreferenceSettings("dpo", beta=0.2)))


@pytest.mark.thorough
def test_all_parameters(tmp_path):
    """The reference is computed once, stored in the run's folder, and still the first model's when the run continues."""
    part = run(settings(tmp_path, lora=None, learning_rate=3e-3, batch_size=4, gradient_accumulation=2), stop_after=2)
    table = np.load(tmp_path / "run" / "reference_data.npy")
    assert table.shape == (6, 2) and abs(part.metrics[0]["reward_margin"]) < 1e-5
    resumed = run(settings(tmp_path, lora=None, learning_rate=3e-3, batch_size=4, gradient_accumulation=2))
    np.testing.assert_array_equal(np.load(tmp_path / "run" / "reference_data.npy"), table)
    margins = [record["reward_margin"] for record in resumed.metrics]
    assert margins[2] > margins[1] > 0.1 and margins[1] == part.metrics[-1]["reward_margin"]


def test_the_reference_of_other_data(tmp_path):
    """A reference is computed anew where a run is begun anew with other data, or resumes with other held-out data."""

    def interrupted(_):
        raise InterruptedError

    held_out = write(tmp_path, "held_out.jsonl", 5)
    options = dict(eval_data=held_out, eval_batches=1, steps=1, warmup_steps=0, learning_rate=1e-30, seq_len=256)
    asked = settings(tmp_path, lora=None, **options)
    with pytest.raises(InterruptedError):
        run(asked, on_step=interrupted)
    for file in (asked.data, held_out):
        pairs = [dict(prompt=f"{Path(file).name} {i}?", chosen="another answer", rejected="no") for i in range(4)]
        Path(file).write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (record,) = run(asked).metrics
    assert abs(record["reward_margin"]) < 1e-5 and abs(record["eval_reward_margin"]) < 1e-5


def test_the_best_checkpoint(tmp_path, monkeypatch, capsys):
    """Held-out losses are scripted. A run that continues ends where one ends that never stopped, with the same weights."""
    losses = {1: 2.0, 2: 1.0, 3: 1.5, 4: 1.5, 5: 0.5}
    monkeypatch.setattr(loop._Preferences, "measure", lambda task: {"eval_loss": losses[int(task.state.step)]})
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    watched = dict(eval_data=write(tmp_path, "other.jsonl", 3), eval_every=1, eval_batches=1, keep_best=True, early_stop=2)
    options = watched | dict(keep_checkpoints=1, checkpoint_every=9)
    whole = run(settings(tmp_path / "whole", **options))
    assert (whole.step, whole.model_step, whole.stopped_early, whole.finished) == (4, 2, True, True)
    assert finished_steps(tmp_path / "whole" / "run" / "checkpoints") == [2, 4]
    part = run(settings(tmp_path / "parts", **options), stop_after=3)
    assert (part.step, part.model_step, part.finished) == (3, 3, False)
    capsys.readouterr()
    for _ in range(2):  # The second time no step is left.
        resumed = run(settings(tmp_path / "parts", **options))
        assert (resumed.step, resumed.model_step, resumed.stopped_early) == (4, 2, True)
        assert all(map(np.array_equal, arrays_of(resumed), arrays_of(whole)))
    assert "the run stopped early after step 4; a larger --early-stop resumes it" in capsys.readouterr().out
    with pytest.raises(ValueError, match="keep_best=True needs a held-out loss: give eval_data"):
        settings(tmp_path, keep_best=True)
    with pytest.raises(ValueError, match="early_stop=-1 must be an integer of at least 0"):
        settings(tmp_path, **watched | dict(early_stop=-1))


@pytest.mark.parametrize("loss", ["kto", pytest.param("orpo", marks=pytest.mark.thorough)])
def test_other_losses(tmp_path, loss):
    """KTO takes pairs apart, with a table of mismatched answers; ORPO has no reference."""
    chosen = settings(tmp_path, lora=None, preference=PreferenceSettings(loss), steps=3, learning_rate=3e-3)
    result = run(chosen)
    assert (tmp_path / "run" / "reference_data.npy").exists() == (loss == "kto")
    assert result.metrics[-1]["loss"] < result.metrics[0]["loss"]
    assert ("kl" if loss == "kto" else "chosen_cross_entropy") in result.metrics[0]


def test_dry_run(tmp_path, capsys):
    dry_run(settings(tmp_path), model=tiny.dense(), tokenizer=tiny.tokenizer())
    printed = capsys.readouterr().out
    assert "steps 1 to 6, 2 packed rows of 128 tokens a step" in printed and "pairs.jsonl:1: " in printed
    assert "<|im_start|>user\nask 0?<|im_end|>\n<|im_start|>assistant\n[[please, 0<|im_end|>]]" in printed
    assert "[[no, 0!<|im_end|>]]" in printed and not (tmp_path / "run").exists()


def test_epochs_are_counted_in_batches(tmp_path, monkeypatch):
    """A run that continues has the number of steps that it began with."""
    epochs = 2.5
    asked = settings(tmp_path, data=write(tmp_path, "many.jsonl", 40), steps=500, epochs=epochs)
    plan = plan_preferences(asked, tiny.dense(), tiny.tokenizer())
    assert plan.settings == replace(asked, steps=plan.settings.steps, epochs=None)
    batches = plan.batches(plan.data)
    for _ in range(plan.settings.steps):
        next(batches)
    batches.close()
    assert 0 <= batches.position - 40 * epochs < 2 * plan.first_batch
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.json").write_text(json.dumps({"epochs": epochs, "steps": 7}))
    monkeypatch.setattr(loop, "saved_run", lambda output: (1, {}))
    assert plan_preferences(asked, tiny.dense(), tiny.tokenizer()).settings.steps == 7


def test_refused_before_anything_is_written(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "chosen": "b"}\n')
    with pytest.raises(ValueError, match="bad.jsonl:1: needs the keys"):
        run(settings(tmp_path, data=str(bad)))
    with pytest.raises(ValueError, match="eval_data=.* has the same contents as data"):
        run(settings(tmp_path, eval_data=write(tmp_path, "same.jsonl")))
    with pytest.raises(ValueError, match="the model has adapters already.*pass the model without adapters"):
        run(settings(tmp_path), lambda: with_adapters(tiny.dense(), targets=("attention",)))
    with pytest.raises(ValueError, match="targets has 'experts', which this model does not have"):
        run(settings(tmp_path, lora=LoraSettings(targets=("experts",))))
    with pytest.raises(ValueError, match="dry_run=True: call"):
        run(settings(tmp_path, dry_run=True))
    assert not (tmp_path / "run").exists()


def test_forms_of_weights_are_checked_first(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "base", tokenizer_from=tmp_path / "tokenizer")
    chosen = settings(tmp_path, model=str(tmp_path / "base"), weights="as stored")
    with pytest.raises(ValueError, match="this checkpoint has none"):
        dry_run(chosen)
    with pytest.raises(ValueError, match="cannot be trained: train adapters instead"):
        replace(chosen, lora=None)


@pytest.mark.thorough
def test_experts_in_fp8(tmp_path):
    """Adapters learn on experts in FP8; the reference rounds in the same places, so that rewards begin at zero."""
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.model_for_fp8(), tmp_path / "base", tokenizer_from=tmp_path / "tokenizer")
    options = dict(precision="fp8", weights="fp8", dtype="bfloat16", model=str(tmp_path / "base"), steps=3)
    result = prefer(settings(tmp_path, **options, lora=LoraSettings(rank=8, targets=("attention", "experts"))))
    assert result.model.precision == Precision() and is_quantised(nnx.state(result.model))
    assert result.metrics[0]["reward_margin"] == 0 and result.metrics[-1]["loss"] < result.metrics[0]["loss"]


def test_settings(tmp_path):
    """The settings of all runs check the other values in one place."""
    with pytest.raises(ValueError, match="seq_len=3 must be an integer of at least 4"):
        settings(tmp_path, seq_len=3)
    with pytest.raises(ValueError, match="batch_size=3 must be a multiple of gradient_accumulation=2"):
        settings(tmp_path, batch_size=3, gradient_accumulation=2)


def test_learning_rate_of_adapters(tmp_path):
    """Adapters learn ten times as fast by default, and frozen weights have the compute dtype."""
    adapted, full = (settings(tmp_path, learning_rate=None, dtype="bfloat16", lora=lora) for lora in (LORA, None))
    assert (adapted.learning_rate, adapted.param_dtype) == (1e-5, "bfloat16")
    assert (full.learning_rate, full.param_dtype) == (1e-6, "float32")
