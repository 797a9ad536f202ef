"""The options of `moe-jax prefer` are the fields of `PreferSettings`; the command trains an adapter and writes it."""

import json
from dataclasses import fields

import pytest
import tyro

import moe_jax
from moe_jax.adapters import LoraSettings, load_adapter
from moe_jax.cli import main
from moe_jax.commands.prefer import GROUPS, OTHERS, PreferCommand
from moe_jax.parallel.choices import MeshShape
from moe_jax.preferences import PreferenceSettings
from moe_jax.recipes.preferring.settings import PreferSettings
from moe_jax.train.metrics import read_records
from tests.helpers import tiny


def test_every_field_is_in_exactly_one_group():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted([*grouped, *OTHERS]) == sorted(field.name for field in fields(PreferSettings))


def test_options_arrive(tmp_path):
    required = dict(model="org/model", data=str(tmp_path), output=str(tmp_path.parent / "run"))
    words = [word for name, value in required.items() for word in (f"--{name}", value)]
    assert tyro.cli(PreferCommand, args=words).settings == PreferSettings(**required)
    given = "--preference.loss simpo --preference.gamma 0.5 --max-length 100 --steps 7 --plain-text"
    given += " --mesh.expert 2 --mesh.context 2 --shard-optimizer --mesh.data 2"
    chosen = dict(steps=7, max_length=100, plain_text=True, preference=PreferenceSettings("simpo", gamma=0.5))
    chosen |= dict(mesh=MeshShape(data=2, expert=2, context=2), shard_optimizer=True)
    expected = PreferSettings(**required, **chosen)
    assert tyro.cli(PreferCommand, args=words + given.split()).settings == expected
    adapted = tyro.cli(PreferCommand, args=[*words, "--lora.rank", "8"]).settings
    assert adapted == PreferSettings(**required, lora=LoraSettings(rank=8))


def test_help_describes_every_option(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(PreferCommand, args=["--help"])
    printed = capsys.readouterr().out
    assert all(f" {title} options " in printed for title in [*GROUPS, *OTHERS])
    assert "the scale of rewards" in printed and "tokens in a row" in printed


def test_prefer(tmp_path, capsys):
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    moe_jax.save_pretrained(tiny.dense(), tmp_path / "model", tokenizer_from=tmp_path / "tokenizer")
    pairs = [dict(prompt=f"ask {i}?", chosen="please", rejected="no") for i in range(3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = "--lora.rank 2 --lora.targets attention --seq-len 128 --batch-size 1 --epochs 2 --dtype float32".split()
    places = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "pairs.jsonl"), "--output", str(tmp_path / "run")]
    main(["prefer", *places, *options])
    printed = capsys.readouterr().out
    assert f"trained to step 3; adapter, for PEFT too, in {tmp_path / 'run' / 'adapter'}" in printed
    assert f"report in {tmp_path / 'run' / 'report.html'}" in printed and (tmp_path / "run" / "report.html").exists()
    model = moe_jax.from_pretrained(tmp_path / "model", progress=False)
    assert "rank 2" in str(load_adapter(model, tmp_path / "run" / "adapter"))
    noted = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert (noted["lora"]["targets"], noted["epochs"], noted["steps"]) == (["attention"], 2, 3)
    assert len(read_records(tmp_path / "run" / "metrics.jsonl")) == 3
    with pytest.raises(SystemExit):
        main(["prefer", *places, "--steps", "0"])
    assert "moe-jax: --steps=0 must be an integer" in capsys.readouterr().err
