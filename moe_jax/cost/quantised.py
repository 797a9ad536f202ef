"""Matrices in fewer bytes: of experts that multiply in FP8, with residuals in FP8, and frozen ones (`layers.quantised`).

docs/fp8.md says where copies are made: once a step where each device has the whole weights, else by each pass of a layer.
Weights that a pass gathers in FP8 are rounded by the device that keeps them.
Frozen experts lie in FP8, and a backward pass transposes them.
"""

from dataclasses import asdict

from moe_jax.cost.layer import ELEMENT, Passes
from moe_jax.cost.machine import Machine
from moe_jax.cost.parameters import Parameter
from moe_jax.cost.planned_step import BYTES, PlannedStep
from moe_jax.kernels.experts.fp8.quantise import GROUP
from moe_jax.layers.moe import EXPERT_MATRICES
from moe_jax.layers.quantised import NF4_BLOCK

SCALE = 4
"""Bytes of a scale."""

OF_ELEMENT = 1 + SCALE / GROUP**2
"""Bytes of an element of a matrix."""

OF_ROW_ELEMENT = 1 + SCALE / GROUP
"""Bytes of an element of a row."""


def copies_bytes(step: PlannedStep) -> float:
    """Returns the bytes of all copies that are made once a step: both orders of each matrix."""
    return 2 * OF_ELEMENT * _copied_elements(step)


def copies_seconds(step: PlannedStep, machine: Machine) -> float:
    """Returns the seconds to make the copies of `copies_bytes`: weights are read and rounded, then values are transposed."""
    return (BYTES[step.param_dtype] + 1 + 2) * _copied_elements(step) / machine.hbm


def rounding_bytes(step: PlannedStep, stage: int) -> float:
    """Returns the bytes of matrices that a backward pass of one layer of a stage makes in FP8."""
    # The order in which matrices lie or arrive in FP8 is there before.
    orders = 1 if step.adapters is not None or _arrives_in_fp8(step, stage) else 2
    return orders * OF_ELEMENT * _elements_of_pass(step, stage)


def rounding_seconds(step: PlannedStep, stage: int, machine: Machine) -> Passes:
    """Returns the seconds in which the passes of one layer of a stage make matrices in FP8."""
    elements = _elements_of_pass(step, stage) / machine.hbm
    if step.adapters is not None:
        return Passes(0.0, 0.0, 2 * elements)
    if _arrives_in_fp8(step, stage):
        # The backward pass and its recomputation have one gather, and round the device's own part once.
        rounded = (BYTES[step.param_dtype] + 1) * sum(p.own_size / p.layers for p in _experts(step, stage)) / machine.hbm
        return Passes(rounded, 0.0, rounded + 2 * elements)
    rounded = (ELEMENT + 1) * elements
    return Passes(rounded, rounded, rounded + 2 * elements)


def gathered_bytes(step: PlannedStep, parameter: Parameter) -> float:
    """Returns the bytes of an element of a parameter that is gathered for use, as it travels."""
    is_of_experts = parameter.in_stage and parameter.path[-1] in EXPERT_MATRICES
    return OF_ELEMENT if is_of_experts and _arrives_in_fp8(step, parameter.path[1]) else ELEMENT


def travelling_bytes(step: PlannedStep) -> float:
    """Returns the bytes of an element of a token that travels to its experts, and is kept there for the backward pass."""
    return OF_ROW_ELEMENT if step.tokens_in_fp8 else ELEMENT


def _copied_elements(step: PlannedStep) -> int:
    """Returns the elements of the weights that are copied once a step; zero if passes round them, or they are frozen."""
    if step.precision == "bf16" or step.adapters is not None:
        return 0
    return sum(p.own_size for p in step.parameters if p.path[-1] in EXPERT_MATRICES and _is_copied(step, p.path[1]))


def _elements_of_pass(step: PlannedStep, stage: int) -> float:
    """Returns the elements of one layer's weights that each pass rounds, or that lie in FP8 and are transposed."""
    if step.precision == "bf16" or (step.adapters is None and _is_copied(step, stage)):
        return 0.0
    return sum(p.used_size / p.layers for p in _experts(step, stage))


def _arrives_in_fp8(step: PlannedStep, stage: int) -> bool:
    """Returns True if the layers of a stage gather their experts in FP8: both matrices, or none."""
    if step.precision == "bf16" or step.adapters is not None:
        return False
    own = _experts(step, stage)
    return bool(own) and all(p.can_travel_in_fp8 for p in own)


def _experts(step: PlannedStep, stage: int) -> list[Parameter]:
    return [p for p in step.parameters if p.path[:2] == ("stages", stage) and p.path[-1] in EXPERT_MATRICES]


def _is_copied(step: PlannedStep, stage: int) -> bool:
    """Returns True if a device has the whole weights of the stage's layers that it computes."""
    if step.mesh.pipe > 1 and stage != step.joined_stage:
        return False
    return all(size == 1 for axis, size in asdict(step.mesh).items() if axis not in ("data", "pipe"))


def frozen_bytes(step: PlannedStep) -> float:
    """Returns the bytes of all weights beside adapters."""
    return sum(p.own_size * (_stored_bytes(p, step) or BYTES[step.param_dtype]) for p in step.parameters)


def quantised_layer(step: PlannedStep, stage: int) -> tuple[float, float]:
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
    return stored, whole


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
