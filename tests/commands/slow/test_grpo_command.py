"""`moe-jax grpo` trains a model by a reward of a file, exports it, and reports a reward that raises in one line."""

import json

import pytest

import moe_jax
from moe_jax.cli import main
from moe_jax.recipes.grpo import loop
from moe_jax.train.metrics import read_records
from tests.helpers import tiny
from tests.helpers.fake_policy import FakePolicy


def test_the_command_trains_and_exports(tmp_path, monkeypatch, capsys):
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "model", tokenizer_from=tmp_path / "tokenizer")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{i}:"}) + "\n" for i in range(4)))
    reward = tmp_path / "rewards.py"
    reward.write_text("def long(completions, **columns):\n    return [len(text) for text in completions]\n")
    places = ["--model", tmp_path / "model", "--data", tmp_path / "data.jsonl", "--output", tmp_path / "run"]
    options = f"--reward {reward}:long --steps 1 --prompts 2 --samples 2 --max-new-tokens 4 --seq-len 16 --dtype float32"
    words = ["grpo", *map(str, places), *options.split()]
    main([*words, "--dry-run"])
    assert "has the rewards {'long': 17.0}" in capsys.readouterr().out
    broken = tmp_path / "broken.py"
    broken.write_text("def long(completions, **columns):\n    raise KeyError('no judge')\n")
    with monkeypatch.context() as patched, pytest.raises(SystemExit, match="2"):
        patched.setattr(loop, "Policy", FakePolicy)
        main([word.replace("rewards.py", "broken.py") for word in words])
    error = capsys.readouterr().err
    assert "no judge" in error and "the same command continues the run" in error and "Traceback" not in error
    main(words)
    assert "trained to step 1; Hugging Face checkpoint in" in capsys.readouterr().out
    assert (tmp_path / "run" / "report.html").is_file() and len(read_records(tmp_path / "run" / "metrics.jsonl")) == 1
    assert moe_jax.from_pretrained(tmp_path / "run" / "model", progress=False).config.num_hidden_layers == 2
