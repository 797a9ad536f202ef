"""The options of `moe-jax finetune` are the fields of `FinetuneSettings`, each in one group of the help."""

from dataclasses import fields

import pytest
import tyro

from moe_jax.adapters.settings import LoraSettings
from moe_jax.commands.finetune import GROUPS, FinetuneCommand
from moe_jax.commands.generate import GenerateCommand
from moe_jax.commands.loading import LoadingOptions
from moe_jax.commands.other_names import OTHER_NAMES
from moe_jax.commands.plan import PlanCommand
from moe_jax.parallel.choices import MeshShape
from moe_jax.preferences.settings import PreferenceSettings
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.recipes.preferring.settings import PreferSettings

GROUPED = {"lora": LoraSettings, "preference": PreferenceSettings}


@pytest.fixture
def required(tmp_path):
    return {"model": "org/model", "data": str(tmp_path), "output": str(tmp_path.parent / "run")}


def options(values: dict[str, str]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", value)]


def test_every_field_is_in_exactly_one_group():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted([*grouped, "lora", "mesh"]) == sorted(field.name for field in fields(FinetuneSettings))


def test_defaults_are_the_settings_own(required):
    assert tyro.cli(FinetuneCommand, args=options(required)).settings == FinetuneSettings(**required)


def test_options_of_every_group_arrive(required):
    given = (
        "--steps 5 --eval-every 7 --learning-rate 1e-3 --z-loss-coef 0.5 --remat False --hops nccl --mesh.fsdp 2 --tensorboard"
    )
    chosen = dict(steps=5, eval_every=7, learning_rate=1e-3, z_loss_coef=0.5, remat=False, hops="nccl", tensorboard=True)
    settings = FinetuneSettings(**required, **chosen, mesh=MeshShape(fsdp=2))
    assert tyro.cli(FinetuneCommand, args=[*options(required), *given.split()]).settings == settings


def test_help_lists_the_groups_and_describes_every_option(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(FinetuneCommand, args=["--help"])
    printed = capsys.readouterr().out
    assert all(f" {title} options " in printed for title in GROUPS)
    assert "a checkpoint folder or hub id" in printed and printed.count("Fine-tune a model on texts or chats") == 1


@pytest.mark.parametrize(
    "command, names",
    [("finetune", FinetuneSettings), ("generate", GenerateCommand), ("prefer", PreferSettings), ("plan", PlanCommand)],
)
def test_other_programs_names_lead_to_options_that_exist(command, names):
    known = {field.name for field in (*fields(names), *fields(LoadingOptions))}
    known |= {f"{group}.{field.name}" for group, of in GROUPED.items() if group in known for field in fields(of)}
    known = {name.replace("_", "-") for name in known}
    for other, ours in OTHER_NAMES[command].items():
        assert other not in known - {"lora"} and ours.split()[0].strip(",").removeprefix("--") in known
