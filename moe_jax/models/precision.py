"""The names of the precisions of experts, for settings that are read without JAX."""

from typing import Literal

PrecisionName = Literal["bf16", "fp8", "fp8_kept"]
"""`kernels.Precision.named` has the recipes; "bf16" stands for the model's dtype."""
