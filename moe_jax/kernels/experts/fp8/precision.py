"""The precision of the matmuls of experts and of dense blocks."""

from dataclasses import dataclass
from typing import Literal, Self, get_args

Kept = Literal["bf16", "fp8"]
"""The form in which h is kept for the backward pass."""

DenseGroup = Literal["attention", "shared_experts", "mlp"]
"""Dense matrices that multiply in FP8 together: attention's projections, shared experts, and dense layers."""


@dataclass(frozen=True)
class Precision:
    """FP8 matmuls for experts, as DeepSeek-V3 was trained (section 3.3 of https://arxiv.org/abs/2412.19437).

    Both products of the forward pass and both of the input's gradient multiply e4m3 by e4m3. Rows have one scale per 128
    elements, matrices per 128 x 128. Sums are f32, promoted every 128 summands. The weights' gradients multiply bf16, as
    does everything that `dense` does not name. docs/fp8.md lists where each tensor is rounded.

    Attributes:
        kept: the form in which h = [gate | up] is kept for the backward pass. "fp8" halves its bytes, with one scale per 128
            elements. It is e3m4, since no matmul reads it.
        dense: the groups of dense matrices whose products are in FP8 too (`fp8_matmul`), each once, in the order of
            `DenseGroup`. Models read them; `experts_mlp` does not. Router, norms, attention scores, embedding and head are in
            no group.

    Raises:
        ValueError: an unknown form of h, an unknown group, or groups that are not a tuple.
    """

    kept: Kept = "bf16"
    dense: tuple[DenseGroup, ...] = ()

    def __post_init__(self):
        if self.kept not in get_args(Kept):
            raise ValueError(f"kept={self.kept!r} must be one of {', '.join(map(repr, get_args(Kept)))}")
        if not isinstance(self.dense, tuple):
            raise ValueError(f"dense={self.dense!r} must be a tuple of groups, as ('attention',)")
        if unknown := [group for group in self.dense if group not in get_args(DenseGroup)]:
            raise ValueError(f"dense={unknown[0]!r} must be of {', '.join(map(repr, get_args(DenseGroup)))}")
        # Models with the same groups are equal in any order of their names.
        object.__setattr__(self, "dense", tuple(group for group in get_args(DenseGroup) if group in self.dense))

    @classmethod
    def named(cls, name: str, dense: tuple[DenseGroup, ...] = ()) -> Self | None:
        """Returns the `Precision` named "fp8" or "fp8_kept" (which also keeps the residual h in 8 bits), or None for "bf16".

        Raises:
            ValueError: an unknown name or group, or groups with "bf16".
        """
        recipes = {"bf16": None, "fp8": cls(dense=dense), "fp8_kept": cls(kept="fp8", dense=dense)}
        if not isinstance(name, str) or name not in recipes:
            raise ValueError(f"precision {name!r} must be one of {', '.join(map(repr, recipes))}")
        if dense and recipes[name] is None:
            raise ValueError(f"dense matrices in FP8 need experts in FP8: give precision 'fp8'; got {name!r}")
        return recipes[name]


RECIPES = ("bf16", "fp8", "fp8_kept")
"""The names of `Precision.named`."""
