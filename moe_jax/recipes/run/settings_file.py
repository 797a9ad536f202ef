"""The record of a run in its output folder: settings.json, run.yaml, and the chat template that the user chose.

Runs on texts and on preferences have the same files.
"""

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import jax
import yaml

from moe_jax.recipes.run.settings import RunSettings
from moe_jax.runtime.files import write_text

CHAT_TEMPLATE = "chat_template.jinja"
RUN_YAML = "run.yaml"


def write_settings(
    settings: RunSettings, *, command: Literal["finetune", "prefer"], steps: int, chat_template: str | None = None
) -> None:
    """Writes settings.json, run.yaml and the chat template, if any, into the output folder; each is complete or absent.

    settings.json has all settings, with `epochs` turned into `steps`, the versions of moe_jax and jax, and the date.
    run.yaml has the settings as they were given: the command continues or repeats the run with `--config` and this file.
    """
    output = Path(settings.output).expanduser()
    versions = {"moe_jax": sys.modules["moe_jax"].__version__, "jax": jax.__version__}
    started = datetime.now(UTC).isoformat(timespec="seconds")
    record = asdict(settings) | {"steps": steps, "versions": versions, "started": started}
    write_text(output / "settings.json", json.dumps(record, indent=2, default=str) + "\n")
    write_text(output / RUN_YAML, _as_yaml(settings, command, versions))
    if chat_template is not None:
        write_text(output / CHAT_TEMPLATE, chat_template)


def _as_yaml(settings: RunSettings, command: str, versions: dict[str, str]) -> str:
    """Returns the settings as YAML, in their own order; without `steps` where `epochs` counts them."""
    # Through JSON: YAML has no tuples.
    values = json.loads(json.dumps(asdict(settings), default=str))
    if values.get("epochs") is not None:
        del values["steps"]
    made_by = ", ".join(f"{name} {version}" for name, version in versions.items())
    head = f"# Written by {made_by}. Continue the run, or repeat it with another --output:\n"
    return (
        head + f"#   moe-jax {command} --config {Path(settings.output) / RUN_YAML}\n" + yaml.safe_dump(values, sort_keys=False)
    )


def chosen_template(output: Path) -> str | None:
    """Reads the chat template that the run in the folder was given; None without one."""
    file = output / CHAT_TEMPLATE
    return file.read_text(encoding="utf-8") if file.is_file() else None


def noted_tokenizer(output: Path) -> str | None:
    """Reads the folder or hub id of the run's tokenizer; None if settings.json names no tokenizer."""
    try:
        record = json.loads((output / "settings.json").read_text())
        return record["tokenizer"] or record["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def noted_steps(output: Path, epochs: float) -> int | None:
    """Reads the number of steps that the run in the folder counted for `epochs`; None if it did not count them."""
    try:
        record = json.loads((output / "settings.json").read_text())
        return int(record["steps"]) if record["epochs"] == epochs else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
