"""The names of precisions of matmuls, and of forms of weights, for settings that are read without JAX."""

from typing import Literal, get_args

from moe_jax.kernels.experts.fp8.precision import DenseGroup

__all__ = ["DenseGroup", "PrecisionName", "Weights", "form_problems"]

PrecisionName = Literal["bf16", "fp8", "fp8_kept"]
"""Names of `kernels.Precision.named`'s recipes; "bf16" is the model's own dtype."""

Weights = Literal["whole", "as stored", "nf4", "fp8"]
"""The form in which a device holds weights. "whole": in the parameters' dtype. "as stored": matrices stored in FP8 or GPTQ's 4
bits stay quantised. "nf4": the experts' matrices in NF4. "fp8": the experts' matrices in FP8, as stored or rounded; all others
whole."""


def form_problems(weights: str) -> list[str]:
    """Returns an error message in a list if `weights` names no known form of weights; else an empty list."""
    if weights in get_args(Weights):
        return []
    return [f"weights={weights!r} must be one of {', '.join(map(repr, get_args(Weights)))}"]
