"""The log of a run: every step in the files of `MetricsWriter` and at trackers, and a readable number of console lines."""

import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm import tqdm

from moe_jax.recipes.run.settings import RunSettings
from moe_jax.runtime.processes import is_first_process
from moe_jax.train.metrics import Clock, MetricsWriter, append_record, keep_steps, one_line

SAMPLES = "samples.jsonl"

PROJECT = "moe_jax"
"""The project of a run without the environment variable WANDB_PROJECT, or TRACKIO_PROJECT."""


def default_log_every(steps: int) -> int:
    """Returns the largest of 1, 2, 5, 10, 20, 50, ... that prints at least 50 of the run's steps."""
    most = max(1, steps // 50)
    power = 10 ** (len(str(most)) - 1)
    return max(digit * power for digit in (1, 2, 5) if digit * power <= most)


class RunLog:
    """Writes each step's record, only in the first process of a job.

    Args:
      send_to: trackers, as in `RunSettings.log_to`.
      samples: True if the run writes samples of text.
    """

    def __init__(
        self,
        settings: RunSettings,
        *,
        first_step: int,
        send_to: Sequence[str] = (),
        samples: bool = False,
        on_step: Callable[[dict[str, Any]], None] | None = None,
    ):
        self.first_step, self.on_step = first_step, on_step
        self.log_every = settings.log_every or default_log_every(settings.steps)
        self.writer: MetricsWriter | None = None
        if is_first_process():
            output = Path(settings.output).expanduser()
            board = settings.tensorboard or "tensorboard" in send_to
            self.writer = MetricsWriter(output, resumed_step=first_step - 1, tensorboard=board)
            self.samples_file = output / SAMPLES
            if samples:
                keep_steps(self.samples_file, first_step - 1)
            self.trackers = Trackers(send_to, output, asdict(settings))
        # None: a progress bar only on terminals.
        disable = None if self.writer is not None else True
        self.progress = tqdm(total=settings.steps, initial=first_step - 1, desc="training", unit="step", disable=disable)
        self.clock, self.num_told, self.began = Clock(), 0, time.monotonic()

    def tell_compiling(self) -> None:
        """Prints that the first step compiles, which may take minutes; the step's own line shows the seconds."""
        self.began = time.monotonic()
        if self.writer is not None:
            tqdm.write(f"compiling step {self.first_step} ...")

    def write(self, record: dict[str, Any], layers: dict[str, list], last_step: int) -> None:
        """Writes a step's record and its lists over the layers, and calls `on_step`.

        Prints a line every `log_every` steps, for the first and last step, and for each measurement of held-out data.
        """
        if self.writer is None:
            return
        self.writer.write(record, layers)
        self.trackers.write(record)
        step = record["step"]
        shown = "reward" if "reward" in record else "loss"
        self.progress.set_postfix_str(f"{shown} {record[shown]:.4f}", refresh=False)
        self.progress.update()
        if step in (self.first_step, last_step) or step % self.log_every == 0 or {"eval_loss", "eval_reward"} & record.keys():
            line = one_line(record, compiled=time.monotonic() - self.began if step == self.first_step else None)
            tqdm.write(f"step {step}: {line}{self.clock.left(step, last_step)}")
            sys.stdout.flush()
        if self.on_step is not None:
            self.on_step(record)

    def write_samples(self, record: dict[str, Any]) -> None:
        """Writes a step's samples into samples.jsonl, and prints them."""
        if self.writer is not None:
            append_record(self.samples_file, record)
            tqdm.write(describe_samples(record))

    def tell_skipped(self, skipped: Mapping[int, str]) -> None:
        """Prints the number of skipped documents, the first time and whenever the number has doubled."""
        if len(skipped) < max(1, 2 * self.num_told):
            return
        reason = list(skipped.values())[-1]
        tqdm.write(f"skipped so far: {len(skipped)} conversation(s) that the chat template refuses; {reason}")
        self.num_told = len(skipped)

    def close(self) -> None:
        """Ends the progress bar and closes the files."""
        self.progress.close()
        if self.writer is not None:
            self.writer.close()
            self.trackers.close()


def describe_samples(record: dict[str, Any]) -> str:
    """Returns the samples of a step for the console, one line each."""
    quoted = ([json.dumps(each[name], ensure_ascii=False) for name in ("prompt", "text")] for each in record["samples"])
    return "\n".join([f"samples after step {record['step']}:", *(f"  {prompt} -> {text}" for prompt, text in quoted)])


class Trackers:
    """W&B or trackio (`--log-to`): each gets every step's scalars, under the step's number.

    They are optional packages, imported only with the option.

    Args:
      names: the values of `--log-to`; `train.metrics.MetricsWriter` handles tensorboard.
      output: the run's folder. Its name is the run's; a resumed run continues in the same one.
      config: the settings, which trackers show with a run.
    """

    def __init__(self, names: Sequence[str], output: Path, config: dict[str, Any]):
        self._modules = [import_module(name) for name in names if name != "tensorboard"]
        for module in self._modules:
            name = module.__name__
            options = {"project": os.environ.get(f"{name.upper()}_PROJECT", PROJECT), "config": config, "resume": "allow"}
            if name == "wandb":
                options |= {"name": output.name, "id": _run_id(output), "dir": str(output)}
            else:
                # trackio identifies a run only by its name.
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


def _run_id(output: Path) -> str:
    """Returns the run's name at trackers, which output/tracker_id keeps; created at the first start."""
    file = output / "tracker_id"
    if not file.is_file():
        temporary = file.with_name(".tracker_id.incomplete")
        temporary.write_text(uuid.uuid4().hex[:8])
        os.replace(temporary, file)
    return file.read_text()
