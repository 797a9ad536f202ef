"""`moe-jax plot`: draws a training run."""

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True)
class PlotCommand:
    """Draw a finished or running training run: its loss, and its rewards or how evenly its experts are loaded.

    moe-jax plot runs/finetune

    moe-jax plot runs/finetune --step 100

    Args:
      run_folder: the output folder of `moe-jax finetune` or `prefer`.
      step: the step whose load is shown for each expert. Default: the mean of the last tenth of the run.
      output: the folder for the pictures. Default: the run's folder.
    """

    run_folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(name="run")]
    step: int | None = None
    output: str | None = None

    def run(self) -> None:
        """Draws the pictures and prints their paths."""
        from moe_jax.train.plots import plot_run

        for path in plot_run(self.run_folder, self.output, step=self.step):
            print(f"wrote {path}")
