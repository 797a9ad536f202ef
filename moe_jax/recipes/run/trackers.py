"""Sends the log of a run to W&B or trackio (`--log-to`): optional packages, which nothing imports without the option."""

import importlib.util
import os
import uuid
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

Tracker = Literal["tensorboard", "wandb", "trackio"]

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}

PROJECT = "moe_jax"
"""The project of a run without the environment variable WANDB_PROJECT, or TRACKIO_PROJECT."""


class Trackers:
    """The trackers of a run: each gets every step's scalars, under the step's number.

    Args:
      names: those of `--log-to`; tensorboard is `train.metrics.MetricsWriter`'s.
      output: the run's folder. Its name is the run's; a run that continues goes on in the same one.
      config: the settings, which trackers show beside a run.
    """

    def __init__(self, names: Sequence[str], output: Path, config: dict[str, Any]):
        self._modules = [import_module(name) for name in names if name != "tensorboard"]
        for module in self._modules:
            name = module.__name__
            options = {"project": os.environ.get(f"{name.upper()}_PROJECT", PROJECT), "config": config, "resume": "allow"}
            if name == "wandb":
                options |= {"name": output.name, "id": _run_id(output), "dir": str(output)}
            else:
                # trackio knows a run by its name alone.
                options |= {"name": f"{output.name}-{_run_id(output)}"}
            module.init(**options)

    def write(self, record: dict[str, Any]) -> None:
        """Sends a step's scalars."""
        scalars = {name: value for name, value in record.items() if name != "step"}
        for module in self._modules:
            module.log(scalars, step=record["step"])

    def close(self) -> None:
        """Waits until everything is sent."""
        for module in self._modules:
            module.finish()


def log_problems(tensorboard: bool, names: Sequence[str]) -> list[str]:
    """Returns unknown trackers and missing packages, one clause each.

    Args:
      tensorboard: True if the setting of this name asks for it.
      names: of `log_to`.
    """
    problems = []
    if tensorboard and importlib.util.find_spec("tensorboardX") is None:
        problems.append("tensorboard=True needs the package tensorboardX: pip install tensorboardX")
    for name in names:
        if name not in get_args(Tracker):
            problems.append(f"log_to={name!r} must be one of {', '.join(get_args(Tracker))}")
        elif importlib.util.find_spec(PACKAGES[name]) is None:
            problems.append(f"log_to={name!r} needs the package {PACKAGES[name]}: pip install {PACKAGES[name]}")
    return problems


def _run_id(output: Path) -> str:
    """Returns the run's name at trackers, which output/tracker_id keeps; made at the first start."""
    file = output / "tracker_id"
    if not file.is_file():
        temporary = file.with_name(".tracker_id.incomplete")
        temporary.write_text(uuid.uuid4().hex[:8])
        os.replace(temporary, file)
    return file.read_text()
