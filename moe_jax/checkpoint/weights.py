"""The forms in which a model's weights may lie on a device."""

from typing import Literal

Weights = Literal["whole", "as stored", "nf4"]
"""The form in which weights lie on the device. "whole": in the parameters' dtype. "as stored": matrices that the files have in
FP8 or in GPTQ's 4 bits stay so. "nf4": the experts' matrices in NF4."""
