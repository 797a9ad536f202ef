"""The choice of what the experts' matmuls multiply."""

from dataclasses import dataclass
from typing import Literal, Self, get_args

Kept = Literal["bf16", "fp8"]
"""The form in which the backward pass finds h."""


@dataclass(frozen=True)
class Precision:
    """The experts' products in FP8, as DeepSeek-V3 was trained (section 3.3 of https://arxiv.org/abs/2412.19437).

    Both products of the forward pass and both of the input's gradient multiply e4m3 by e4m3. Rows have a scale for 128 numbers,
    matrices for 128 x 128. Sums are f32, promoted every 128 summands. The weights' gradients multiply bf16, as do router,
    attention and everything else. docs/fp8.md says where each tensor is rounded.

    Attributes:
        kept: the form in which the backward pass finds h = [gate | up]. "fp8" halves its bytes, with a scale for 128 numbers.
            It is e3m4, since no product reads it.

    Raises:
        ValueError: an unknown form of h.
    """

    kept: Kept = "bf16"

    def __post_init__(self):
        if self.kept not in get_args(Kept):
            raise ValueError(f"kept={self.kept!r} must be one of {', '.join(map(repr, get_args(Kept)))}")

    @classmethod
    def named(cls, name: str) -> Self | None:
        """Returns the recipe of a name: "bf16" (None), "fp8", or "fp8_kept", which keeps h in FP8 too.

        Raises:
            ValueError: an unknown name.
        """
        recipes = {"bf16": None, "fp8": cls(), "fp8_kept": cls(kept="fp8")}
        if name not in recipes:
            raise ValueError(f"precision {name!r} must be one of {', '.join(map(repr, recipes))}")
        return recipes[name]


RECIPES = ("bf16", "fp8", "fp8_kept")
"""The names of `Precision.named`."""
