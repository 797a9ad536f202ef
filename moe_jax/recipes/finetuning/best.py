"""The best held-out loss of a run so far: the checkpoint to keep (`keep_best`), and the end of the run (`early_stop`)."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from moe_jax.recipes.finetuning.settings import FinetuneSettings

BEST = "best"
"""The entry of a checkpoint's position."""


@dataclass(frozen=True)
class Best:
    """The smallest held-out loss so far, its step, and the number of measurements since.

    Attributes:
      loss: None before the first measurement.
      data: what the loss is measured on; losses on other text are not compared.
    """

    loss: float | None = None
    step: int = 0
    since: int = 0
    data: str | None = None

    def after(self, step: int, loss: float) -> "Best":
        """Returns the best after another measurement; of equal losses the earlier is better."""
        if self.loss is None or loss < self.loss:
            return Best(loss, step, data=self.data)
        return replace(self, since=self.since + 1)

    def ends(self, early_stop: int) -> bool:
        """Tells if `early_stop` measurements have brought no improvement; never with 0."""
        return 0 < early_stop <= self.since

    def entry(self) -> dict[str, Any]:
        """Returns the entry of a checkpoint's position; empty before the first measurement."""
        return {} if self.loss is None else {BEST: asdict(self)}


def best_of(position: dict[str, Any], data: str | None) -> Best:
    """Returns the best that a checkpoint's position holds; none yet if it was measured on other data."""
    found = Best(**position.get(BEST, {}))
    return found if found.data == data else Best(data=data)


def counts(settings: FinetuneSettings, step: int) -> bool:
    """Tells if the measurement of a step counts. One where a run was interrupted does not, or the run would not be the same."""
    return is_watched(settings) and (step % settings.eval_every == 0 or step == settings.steps)


def is_watched(settings: FinetuneSettings) -> bool:
    """Tells if the run follows the best held-out loss."""
    return settings.keep_best or settings.early_stop > 0
