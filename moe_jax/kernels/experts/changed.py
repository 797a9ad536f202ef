"""The steps of the experts' passes for frozen matrices with a trained low-rank change (LoRA).

https://arxiv.org/abs/2106.09685. In the letters of `api`, with r the rank, w_gate_up has a1 [r, D] and b1 [2I, r]. w_down has
a2 [r, I] and b2 [D, r]:

    u[r]   = a1[e(r)] x[token(r)]             h[r] = w_gate_up[e] x[token(r)] + b1[e] u[r]
    v[r]   = a2[e] act[r]                     y[t] = sum_k weights[t, k] * (w_down[e] act + b2[e] v) at row(t, k)

Backward, with dy'[r] = dy[token(r)]; dweights, dact and dh follow from g and h as in `api`:

    t2[r]  = b2[e]^T dy'                      g[r] = w_down[e]^T dy' + a2[e]^T t2
    da2[e] = sum_r outer(t2, weights(r) * act)           db2[e] = sum_r outer(dy', weights(r) * v)
    t1[r]  = b1[e]^T dh                       dx[t] = sum_k (w_gate_up[e]^T dh + a1[e]^T t1) at row(t, k)
    da1[e] = sum_r outer(t1, x[token(r)])                db1[e] = sum_r outer(dh, u)

The matrices have no gradient, and no product is computed for one. The residuals are the same as in `api`, plus u and v.

In the kernels of `mosaic` and `triton` the change is additional steps of the same sum. In `xla` it is a separate grouped
matmul, whose result is added. The same holds if W multiplies in FP8: the change stays in the rows' dtype, to which both
products are rounded. It also holds if W is a layer of a stack. The factors belong to one layer, and a kernel uses one expert
index for both.
"""

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.kernels.backends import implementation
from moe_jax.kernels.experts.activation import activated, gradients_of_rows
from moe_jax.kernels.experts.fp8 import backends as fp8_backends
from moe_jax.kernels.experts.fp8.passes import plan_of_matrices
from moe_jax.kernels.experts.fp8.quantise import QuantisedRows, quantise_rows, read_h
from moe_jax.kernels.experts.routing import Plan, rows_of_pairs
from moe_jax.kernels.experts.separate_vjps import (
    ExpertsOptions,
    GateUp,
    Hidden,
    PartGradients,
    weight_of_row,
)
from moe_jax.kernels.experts.weights import ExpertWeights, Matrix
from moe_jax.kernels.experts.xla import OuterPart, with_bias
from moe_jax.kernels.low_rank import LowRank, RowsChange


def gate_up_changed(
    options: ExpertsOptions, x: Float[Array, "tokens hidden"], w_gate_up: Matrix, plan: Plan, *, for_backward: bool
) -> GateUp:
    """Computes the gate-up step with its LoRA update; h is None without a backward pass."""
    backend, change = implementation(options.backend), _change(w_gate_up)
    rows, source = backend.rows_of_tokens(x, plan)
    u = backend.grouped_matmul(rows, change.a, _of_one_layer(plan), source_of_row=source)
    of_rows = RowsChange(u, change.b)
    if _adds_in_kernel(options, plan):
        of_rows = _in_dtype(of_rows, rows.dtype)
        given: Any = dict(source_of_row=source, change=of_rows, activation=options.activation, bias=w_gate_up.bias)
        h, act = backend.gated_matmul(rows, w_gate_up.values, plan, **given)
    else:
        h = with_bias(_matmul(options, rows, w_gate_up, plan, of_rows, source_of_row=source), w_gate_up.bias, plan)
        act = activated(h, options.activation)
    kept = h if options.fp8 is None else fp8_backends.implementation(options.fp8.matmuls).kept_h(h, options.fp8.kept)
    return GateUp(act, kept if for_backward else None, u)


def down_changed(
    options: ExpertsOptions,
    act: Float[Array, "rows inter"],
    w_down: Matrix,
    weights: Float[Array, "tokens k"],
    plan: Plan,
    shares: int | None,
) -> tuple[list[Array], Float[Array, "rows rank"]]:
    """Computes the down step with its LoRA update; returns y per share of the tokens, and v."""
    change = _change(w_down)
    v = implementation(options.backend).grouped_matmul(act, change.a, _of_one_layer(plan))
    rows = _matmul(options, act, w_down, plan, RowsChange(v, change.b))
    return implementation(options.backend).token_sums(rows, plan, weights, shares), v


def gradients_changed(
    options: ExpertsOptions,
    experts: ExpertWeights,
    x: Float[Array, "tokens hidden"],
    weights: Float[Array, "tokens k"],
    hidden: Hidden,
    dy: Float[Array, "tokens hidden"],
    shares: int | None,
) -> PartGradients:
    """Returns the gradients of one group's tokens, and the operands of the gradients of a1, b1, a2 and b2."""
    h, plan, u, v = hidden
    assert u is not None and v is not None
    backend, factors = implementation(options.backend), _of_one_layer(plan)
    gate_up, down = _change(experts.gate_up), _change(experts.down)
    matmul, outer = partial(backend.grouped_matmul, plan=factors, transpose=True), partial(OuterPart, plan=factors)
    dy_rows, of_dy = backend.rows_of_tokens(dy, plan)
    t2 = matmul(dy_rows, down.b, source_of_row=of_dy)
    weight = weight_of_row(weights, plan)
    dh, weighted_act, dweight_of_row = _gated_backward(
        options, dy_rows, experts.down, read_h(h), weight, plan, RowsChange(t2, down.a), of_dy
    )
    weighted_v = (v * weight[:, None]).astype(v.dtype)
    of_down = outer(t2, weighted_act), outer(dy_rows, weighted_v, a_source_of_row=of_dy)

    x_rows, of_x = backend.rows_of_tokens(x, plan)
    t1 = matmul(dh, gate_up.b)
    dx_rows = _matmul(options, dh, experts.gate_up, plan, RowsChange(t1, gate_up.a), transpose=True)
    of_gate_up = outer(t1, x_rows, b_source_of_row=of_x), outer(dh, u)
    return PartGradients(
        backend.token_sums(dx_rows, plan, None, shares),
        rows_of_pairs(dweight_of_row, plan).astype(weights.dtype),
        (*of_gate_up, *of_down),
    )


def rank_alignment(backend: str, hidden: int, inter: int) -> int:
    """Returns the number that LoRA ranks are padded to a multiple of, for the backend's matmuls.

    Other ranks are zero-padded. Thin products are bound by memory, so padding costs little.
    """
    if backend == "mosaic":
        # `grouped_outer` has no tile for a gradient of 64 rows or columns whose other side is an odd multiple of 64.
        return 64 if hidden % 128 == inter % 128 == 0 else 128
    return 16 if backend == "triton" else 1


def of_each_expert(factors: LowRank, num_experts: int, alignment: int) -> LowRank:
    """Broadcasts LoRA factors to every expert, and zero-pads their rank to a multiple of `alignment`."""
    fill = -factors.a.shape[1] % alignment
    a, b = (jnp.broadcast_to(factor, (num_experts, *factor.shape[1:])) for factor in factors)
    return LowRank(jnp.pad(a, ((0, 0), (0, fill), (0, 0))), jnp.pad(b, ((0, 0), (0, 0), (0, fill)))) if fill else LowRank(a, b)


def _matmul(
    options: ExpertsOptions,
    x: Array,
    w: Matrix,
    plan: Plan,
    change: RowsChange,
    *,
    source_of_row: Array | None = None,
    transpose: bool = False,
) -> Float[Array, "rows out"]:
    """Returns `grouped_matmul` of x with the changed matrices. Rows of no expert may be left unwritten."""
    given: dict[str, Any] = dict(source_of_row=source_of_row, transpose=transpose)
    backend = implementation(options.backend)
    if _adds_in_kernel(options, plan):
        return backend.grouped_matmul(x, w.values, plan, change=_in_dtype(change, x.dtype), **given)
    if options.fp8 is not None:
        assert w.in_fp8 is not None
        in_fp8 = fp8_backends.implementation(options.fp8.matmuls).grouped_matmul
        codes = w.in_fp8.in_both_orders().transposed if transpose else w.in_fp8.rounded
        product = in_fp8(_rounded(x, source_of_row), codes, plan_of_matrices(plan, w.in_fp8))
    else:
        product = backend.grouped_matmul(x, w.values, plan, **given)
    return product + backend.grouped_matmul(change.rows, change.factor, _of_one_layer(plan), transpose=transpose)


def _of_one_layer(plan: Plan) -> Plan:
    """Returns the plan of matmuls with factors, which always belong to one layer."""
    return dataclasses.replace(plan, layer=None)


def _gated_backward(
    options: ExpertsOptions,
    dy: Array,
    w_down: Matrix,
    h: Array,
    weight_of_row: Array,
    plan: Plan,
    change: RowsChange,
    source_of_row: Array | None,
) -> tuple[Array, Array, Array]:
    """Computes `gated_matmul_backward` with the changed matrices: dh, weight * act, and the weights' gradients."""
    if _adds_in_kernel(options, plan):
        backward = implementation(options.backend).gated_matmul_backward
        given: Any = dict(source_of_row=source_of_row, activation=options.activation)
        return backward(dy, w_down.values, h, weight_of_row, plan, change=_in_dtype(change, dy.dtype), **given)
    g = _matmul(options, dy, w_down, plan, change, source_of_row=source_of_row, transpose=True)
    return gradients_of_rows(h, g, weight_of_row, options.activation)


def _adds_in_kernel(options: ExpertsOptions, plan: Plan) -> bool:
    """Returns True if a kernel adds the change's products to the matrix's products."""
    return options.backend in ("mosaic", "triton") and plan.layer is None and options.fp8 is None


def _change(matrix: Matrix) -> LowRank:
    assert matrix.change is not None
    return matrix.change


def _rounded(x: Float[Array, "sources in"], source_of_row: Int[Array, "rows"] | None) -> QuantisedRows:
    """Rounds rows to FP8, each once, and gathers them in expert order; rows without a source are zeros."""
    values, scales = rows = quantise_rows(x)
    if source_of_row is None:
        return rows
    take = partial(jnp.take, indices=source_of_row, mode="fill", fill_value=0)
    return QuantisedRows(take(values, axis=0), take(scales, axis=1))


def _in_dtype(change: RowsChange, dtype: jnp.dtype) -> RowsChange:
    return change._replace(factor=change.factor.astype(dtype))
