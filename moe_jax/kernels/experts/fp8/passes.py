"""The steps of the experts' passes in FP8, on the tokens of one part; `fused_vjp` orders them, `api` derives the formulas.

| product | first operand | second operand | result |
|---|---|---|---|
| h | x, by token | w_gate_up | f32 sums: h in bf16, act in FP8 |
| y of a row | act | w_down | bf16 |
| g | dy, by token | w_down transposed | f32 sums: dh in FP8 and bf16, weighted act in bf16 |
| dx of a row | dh | w_gate_up transposed | bf16 |
| dw_gate_up, dw_down | dh, dy in bf16 | x, weighted act in bf16 | as without FP8 |

A transposed matrix has the same values and scales: it is rounded once. x may already be in FP8, as it travelled. The product
for dw_gate_up then uses its rounded numbers, values * scales in bf16.
"""

import dataclasses
from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from moe_jax.kernels import backends
from moe_jax.kernels.experts.fp8.backends import implementation
from moe_jax.kernels.experts.fp8.quantise import InFp8, QuantisedRows, dequantised_rows, read_h
from moe_jax.kernels.experts.routing import Plan, rows_of_pairs
from moe_jax.kernels.experts.separate_vjps import (
    ExpertsOptions,
    GateUp,
    Hidden,
    PartGradients,
    weight_of_row,
)
from moe_jax.kernels.experts.weights import ExpertWeights
from moe_jax.kernels.experts.xla import OuterPart


def quantise_experts(
    w_gate_up: Float[Array, "*layers experts 2*inter hidden"],
    w_down: Float[Array, "*layers experts hidden inter"],
    matmuls: str = "xla",
) -> tuple[InFp8, InFp8]:
    """Quantizes both expert matrices and their transposes to FP8, without gradients, by an implementation of `backends`."""
    gate_up, down = (implementation(matmuls).matrices_in_both_orders(jax.lax.stop_gradient(w)) for w in (w_gate_up, w_down))
    return gate_up, down


def gate_up_in_fp8(
    x: BFloat16[Array, "tokens hidden"] | QuantisedRows,
    w_gate_up: InFp8,
    plan: Plan,
    options: ExpertsOptions,
    *,
    for_backward: bool,
) -> GateUp:
    """Computes the gate-up step in FP8; h is None without a backward pass."""
    matmuls, plan = _matmuls(options), plan_of_matrices(plan, w_gate_up)
    rows = matmuls.rows_of_rounded(x, plan) if isinstance(x, QuantisedRows) else matmuls.rows_of_tokens(x, plan)
    h, act = matmuls.gated_matmul(rows, w_gate_up.rounded, plan, keep_h=for_backward, activation=options.activation)
    assert options.fp8 is not None
    return GateUp(act, None if h is None else matmuls.kept_h(h, options.fp8.kept))


def down_in_fp8(
    act: QuantisedRows,
    w_down: InFp8,
    weights: Float[Array, "tokens k"],
    plan: Plan,
    options: ExpertsOptions,
    shares: int | None = None,
) -> list[Array]:
    """Computes the down step in FP8; returns y, one array per share of the tokens."""
    rows = _matmuls(options).grouped_matmul(act, w_down.rounded, plan_of_matrices(plan, w_down))
    return backends.implementation(options.backend).token_sums(rows, plan, weights, shares)


def gradients_in_fp8(
    options: ExpertsOptions,
    experts: ExpertWeights,
    x: BFloat16[Array, "tokens hidden"] | QuantisedRows,
    weights: Float[Array, "tokens k"],
    hidden: Hidden,
    dy: BFloat16[Array, "tokens hidden"],
    shares: int | None,
) -> PartGradients:
    """Computes the gradients of inputs in FP8, and returns the bf16 operands of the weight gradients."""
    plan, w_gate_up, w_down = hidden.plan, experts.gate_up.in_fp8, experts.down.in_fp8
    assert w_gate_up is not None and w_down is not None
    matmuls, of_matrices = _matmuls(options), plan_of_matrices(plan, w_down)
    gate_up, down = w_gate_up.in_both_orders().transposed, w_down.in_both_orders().transposed
    rows, h, weight = matmuls.rows_of_tokens(dy, of_matrices), read_h(hidden.h), weight_of_row(weights, plan)
    found = matmuls.gated_matmul_backward(rows, down, h, weight, of_matrices, options.activation)
    dh, dh_bf16, weighted_act, dweight_of_row = found
    dx_rows = matmuls.grouped_matmul(dh, gate_up, of_matrices)
    sums = backends.implementation(options.backend)
    x = dequantised_rows(x).astype(jnp.bfloat16) if isinstance(x, QuantisedRows) else x
    (dy_rows, of_dy), (x_rows, of_x) = sums.rows_of_tokens(dy, plan), sums.rows_of_tokens(x, plan)
    return PartGradients(
        sums.token_sums(dx_rows, plan, None, shares),
        rows_of_pairs(dweight_of_row, plan).astype(weights.dtype),
        (OuterPart(dh_bf16, x_rows, plan, None, of_x), OuterPart(dy_rows, weighted_act, plan, of_dy, None)),
    )


def _matmuls(options: ExpertsOptions) -> ModuleType:
    assert options.fp8 is not None
    return implementation(options.fp8.matmuls)


def plan_of_matrices(plan: Plan, w: InFp8) -> Plan:
    """Returns the plan with its layer index kept only if these matrices are stacks of layers."""
    return plan if w.rounded.values.ndim == 4 else dataclasses.replace(plan, layer=None)
