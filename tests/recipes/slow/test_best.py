"""The best checkpoint and early stop follow the held-out loss, in a run that continues as in one that never stopped."""

import jax
import numpy as np
import pytest
from flax import nnx

from moe_jax.checkpoint.training import finished_steps
from moe_jax.recipes import finetune
from moe_jax.recipes.finetuning import loop
from moe_jax.train import model_of_run
from moe_jax.train.metrics import read_records
from tests.helpers import tiny

LOSSES = {2: 3.0, 4: 2.0, 5: 0.5, 6: 2.5, 7: 1.5, 8: 2.0, 10: 1.0, 12: 1.0}
"""Held-out losses by step. Steps 5 and 7 are measured only if a run is interrupted there."""


pytestmark = pytest.mark.usefixtures("steps_that_add")


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    """Replaces the held-out losses by `LOSSES`."""
    monkeypatch.setattr(loop, "make_evaluation", lambda *_, **__: lambda state, batches: LOSSES[int(state.step)])


def settings(folder, **changes):
    held_out = folder / "held_out"
    held_out.mkdir(exist_ok=True)
    (held_out / "other.txt").write_text("other words")
    options = dict(steps=12, eval_data=str(held_out), eval_every=2, eval_batches=1, checkpoint_every=3, keep_checkpoints=1)
    return tiny.settings(folder, **{**options, "keep_best": True, **changes})


def train(asked, stop_after=None):
    return finetune(asked, model=tiny.dense(), tokenizer=tiny.tokenizer(), stop_after=stop_after)


def weights(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


def test_early_stop_ends_with_the_best_weights(tmp_path, capsys):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    asked = settings(tmp_path / "whole", early_stop=2)
    whole = train(asked)
    assert (whole.step, whole.model_step, whole.finished, whole.stopped_early) == (8, 4, True, True)
    assert finished_steps(tmp_path / "whole" / "run" / "checkpoints") == [4, 8]
    best = model_of_run(tmp_path / "whole" / "run", step=4, dtype="float32")
    assert all(map(np.array_equal, weights(whole.model), weights(best)))

    asked = settings(tmp_path / "parts", early_stop=2)
    for stop in (5, 7):
        stopped = train(asked, stop)
        assert (stopped.step, stopped.model_step, stopped.finished) == (stop, stop, False)
        assert 4 in finished_steps(tmp_path / "parts" / "run" / "checkpoints")
    for _ in range(2):  # The second time no step is left.
        again = train(asked)
        assert (again.step, again.model_step, again.stopped_early) == (8, 4, True)
        assert all(map(np.array_equal, weights(again.model), weights(whole.model)))
    assert capsys.readouterr().out.endswith("the run stopped early after step 8; a larger --early-stop resumes it\n")
    losses = [
        [record["loss"] for record in read_records(tmp_path / name / "run" / "metrics.jsonl")] for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    # More patience, and the same folder continues.
    further = train(settings(tmp_path / "parts", early_stop=3))
    assert (further.step, further.model_step, further.stopped_early) == (12, 10, False)
    assert finished_steps(tmp_path / "parts" / "run" / "checkpoints") == [10, 12]


def test_a_run_without_the_options_keeps_the_newest(tmp_path):
    result = train(settings(tmp_path, steps=6, keep_best=False, keep_checkpoints=2))
    assert (result.step, result.model_step, result.stopped_early) == (6, 6, False)
    assert finished_steps(tmp_path / "run" / "checkpoints") == [3, 6]


def test_a_best_checkpoint_that_was_not_kept(tmp_path, caplog):
    """A run that turns keep_best on has no checkpoint of the best step before: it keeps the best that follows."""
    train(settings(tmp_path, keep_best=False, early_stop=9), 6)
    result = train(settings(tmp_path, steps=8))
    assert (result.step, result.model_step) == (8, 8)
    assert "step 4, which has the smallest held-out loss so far, was not kept" in caplog.text


def test_losses_on_other_text_are_not_compared(tmp_path):
    train(settings(tmp_path, checkpoint_every=1), 5)
    changed = train(settings(tmp_path, eval_batches=2, steps=6))
    assert (changed.step, changed.model_step) == (6, 6)


def test_options_without_held_out_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match="keep_best=True needs a held-out loss: give eval_data; early_stop=3 needs"):
        tiny.settings(tmp_path, keep_best=True, early_stop=3)
