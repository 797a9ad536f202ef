"""The names of precisions of matmuls, and of forms of weights, for settings that are read without JAX."""

from typing import Literal, get_args

from moe_jax.kernels.experts.fp8.precision import DenseGroup

__all__ = ["DenseGroup", "PrecisionName", "Weights", "form_problems"]

PrecisionName = Literal["bf16", "fp8", "fp8_kept"]
"""`kernels.Precision.named` has the recipes; "bf16" stands for the model's dtype."""

Weights = Literal["whole", "as stored", "nf4", "fp8"]
"""The form in which weights lie on the device. "whole": in the parameters' dtype. "as stored": matrices that the files have in
FP8 or in GPTQ's 4 bits stay so. "nf4": the experts' matrices in NF4. "fp8": the experts' matrices in FP8, as the files have
them or rounded, and all others whole."""


def form_problems(weights: str) -> list[str]:
    """Returns the reasons why weights cannot lie in this form, one clause each: there is no such form."""
    if weights in get_args(Weights):
        return []
    return [f"weights={weights!r} must be one of {', '.join(map(repr, get_args(Weights)))}"]
