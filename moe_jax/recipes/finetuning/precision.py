"""The precision of a run's matmuls: checked before weights are read, and noted in its checkpoints. Needs no JAX to import."""

from typing import TYPE_CHECKING, Any, get_args

from moe_jax.models.precision import DenseGroup, PrecisionName

if TYPE_CHECKING:
    from moe_jax.adapters.settings import LoraSettings
    from moe_jax.config import ModelConfig
    from moe_jax.models.decoder import Decoder

PRECISION = "precision"
"""The name in a run's identity."""

FP8_DENSE = "fp8_dense"
"""The name of the dense groups in a run's identity."""


def precision_problems(
    precision: str,
    dtype: str,
    pipe_schedule: str = "uniform",
    lora: "LoraSettings | None" = None,
    weights: str = "whole",
    *,
    tokens_in_fp8: bool = False,
) -> list[str]:
    """Returns the settings that do not fit a precision, one clause each. "bf16" fits all but `tokens_in_fp8`.

    Args:
      pipe_schedule: of a mesh with a pipe.
      weights: the form of the weights beside adapters.
      tokens_in_fp8: as in `parallel.ExpertParallel`.
    """
    if precision not in get_args(PrecisionName):
        return [f"precision={precision!r} must be one of {', '.join(map(repr, get_args(PrecisionName)))}"]
    if precision == "bf16":
        needs = "tokens_in_fp8=True needs experts that multiply in FP8: give precision='fp8' or 'fp8_kept'; got 'bf16'"
        return [needs] if tokens_in_fp8 else []
    problems = []
    if dtype != "bfloat16":
        problems.append(f"precision={precision!r} needs dtype='bfloat16', which everything else computes in; got {dtype!r}")
    if pipe_schedule != "uniform":
        problems.append(f"precision={precision!r} needs pipe_schedule='uniform': {pipe_schedule!r} holds operands in bf16")
    if lora is not None and weights not in ("fp8", "as stored"):
        problems.append(
            f"precision={precision!r} would round the frozen experts again in each pass: give weights='fp8', which keeps them "
            f"in FP8; got {weights!r}"
        )
    return problems


def dense_problems(fp8_dense: tuple[str, ...], precision: str) -> list[str]:
    """Returns the dense groups that do not fit a precision, one clause each."""
    if not isinstance(fp8_dense, tuple):
        return [f"fp8_dense={fp8_dense!r} must be a tuple of groups, as ('attention',)"]
    problems, groups = [], get_args(DenseGroup)
    for group in fp8_dense:
        if group not in groups:
            problems.append(f"fp8_dense={group!r} must be one of {', '.join(map(repr, groups))}")
    if fp8_dense and precision == "bf16":
        problems.append("fp8_dense needs experts in FP8: give precision='fp8'")
    return problems


def check_precision(
    precision: PrecisionName, config: "ModelConfig", dense: tuple[DenseGroup, ...] = (), model: "Decoder | None" = None
) -> None:
    """Refuses FP8 for a model whose experts or dense groups it does not take.

    Args:
      model: a model that was passed, whose dtype counts in place of the settings'.

    Raises:
      ValueError: such a model.
    """
    from moe_jax.models.decoder import fp8_refusal

    if precision == "bf16":
        return
    if (reason := fp8_refusal(config, "bfloat16" if model is None else model.dtype, dense)) is not None:
        raise ValueError(f"precision={precision!r}: {reason}; take precision 'bf16'")


def identity_of_precision(precision: PrecisionName, dense: tuple[DenseGroup, ...] = ()) -> dict[str, Any]:
    """Returns the entries of a run's identity: None for a run in its dtype, as runs without the settings have."""
    return {PRECISION: None if precision == "bf16" else precision, FP8_DENSE: sorted(set(dense)) or None}
