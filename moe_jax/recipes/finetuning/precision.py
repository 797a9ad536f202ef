"""The precision of a run's experts: checked before weights are read, and noted in its checkpoints. Needs no JAX to import."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from moe_jax.models.precision import PrecisionName

if TYPE_CHECKING:
    from moe_jax.adapters.settings import LoraSettings
    from moe_jax.config import ModelConfig

PRECISION = "precision"
"""The name in a run's identity."""


def precision_problems(
    precision: str, dtype: str, mesh: Mapping[str, int], lora: "LoraSettings | None" = None, weights: str = "whole"
) -> list[str]:
    """Returns the settings that do not fit a precision, one clause each; none for "bf16".

    Args:
      mesh: the number of devices along each axis.
      weights: the form of the weights beside adapters.
    """
    if precision not in get_args(PrecisionName):
        return [f"precision={precision!r} must be one of {', '.join(map(repr, get_args(PrecisionName)))}"]
    if precision == "bf16":
        return []
    problems = []
    if dtype != "bfloat16":
        problems.append(f"precision={precision!r} needs dtype='bfloat16', which everything else computes in; got {dtype!r}")
    if (ranks := mesh.get("pipe", 1)) > 1:
        problems.append(f"precision={precision!r} needs a mesh without pipe, whose passes hold bf16; got mesh.pipe={ranks}")
    if lora is not None and weights not in ("fp8", "as stored"):
        problems.append(
            f"precision={precision!r} would round the frozen experts again in each pass: give weights='fp8', which keeps them "
            f"in FP8; got {weights!r}"
        )
    return problems


def check_precision(precision: PrecisionName, config: "ModelConfig", mesh: Mapping[str, int]) -> None:
    """Refuses FP8 for a model whose experts it does not take, or for a mesh that a model was passed on.

    Raises:
      ValueError: such a model or mesh.
    """
    from moe_jax.models.decoder import fp8_refusal

    if precision == "bf16":
        return
    if problems := precision_problems(precision, "bfloat16", mesh):
        raise ValueError("FinetuneSettings: " + "; ".join(problems))
    if (reason := fp8_refusal(config, "bfloat16")) is not None:
        raise ValueError(f"precision={precision!r}: {reason}; take precision 'bf16'")


def identity_of_precision(precision: PrecisionName) -> dict[str, Any]:
    """Returns the entry of a run's identity: None for a run in its dtype, as runs without the setting have."""
    return {PRECISION: None if precision == "bf16" else precision}
