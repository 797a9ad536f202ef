"""The choice of a preference loss and its numbers."""

from dataclasses import dataclass
from typing import Literal, get_args

Loss = Literal["dpo", "ipo", "hinge", "orpo", "simpo", "kto"]
BETA = {"dpo": 0.1, "ipo": 0.1, "hinge": 0.1, "orpo": 0.1, "simpo": 2.0, "kto": 0.1}
"""The default of `PreferenceSettings.beta`."""
ONLY_OF = {"label_smoothing": "dpo", "gamma": "simpo", "desirable_weight": "kto", "undesirable_weight": "kto"}
"""{number: the only loss that reads it}."""


@dataclass(frozen=True)
class PreferenceSettings:
    """The choice of a preference loss and its hyperparameters (`preferences.losses`). Invalid values raise ValueError.

    Attributes:
      loss: "dpo", "ipo" and "hinge" compare pairs of answers with a reference model. "orpo" and "simpo" need no reference.
        "kto" learns from single answers that are desirable or not, with a reference.
      beta: the scale of rewards. None: 2 for simpo, else 0.1.
      label_smoothing: the fraction of pairs whose label is assumed wrong; for dpo.
      gamma: the target margin of rewards; for simpo.
      desirable_weight: the weight of desirable answers; for kto.
      undesirable_weight: the weight of other answers; for kto.
      aux_loss_coef: the coefficient of the router's load-balancing loss.
    """

    loss: Loss = "dpo"
    beta: float | None = None
    label_smoothing: float = 0.0
    gamma: float = 1.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    aux_loss_coef: float = 0.0

    def __post_init__(self):
        if problems := _problems(self):
            raise ValueError("PreferenceSettings: " + "; ".join(problems))

    @property
    def scale(self) -> float:
        """The value of `beta`, or its default."""
        return BETA[self.loss] if self.beta is None else self.beta

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares the model with its state before training."""
        return self.loss not in ("orpo", "simpo")

    @property
    def of_pairs(self) -> bool:
        """True if the loss compares pairs of answers, False if it scores single answers."""
        return self.loss != "kto"


def _problems(settings: PreferenceSettings) -> list[str]:
    if settings.loss not in get_args(Loss):
        return [f"loss={settings.loss!r} must be one of {', '.join(get_args(Loss))}"]
    problems = []
    if not 0 < settings.scale < float("inf"):
        problems.append(f"beta={settings.beta!r} must be a number greater than 0")
    if not 0 <= settings.label_smoothing < 0.5:
        problems.append(f"label_smoothing={settings.label_smoothing!r} must be at least 0 and less than 0.5")
    for name in ("gamma", "desirable_weight", "undesirable_weight", "aux_loss_coef"):
        if not 0 <= getattr(settings, name) < float("inf"):
            problems.append(f"{name}={getattr(settings, name)!r} must be a number of at least 0")
    for name, loss in ONLY_OF.items():
        value = getattr(settings, name)
        if settings.loss != loss and value != getattr(PreferenceSettings, name):
            problems.append(f"{name}={value!r} is read by loss={loss!r} alone, and loss={settings.loss!r}")
    return problems
