"""The exact reference implementation in plain XLA, for every platform: values and scales as in `quantise`.

A sum runs over k in groups of 128, from the first to the last. A group's products are summed in f32, multiplied by (the row's
scale * the block's scale), and added to the f32 total. So it is slower than bf16: the total is read and written once for each
128 elements.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from moe_jax.kernels.experts import xla
from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.fp8.precision import Kept
from moe_jax.kernels.experts.fp8.quantise import (
    GROUP,
    InFp8,
    KeptRows,
    QuantisedMatrices,
    QuantisedRows,
    keep_h,
    quantise_matrices,
    quantise_rows,
)
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.shapes import vary_as

ROW_ALIGNMENT = 1
"""The row_alignment of plans for this backend; it supports plans of any other alignment too."""


def matrices_in_both_orders(w: Float[Array, "*stack n k"]) -> InFp8:
    """Quantizes matrices, and returns their transposes too; n and k are multiples of 128."""
    return InFp8(quantise_matrices(w)).in_both_orders()


def rows_of_tokens(x: BFloat16[Array, "tokens hidden"], plan: Plan) -> QuantisedRows:
    """Quantizes x and gathers its rows in expert order; rows without a pair are zero."""
    return rows_of_rounded(quantise_rows(x), plan)


def rows_of_rounded(tokens: QuantisedRows, plan: Plan) -> QuantisedRows:
    """Gathers already quantized tokens in expert order; rows without a pair are zero."""
    # An empty array cannot be gathered from, and the scale of zeros is not zero.
    nobody = quantise_rows(jnp.zeros((1, tokens.values.shape[1]), jnp.bfloat16))
    values, scales = (jnp.concatenate([a, b], axis) for a, b, axis in zip(tokens, nobody, (0, 1), strict=True))
    return QuantisedRows(
        values.at[plan.token_of_row].get(mode="promise_in_bounds"),
        scales.at[:, plan.token_of_row].get(mode="promise_in_bounds"),
    )


def gated_matmul(
    rows: QuantisedRows, w: QuantisedMatrices, plan: Plan, *, keep_h: bool = True, activation: Activation = SILU
) -> tuple[BFloat16[Array, "rows 2*inter"] | None, QuantisedRows]:
    """Computes h[r] = w[e] rows[r] = [gate | up] (None without `keep_h`) and act = activation(gate, up).

    act is computed and rounded from the f32 sums, not from h.
    """
    sums = _grouped_sums(rows, w, plan)
    gate, up = jnp.split(sums, 2, axis=1)
    return sums.astype(jnp.bfloat16) if keep_h else None, quantise_rows(activation.forward(gate, up))


def kept_h(h: BFloat16[Array, "rows 2*inter"], form: Kept) -> BFloat16[Array, "rows 2*inter"] | KeptRows:
    """Converts h to the form that is kept for the backward pass."""
    return keep_h(h, form)


def grouped_matmul(rows: QuantisedRows, w: QuantisedMatrices, plan: Plan) -> BFloat16[Array, "rows out"]:
    """Computes y[r] = w[e] rows[r], where e is row r's expert. Rows without an expert are 0.

    w is [experts, out, in], with a leading axis of layers if the plan has a layer.
    """
    return _grouped_sums(rows, w, plan).astype(jnp.bfloat16)


def matmul_of_tokens(x: BFloat16[Array, "tokens k"], w: QuantisedMatrices) -> BFloat16[Array, "tokens out"]:
    """Computes x w^T for one matrix w [out, k], after quantizing x."""
    rows = quantise_rows(x)
    block = rows.values[None], rows.scales.T[None]
    return _multiply(block, QuantisedMatrices(w.values[None], w.scales[None]))[0].astype(jnp.bfloat16)


def gated_matmul_backward(
    dy: QuantisedRows,
    w_down_transposed: QuantisedMatrices,
    h: BFloat16[Array, "rows 2*inter"],
    weight_of_row: Float[Array, "rows"],
    plan: Plan,
    activation: Activation = SILU,
) -> tuple[QuantisedRows, Array, Array, Array]:
    """Computes the gradients through the down matmul and the activation, y = sum_k weight * w_down act.

    With g = w_down[e]^T dy in f32 and the row's weight v, the gradient to act is v * g, and dweight = <g, act>.

    Returns:
        dh, rounded from the f32 numbers. dh in bf16, for the gradient of w_gate_up. weight * act in bf16, for the gradient of
        w_down. The gradient to each row's weight, in f32.
    """
    g = _grouped_sums(dy, w_down_transposed, plan)
    gate, up = jnp.split(h.astype(jnp.float32), 2, axis=1)
    v = weight_of_row.astype(jnp.float32)[:, None]
    act, pullback = activation.vjp(gate, up)
    dh = jnp.concatenate(pullback(v * g), axis=1)
    return (
        quantise_rows(dh), dh.astype(jnp.bfloat16), (v * act).astype(jnp.bfloat16), jnp.sum(g * act, axis=1)
    )  # fmt: skip


def _grouped_sums(rows: QuantisedRows, w: QuantisedMatrices, plan: Plan) -> Float[Array, "rows out"]:
    w = QuantisedMatrices(*(xla.of_layer(part, plan.layer) for part in (w.values, w.scales)))
    (num_rows, k), out = rows.values.shape, w.values.shape[1]
    if num_rows == 0:
        return jnp.zeros((0, out), jnp.float32)
    take_values, take_scales = xla.taker(rows.values, None, num_rows), xla.taker(rows.scales.T, None, num_rows)

    def take(starts: Array, ends: Array, height: int) -> tuple[Array, Array]:
        return take_values(starts, ends, height), take_scales(starts, ends, height)

    # A row has a total and a group's sum in f32, and its values in bf16.
    workspace = xla.Workspace(matrix=3 * out * k, cast=2 * out * k, row=8 * out + 3 * k)
    return xla.multiply_by_experts(take, w, _multiply, plan, workspace)


def _multiply(blocks: tuple[Array, Array], w: QuantisedMatrices) -> Float[Array, "blocks height out"]:
    """Multiplies each block of rows, values [blocks, height, k] and scales [.., k/128], with one expert's matrix."""
    rows, row_scales = blocks
    groups = row_scales.shape[-1]

    def add_group(total: Array, group: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
        values, scales, w_values, w_scales = group
        # e4m3 in bf16 is exact, and so is a product of two in f32.
        operands = values.astype(jnp.bfloat16), w_values.astype(jnp.bfloat16)
        sums = jax.lax.dot_general(*operands, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
        return total + scales[:, :, None] * jnp.repeat(w_scales, GROUP, axis=1)[:, None, :] * sums, None

    def by_group(a: Array, width: int) -> Array:
        return jnp.moveaxis(a.reshape(*a.shape[:2], groups, width), 2, 0)

    operands = (
        by_group(rows, GROUP),
        by_group(row_scales, 1)[..., 0],
        by_group(w.values, GROUP),
        by_group(w.scales, 1)[..., 0],
    )
    start = vary_as(jnp.zeros((*rows.shape[:2], w.values.shape[1]), jnp.float32), operands)
    return jax.lax.scan(add_group, start, operands)[0]
