"""`moe-jax plot`."""

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True)
class PlotCommand:
    """Draw a training run, done or under way: its loss, and how evenly its experts are loaded.

    moe-jax plot runs/finetune

    moe-jax plot runs/finetune --step 100

    Args:
      run_folder: the output folder of `moe-jax finetune`.
      step: the step whose load is shown expert by expert; default: the last tenth of the run, averaged.
      output: the folder for the pictures; default: the run's.
    """

    run_folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(name="run")]
    step: int | None = None
    output: str | None = None

    def run(self) -> None:
        """Draws, and prints where the pictures are."""
        from moe_jax.train.plots import plot_run

        for path in plot_run(self.run_folder, self.output, step=self.step):
            print(f"wrote {path}")
