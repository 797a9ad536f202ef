"""`finetune --config run.yaml`, and `prefer`: the settings of a file, and options that override it."""

import json

import pytest
import tyro
import yaml

from moe_jax.adapters import LoraSettings
from moe_jax.cli import main
from moe_jax.commands.config_file import in_options, with_config
from moe_jax.commands.finetune import FinetuneCommand
from moe_jax.commands.prefer import PreferCommand
from moe_jax.parallel.choices import MeshShape
from moe_jax.preferences import PreferenceSettings
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.recipes.preferring.settings import PreferSettings
from moe_jax.recipes.run.folder import RUN_YAML, write_settings
from tests.helpers import tiny


def parsed(*arguments) -> FinetuneSettings:
    return tyro.cli(FinetuneCommand, args=with_config("finetune", list(map(str, arguments)))).settings


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "mine.yaml"
    values = dict(model="org/model", data=str(tiny.write_texts(tmp_path / "texts")), output=str(tmp_path / "run"))
    file.write_text(yaml.safe_dump(values) + "steps: 7\nlearning-rate: 1e-3\nremat: false\nlora:\n  rank: 4\n")
    return file


def test_written_settings_come_back(tmp_path):
    lora = LoraSettings(rank=4, targets=("attention", "experts"), ranks={"q_proj": 8}, shared_outer=True)
    first, second = (str(tiny.write_texts(tmp_path / name)) for name in "ab")
    for changes in (
        dict(lora=lora, data=(f"{first},weight=1", f"{second},weight=2"), tensorboard=True, remat=False),
        dict(epochs=2.5, mesh=MeshShape(fsdp=2), hops="nccl", overlap_micro_batches=False, aux_loss_coef=1e-4),
    ):
        settings = tiny.settings(tmp_path, **{"steps": FinetuneSettings.steps} | changes)
        (tmp_path / "run").mkdir(exist_ok=True)
        write_settings(settings, command="finetune", steps=9, tokenizer=None)
        assert parsed("--config", tmp_path / "run" / RUN_YAML) == settings
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["steps"] == 9
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


def test_written_settings_of_prefer_come_back(tmp_path):
    (tmp_path / "run").mkdir()
    options = dict(model="org/model", data=str(tiny.write_texts(tmp_path / "texts")), output=str(tmp_path / "run"))
    file = tmp_path / "run" / RUN_YAML
    for changes in (
        dict(preference=PreferenceSettings("simpo", gamma=0.5), lora=LoraSettings(rank=4), log_to=("tensorboard",)),
        dict(preference=PreferenceSettings(beta=0.2), warmup_steps=3, plain_text=True, remat=False),
    ):
        settings = PreferSettings(**options, **changes)
        write_settings(settings, command="prefer", steps=settings.steps, tokenizer=None)
        assert tyro.cli(PreferCommand, args=with_config("prefer", ["--config", str(file)])).settings == settings
    assert f"#   moe-jax prefer --config {file}" in file.read_text()
    given = ["--config", str(file), "--preference.beta", "0.3", "--steps=4"]
    chosen = tyro.cli(PreferCommand, args=with_config("prefer", given)).settings
    assert (chosen.preference, chosen.steps, chosen.warmup_steps) == (PreferenceSettings(beta=0.3), 4, 3)
    file.write_text("xyzzy: chat\npreference: 3\nmax-steps: 4\nkeep_checkpoint: 1\n")
    with pytest.raises(ValueError, match="xyzzy .moe-jax prefer --help lists them") as found:
        with_config("prefer", given)
    for part in (
        "keep_checkpoint (did you mean keep_checkpoints?)",
        "max_steps (here: --steps",
        "preference (its value must be a mapping of loss, beta",
    ):
        assert part in str(found.value)


def test_options_win(config):
    settings = parsed(f"--config={config}", "--remat", "--seq-len", 32)
    assert (settings.steps, settings.learning_rate, settings.remat, settings.seq_len) == (7, 1e-3, True, 32)
    assert settings.lora == LoraSettings(rank=4)
    settings = parsed("--steps=9", "--config", config, "--lora.rank", 8, "--no-remat")
    assert (settings.steps, settings.lora, settings.remat) == (9, LoraSettings(rank=8), False)
    assert parsed("--config", config, "--epochs", 2).epochs == 2


@pytest.mark.parametrize(
    "options, remat",
    [
        ([], "auto"),
        (["--remat"], True),
        (["--no-remat"], False),
        (["--remat", "1"], 1),
        (["--remat=22"], 22),
        (["--remat", "auto"], "auto"),
        (["--remat", "--steps", "5"], True),
    ],
)
def test_remat_is_a_switch_or_has_a_value(config, options, remat):
    config.write_text(config.read_text().replace("remat: false\n", ""))
    found = parsed("--config", config, *options).remat
    assert found == remat and type(found) is type(remat)


@pytest.mark.parametrize("text, remat", [("true", True), ("false", False), ("22", 22), ("auto", "auto")])
def test_remat_in_a_file(config, text, remat):
    config.write_text(config.read_text().replace("remat: false\n", f"remat: {text}\n"))
    found = parsed("--config", config).remat
    assert found == remat and type(found) is type(remat)


def test_an_empty_lora_has_the_default_rank(config):
    config.write_text(config.read_text().replace("lora:\n  rank: 4", "lora: {}"))
    assert parsed("--config", config).lora == LoraSettings()


def test_wrong_files_are_one_error(config, tmp_path, capsys):
    def error(*arguments):
        with pytest.raises(SystemExit):
            main(["finetune", *map(str, arguments)])
        return capsys.readouterr().err

    config.write_text(config.read_text() + "  rnak: 3\nstepz: 5\nbf16: true\nmesh: 4\nxyzzy: 1\n")
    found = error("--config", config)
    assert "keys that are no settings" in found and found.count("\n") == 1
    for part in ("stepz (did you mean steps?)", "lora.rnak (did you mean lora.rank?)", "bf16 (here: --dtype", "xyzzy (moe-jax"):
        assert part in found
    assert "mesh (its value must be a mapping of pipe, data" in found
    assert "there is no such file" in error("--config", tmp_path / "none.yaml")
    assert "--config needs a YAML file" in error("--config", "--steps", 3)
    config.write_text("- a\n")
    assert "one setting a line" in error("--config", config)
    config.write_text("a: [")
    assert "is no YAML file" in error("--config", config)


@pytest.mark.parametrize(
    "message, options",
    [
        ("FinetuneSettings: log_to='w' must be one of a", "--log-to='w' must be one of a"),
        ("offload=True needs remat, remat=False lora.dropout=0.1", "--offload needs remat, --no-remat --lora.dropout=0.1"),
        ("overlap_micro_batches=True needs a mesh.expert.", "--overlap-micro-batches True needs a --mesh.expert."),
        ("data='runs/seq_len=3 x' has steps (eval_batches)", "--data='runs/seq_len=3 x' has steps (--eval-batches)"),
    ],
)
def test_errors_name_options(message, options):
    """Paths and sentences keep words that are names too."""
    assert in_options("finetune", message) == options


def test_errors_of_a_run_name_options(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(
            ["finetune", "--model", "x", "--data", str(tmp_path), "--output", str(tmp_path / "run" / "x"), "--batch-size", "0"]
        )
    assert capsys.readouterr().err == "moe-jax: --batch-size=0 must be an integer of at least 1\n"
