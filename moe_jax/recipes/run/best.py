"""The best held-out loss of a run so far: the checkpoint to keep (`keep_best`), and the end of the run (`early_stop`)."""

import logging
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

from moe_jax.recipes.run.settings import RunSettings
from moe_jax.runtime.processes import is_first_process

BEST = "best"
"""The entry of a checkpoint's position."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Best:
    """The smallest held-out loss so far, its step, and the number of measurements since.

    Attributes:
      loss: None before the first measurement.
      data: fingerprint of the held-out data; losses on other data are not compared.
    """

    loss: float | None = None
    step: int = 0
    since: int = 0
    data: str | None = None

    def after(self, step: int, loss: float) -> "Best":
        """Returns the best after another measurement; among equal losses the earlier one is kept."""
        if self.loss is None or loss < self.loss:
            return Best(loss, step, data=self.data)
        return replace(self, since=self.since + 1)

    def ends(self, early_stop: int) -> bool:
        """Returns True if the last `early_stop` measurements brought no improvement; never with 0."""
        return 0 < early_stop <= self.since

    def entry(self) -> dict[str, Any]:
        """Returns the entry of a checkpoint's position; empty before the first measurement."""
        return {} if self.loss is None else {BEST: asdict(self)}


def best_of(position: dict[str, Any], settings: RunSettings, fingerprint: str | None, steps: Collection[int]) -> Best:
    """Returns the best stored in a checkpoint's position; an empty one if it was measured on other data.

    Also empty, with a warning, if `keep_best` needs its checkpoint and an earlier part of the run did not keep it.

    Args:
      position: empty before the first step.
      fingerprint: the held-out data's.
      steps: the steps of existing checkpoints.
    """
    data = f"{fingerprint}, {settings.eval_batches} batches"
    found = Best(**position.get(BEST, {})) if is_watched(settings) else Best()
    if found.data != data:
        return Best(data=data)
    if settings.keep_best and found.step not in steps:
        if is_first_process():
            _logger.warning(
                "the checkpoint of step %d, which has the smallest held-out loss so far, was not kept: keep_best=True keeps "
                "the best of the steps that follow",
                found.step,
            )
        return Best(data=data)
    return found


def told_held_out(settings: RunSettings, number: int | None, kind: str) -> str:
    """Returns the announcement's line about held-out data.

    Args:
      number: the number of documents; None for a stream.
      kind: the plural of a document's name.
    """
    what = f"a stream of {kind}" if number is None else f"{number:,} {kind[:-1] if number == 1 else kind}"
    rows = f"{settings.rows} row{'s' if settings.rows > 1 else ''}"
    batches = f"{settings.eval_batches} batch{'es' if settings.eval_batches > 1 else ''} of {rows}"
    every = f"every {settings.eval_every} steps" if settings.eval_every > 1 else "every step"
    return f"held out: {what}; their loss is measured {every}, on {batches}"


def told_early(steps_done: int) -> str:
    """Returns the line about a run that stopped early, when its command is given again."""
    return f"the run stopped early after step {steps_done}; a larger --early-stop resumes it"


def told_stop(how: str, step: int) -> str:
    """Returns the line about a run that was "stopped" by SIGTERM, or "interrupted" by Ctrl-C."""
    return f"{how} after step {step} and saved; the same command resumes from there"


def told_end(settings: RunSettings, step: int, model_step: int, stopped_early: bool) -> str:
    """Returns the beginning of a command's last line: the last step, and the step of the weights with `keep_best`."""
    best = f"the weights of step {model_step}, which has the smallest held-out loss: " if settings.keep_best else ""
    early = ", where the held-out loss had stopped falling" if stopped_early else ""
    return f"trained to step {step}{early}; {best}"


def counts(settings: RunSettings, step: int) -> bool:
    """Returns True if the measurement of a step counts. One caused by an interruption does not."""
    return is_watched(settings) and (step % settings.eval_every == 0 or step == settings.steps)


def is_watched(settings: RunSettings) -> bool:
    """Returns True if the run tracks the best held-out loss."""
    return settings.keep_best or settings.early_stop > 0
