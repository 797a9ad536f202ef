"""Settings of a run from a YAML file (`--config run.yaml` of the recipes' commands), as options before those given."""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml

from moe_jax.adapters.settings import LoraSettings
from moe_jax.commands.other_names import OTHER_NAMES
from moe_jax.parallel.choices import MESH_AXES
from moe_jax.preferences.settings import PreferenceSettings
from moe_jax.recipes.finetuning.settings import FinetuneSettings
from moe_jax.recipes.grpo.settings import EngineSizes, GrpoSettings
from moe_jax.recipes.preferring.settings import PreferSettings
from moe_jax.reinforcement.settings import LossSettings

SETTINGS: dict[str, type] = {"finetune": FinetuneSettings, "prefer": PreferSettings, "grpo": GrpoSettings}
"""Settings of the commands that have the option `--config`."""

LORA = tuple(each.name for each in fields(LoraSettings))

NESTED = {"lora": LORA, "mesh": MESH_AXES} | {
    name: tuple(each.name for each in fields(kind))
    for name, kind in (("preference", PreferenceSettings), ("grpo", LossSettings), ("engine", EngineSizes))
}
"""{nested setting: names of its fields}."""

CONFIG_HELP = (
    "a YAML file of settings, such as the run.yaml in a run's output folder (docs/finetuning.md). Other options override it."
)

CONFIG_FIELD = ("config", Annotated[str | None, tyro.conf.arg(help=CONFIG_HELP)], field(default=None))
"""The field of such a command, for `dataclasses.make_dataclass`."""

EXCLUDE_EACH_OTHER = {"steps": "epochs", "epochs": "steps"}
"""An option that replaces another setting of the file."""


def with_config(command: str, arguments: list[str]) -> list[str]:
    """Expands `--config FILE` into the command-line options that it contains.

    A setting that is also an option on the command line is left out: the option wins.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: `--config` has no value; the file is not YAML with one setting a line; or it has unknown keys.
    """
    file, others = _config_of(arguments)
    if file is None:
        return list(_with_values(arguments))
    options = (word.partition("=")[0].removeprefix("--").replace("-", "_") for word in others if word.startswith("--"))
    given = {name if name in _names(command) else name.removeprefix("no_") for name in options}
    given |= {EXCLUDE_EACH_OTHER[name] for name in given & EXCLUDE_EACH_OTHER.keys()}
    values = {name: value for name, value in read_config_file(file, command).items() if name not in given}
    return list(_with_values([word for name, value in values.items() for word in _words(name, value)] + others))


def read_config_file(file: str | Path, command: str) -> dict[str, Any]:
    """Reads settings from YAML; a nested setting has the name of its option, such as lora.rank.

    Raises:
      FileNotFoundError, ValueError: as `with_config`.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"--config {file}: there is no such file")
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path} must hold one setting a line, such as `steps: 1000`")
    values = dict(_flat(read))
    names = [name for name in _names(command) if name not in NESTED]
    if unknown := [f"{name} ({_meant(name, names, command)})" for name in values.keys() - set(names)]:
        raise ValueError(f"{path} has keys that are no settings: {', '.join(sorted(unknown))}")
    return values


def in_options(command: str, message: str) -> str:
    """Rewrites setting names in an error message as options: log_to='x' as --log-to='x', remat=False as --no-remat.

    Single words without a value stay, since they may be ordinary words of a sentence.
    """
    names = sorted(map(re.escape, _names(command)), key=len, reverse=True)

    def option(found: re.Match) -> str:
        name, value = found["name"], found["value"]
        if value in ("=True", "=False"):
            return " ".join(_words(name, value == "=True"))
        return "--" + name.replace("_", "-") + (value or "") if value or {"_", "."} & set(name) else name

    # Only at the beginning of a word: a path may contain such names.
    pattern = rf"(?<![^\s(])(?P<name>{'|'.join(names)})(?:(?P<value>=(?:True|False)?)|(?!=|\.?\w))"
    return re.sub(pattern, option, message.removeprefix(f"{SETTINGS[command].__name__}: "))


def _config_of(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Returns the value of `--config`, None without it, and the other arguments."""
    file, others, words = None, [], iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option != "--config":
            others.append(word)
            continue
        file = value if equals else next(words, "")
        if not file or file.startswith("--"):
            raise ValueError("--config needs a YAML file, such as the run.yaml in a run's output folder")
    return file, others


def _with_values(arguments: list[str]) -> Iterator[str]:
    """Yields the arguments, with a value after each option that may be a switch or have a value."""
    for word, after in zip(arguments, [*arguments[1:], "--"], strict=True):
        name = word.removeprefix("--").removeprefix("no-")
        if name in _SWITCHES_OR_VALUES and (word.startswith("--no-") or after.startswith("--")):
            yield from (f"--{name}", str(not word.startswith("--no-")))
        else:
            yield word


def _names(command: str) -> list[str]:
    """Returns all names of a command's settings, the nested ones with their prefix."""
    outer = [each.name for each in fields(SETTINGS[command])]
    return outer + [f"{name}.{inner}" for name, inners in NESTED.items() if name in outer for inner in inners]


def _flat(read: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the settings by the names of their options; hyphens count as underscores."""
    for key, value in read.items():
        name = str(key).replace("-", "_")
        if name == "lora" and value == {}:
            yield "lora.rank", LoraSettings.rank
        elif name in NESTED and isinstance(value, dict):
            yield from ((f"{name}.{str(inner).replace('-', '_')}", of_inner) for inner, of_inner in value.items())
        elif name not in NESTED or value is not None:
            yield name, value


def _meant(name: str, names: list[str], command: str) -> str:
    """Returns a hint for the error about an unknown setting: the nearest name or the right form."""
    if other := OTHER_NAMES[command].get(name.replace("_", "-")):
        return f"here: {other}"
    if name in NESTED and name in _names(command):
        return f"its value must be a mapping of {', '.join(NESTED[name])}"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"moe-jax {command} --help lists them"


def _words(name: str, value: Any) -> list[str]:
    """Returns a setting as an option on the command line."""
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool) and name not in _OPTIONAL_SWITCHES:
        outer, _, inner = name.rpartition(".")
        return [option if value else f"--{outer}{'.' if outer else ''}no-{inner.replace('_', '-')}"]
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple):
        return [option, *map(str, value)] if value else []
    if value is None and name in _NONE_IS_LEFT_OUT:
        return []
    return [option, str(value)]


_OPTIONAL_SWITCHES = ("overlap_micro_batches",)
"""Settings that are True, False or None; their options need a value on the command line."""

_SWITCHES_OR_VALUES = ("remat",)
"""Options that are switches on the command line (--remat, --no-remat), or have a value (--remat 22)."""

_NONE_IS_LEFT_OUT = tuple(f"lora.{name}" for name in LORA)
"""Settings whose option does not accept None, which is their default."""
