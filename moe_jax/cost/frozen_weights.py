"""Frozen weights in fewer bytes (`layers.quantised`): their bytes, and the seconds in which a layer is made whole."""

from typing import NamedTuple

from moe_jax.cost.fp8 import OF_ELEMENT, SCALE
from moe_jax.cost.layer import ELEMENT
from moe_jax.cost.parameters import Parameter
from moe_jax.cost.planned_step import BYTES, PlannedStep
from moe_jax.layers.moe import EXPERT_MATRICES
from moe_jax.layers.quantised import NF4_BLOCK


class QuantisedBytes(NamedTuple):
    """The quantised matrices of one layer."""

    stored: float = 0.0
    whole: float = 0.0


def frozen_bytes(step: PlannedStep) -> float:
    """Returns the bytes of all weights beside adapters."""
    return sum(p.own_size * (_stored_bytes(p, step) or BYTES[step.param_dtype]) for p in step.parameters)


def quantised_layer(step: PlannedStep, stage: int) -> QuantisedBytes:
    """Returns the bytes of a layer's quantised matrices that passes make whole, as they lie and whole.

    Experts that multiply in FP8 are not made whole.
    """
    stored = whole = 0.0
    for parameter in step.parameters:
        if step.precision != "bf16" and parameter.path[-1] in EXPERT_MATRICES:
            continue
        if parameter.path[:2] == ("stages", stage) and (of_element := _stored_bytes(parameter, step)):
            elements = parameter.own_size / parameter.layers
            stored, whole = stored + of_element * elements, whole + ELEMENT * elements
    return QuantisedBytes(stored, whole)


def _stored_bytes(parameter: Parameter, step: PlannedStep) -> float | None:
    """Returns the bytes of an element of a quantised parameter; None for one that lies whole.

    "as stored" is FP8 in blocks, as the hub has it: all projections of all layers. A pass makes a layer's matrices whole.
    """
    form = "whole" if step.adapters is None else step.adapters.weights
    is_of_experts = parameter.path[-1] in EXPERT_MATRICES
    is_projection = any(str(part).endswith("_proj") for part in parameter.path)
    if form == "nf4" and is_of_experts:
        return 1 / 2 + SCALE / NF4_BLOCK
    if (form == "fp8" and is_of_experts) or (form == "as stored" and parameter.in_stage and is_projection):
        return OF_ELEMENT
    return None
