"""The names of the precisions of experts and of dense matrices, for settings that are read without JAX."""

from typing import Literal

from moe_jax.kernels.experts.fp8.precision import DenseGroup

__all__ = ["DenseGroup", "PrecisionName"]

PrecisionName = Literal["bf16", "fp8", "fp8_kept"]
"""Names of `kernels.Precision.named`'s recipes; "bf16" is the model's own dtype."""
