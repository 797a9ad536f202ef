"""W&B and trackio get the scalars of each step if `log_to` names them; they are stood in for by modules of a test."""

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType

import pytest

from moe_jax.recipes import finetune
from moe_jax.train.metrics import read_records
from tests.helpers import tiny
from tests.recipes.slow import test_prefer


@pytest.fixture
def calls(monkeypatch):
    """(module, function, arguments) of each call that trackers get."""
    made: list[tuple] = []
    for name in ("wandb", "trackio"):
        module = ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
        for function in ("init", "log", "finish"):
            note = lambda *args, _call=(name, function), **options: made.append((*_call, args, options))  # noqa: E731
            setattr(module, function, note)
        monkeypatch.setitem(sys.modules, name, module)
    return made


def train(asked, stop_after=None):
    return finetune(asked, model=tiny.dense(), tokenizer=tiny.tokenizer(), stop_after=stop_after)


def test_trackers_get_every_step_once_named(tmp_path, calls, steps_that_learn_nothing):
    train(tiny.settings(tmp_path, steps=4), 1)
    assert not calls
    asked = tiny.settings(tmp_path, steps=4, log_to=("wandb", "trackio", "tensorboard"))
    train(asked, 2)
    train(asked)
    train(asked)  # No step is left, and nothing is sent.
    records = {record["step"]: record for record in read_records(tmp_path / "run" / "metrics.jsonl")}
    for name in ("wandb", "trackio"):
        own = [call[1:] for call in calls if call[0] == name]
        logged = {options["step"]: args[0] for function, args, options in own if function == "log"}
        assert list(logged) == [2, 3, 4]
        assert all({"step": step, **scalars} == records[step] for step, scalars in logged.items())
        starts = [options for function, _, options in own if function == "init"]
        assert len(starts) == 2 and starts[0] == starts[1] and starts[0]["resume"] == "allow"
        assert starts[0]["config"]["seq_len"] == 32 and starts[0]["project"] == "moe_jax"
        assert [function for function, _, _ in own][-1] == "finish"
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) >= 1


def test_runs_on_preferences(tmp_path, calls):
    """The step is one of test_prefer."""
    chosen = test_prefer.settings(tmp_path, log_to=("wandb", "tensorboard"))
    for _ in range(2):  # The second time no step is left, and nothing is sent.
        test_prefer.run(chosen, stop_after=1)
    (start, logged, _) = calls
    assert [function for _, function, *_ in calls] == ["init", "log", "finish"]
    assert start[3]["config"]["preference"]["loss"] == "dpo" and "reward_margin" in logged[2][0]
    assert (tmp_path / "run" / "tensorboard").is_dir()
    with pytest.raises(ValueError, match="PreferSettings: log_to='wndb' must be one of"):
        replace(chosen, log_to=("wndb",))


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="log_to='wandb' needs the package wandb: pip install wandb"):
        tiny.settings(tmp_path, log_to=("wandb",))
    with pytest.raises(ValueError, match="log_to='wndb' must be one of tensorboard, wandb, trackio"):
        tiny.settings(tmp_path, log_to=("wndb",))
