"""The log of a running fine-tuning: a line on the console for each step, and the files of `MetricsWriter`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tqdm import tqdm

from moe_jax.recipes.finetuning.samples import SAMPLES, describe_samples
from moe_jax.recipes.finetuning.trackers import Trackers
from moe_jax.runtime.processes import is_first_process
from moe_jax.train.metrics import Clock, MetricsWriter, append_record, keep_steps, one_line


class LoggedRun(Protocol):
    """The settings of a run that its log reads: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def output(self) -> str:
        """The run's folder."""

    @property
    def steps(self) -> int:
        """The last step."""

    @property
    def tensorboard(self) -> bool:
        """True to write for TensorBoard too."""


class RunLog:
    """Writes each step's record, in the first process of a job alone.

    Args:
      send_to: trackers, as of `FinetuneSettings.log_to`.
      samples: True if the run writes samples of text.
    """

    def __init__(
        self,
        settings: LoggedRun,
        *,
        first_step: int,
        send_to: Sequence[str] = (),
        samples: bool = False,
        on_step: Callable[[dict[str, Any]], None] | None = None,
    ):
        self.first_step, self.on_step = first_step, on_step
        self.writer: MetricsWriter | None = None
        if is_first_process():
            output = Path(settings.output).expanduser()
            board = settings.tensorboard or "tensorboard" in send_to
            self.writer = MetricsWriter(output, resumed_step=first_step - 1, tensorboard=board)
            self.samples_file = output / SAMPLES
            if samples:
                keep_steps(self.samples_file, first_step - 1)
            self.trackers = Trackers(send_to, output, asdict(settings))
        # None: a progress bar on terminals alone.
        disable = None if self.writer is not None else True
        self.progress = tqdm(total=settings.steps, initial=first_step - 1, desc="training", unit="step", disable=disable)
        self.clock, self.num_told, self.began = Clock(), 0, time.monotonic()

    def tell_compiling(self) -> None:
        """Prints that the first step is compiled, which may take minutes; the step's own line has the seconds from here."""
        self.began = time.monotonic()
        if self.writer is not None:
            tqdm.write(f"compiling step {self.first_step} ...")

    def write(self, record: dict[str, Any], layers: dict[str, list], last_step: int) -> None:
        """Writes a step's record and its lists over the layers, prints a line, and calls `on_step`."""
        if self.writer is None:
            return
        self.writer.write(record, layers)
        self.trackers.write(record)
        self.progress.update()
        line = one_line(record, compiled=time.monotonic() - self.began if record["step"] == self.first_step else None)
        if self.progress.disable:
            print(f"step {record['step']}: {line}{self.clock.left(record['step'], last_step)}", flush=True)
        else:
            self.progress.set_postfix_str(line)
        if self.on_step is not None:
            self.on_step(record)

    def write_samples(self, record: dict[str, Any]) -> None:
        """Writes a step's samples into samples.jsonl, and prints them."""
        if self.writer is not None:
            append_record(self.samples_file, record)
            tqdm.write(describe_samples(record))

    def tell_skipped(self, skipped: dict[int, str]) -> None:
        """Prints the number of documents that are left out, the first time and whenever the number has doubled."""
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
