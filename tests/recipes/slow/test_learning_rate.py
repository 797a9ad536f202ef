"""The sweep of learning rates: its rates, its end, its suggestion, and that a run in the same folder stays as it is."""

import json

import numpy as np
import pytest

from moe_jax.recipes import find_learning_rate, finetune
from tests.helpers import steps_without_passes, tiny


def files_below(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "learning_rate" not in path.parts}


def test_sweep(tmp_path, capsys, monkeypatch):
    """A run's folder gets losses and a picture; the run in it, of another rate, is as it was."""
    settings = tiny.settings(tmp_path, steps=1, warmup_steps=0)
    with monkeypatch.context() as patch:
        steps_without_passes.put_in_place(patch, steps_without_passes.add)
        finetune(settings, model=tiny.dense(), tokenizer=tiny.tokenizer())
    before = files_below(tmp_path / "run")
    asked = tiny.settings(tmp_path, steps=7, learning_rate=3e-4, find_learning_rate=True)
    found = find_learning_rate(asked, model=tiny.dense(), tokenizer=tiny.tokenizer(), steps=30)
    assert files_below(tmp_path / "run") == before
    places = tmp_path / "run" / "learning_rate"
    assert (places / "loss.png").stat().st_size > 0
    assert json.loads((places / "losses.json").read_text())["suggested"] == found.suggested
    np.testing.assert_allclose(found.rates[:2], [1e-7, 1e-7 * 1e5 ** (1 / 29)], rtol=1e-6)
    assert found.suggested == found.rates[int(np.argmin(found.smoothed))] / 10 and found.suggested > 1e-5
    printed = capsys.readouterr().out
    assert f"suggested: --learning-rate {found.suggested:.1e}" in printed and "smoothed" in printed
    with pytest.raises(ValueError, match="call moe_jax.recipes.find_learning_rate"):
        finetune(asked, model=tiny.dense(), tokenizer=tiny.tokenizer())
    with pytest.raises(ValueError, match="dry_run=True and find_learning_rate=True exclude each other"):
        tiny.settings(tmp_path, dry_run=True, find_learning_rate=True)


def test_a_sweep_ends_where_the_loss_diverges(tmp_path, monkeypatch):
    """The loss leaves its smallest value, and later rates are not tried."""
    losses = iter([*np.linspace(3, 1, 15), *np.linspace(1, 9, 25)])
    steps_without_passes.put_in_place(monkeypatch, lambda state, _: (state, steps_without_passes.numbers_of(next(losses))))
    found = find_learning_rate(tiny.settings(tmp_path), model=tiny.dense(), tokenizer=tiny.tokenizer(), steps=40)
    assert len(found.rates) < 40 and found.smoothed[-1] > 1.5 * min(found.smoothed)
    assert found.suggested < found.rates[-1] / 10
    assert len(found.table(5).splitlines()) == 6
