"""The FP8 matmuls in Triton, called through jax-triton: NVIDIA GPUs that multiply e4m3 (compute capability 8.9 and above).

Cost for R rows, E experts, weights [E, N, K]: 2*R'*N*K FLOPs. R' counts the rows of each expert, padded to whole tiles of 64 or
128. Each output element is one sum over k in groups of 128, in one order for every tile. The bits of a row do not depend on the
other rows.

There are kernels for the forward pass: gate_up with its activation, and down, which also computes dx. `fp8.xla` computes the
gradient of the activation.
"""

import importlib
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from moe_jax.kernels.experts import triton
from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.fp8 import quantise, xla
from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedMatrices, QuantisedRows, joined, quantise_rows
from moe_jax.kernels.experts.fp8.xla import kept_h, matrices_in_both_orders
from moe_jax.kernels.experts.routing import Plan, plan_of_one
from moe_jax.kernels.experts.triton import ROW_ALIGNMENT, is_native
from moe_jax.kernels.experts.triton.launch import Tile, capability, has_large_tiles

__all__ = [
    "ROW_ALIGNMENT",
    "gated_matmul",
    "gated_matmul_backward",
    "grouped_matmul",
    "is_native",
    "kept_h",
    "matrices_in_both_orders",
    "matmul_of_tokens",
    "refusal",
    "rows_of_rounded",
    "rows_of_tokens",
]


def refusal(dtype: jnp.dtype, hidden: int, inter: int) -> str | None:
    """Returns why these kernels do not support such experts, with the requirements; None if they do."""
    reason = quantise.refusal(dtype, hidden, inter) or triton.refusal(dtype, hidden, inter)
    version = capability()
    if reason is None and version is not None and version < (8, 9):
        return f"it multiplies FP8 on GPUs of compute capability 8.9 or above; this has {version[0]}.{version[1]}; name 'xla'"
    return reason


def rows_of_tokens(x: BFloat16[Array, "tokens hidden"], plan: Plan) -> QuantisedRows:
    """Returns x, each token rounded once, in token order: `gated_matmul` gathers rows while loading."""
    return rows_of_rounded(quantise_rows(x), plan)


def rows_of_rounded(tokens: QuantisedRows, plan: Plan) -> QuantisedRows:
    """Returns already rounded tokens, in token order."""
    return tokens


def gated_matmul(
    tokens: QuantisedRows, w: QuantisedMatrices, plan: Plan, *, keep_h: bool = True, activation: Activation = SILU
) -> tuple[BFloat16[Array, "rows 2*inter"] | None, QuantisedRows]:
    """Computes h = w[e] rows[r] and act = activation(gate, up) in one kernel. Rows of no expert are left unwritten."""
    kernels = _kernels()
    operands = kernels.TileOperands(tokens, joined(w), plan.token_of_row)
    return kernels.matmul_gated(operands, plan, _gated_tile(), keep_h=keep_h, activation=activation)


def grouped_matmul(rows: QuantisedRows, w: QuantisedMatrices, plan: Plan) -> BFloat16[Array, "rows out"]:
    """Computes y[r] = w[e] rows[r] in one kernel (`xla.grouped_matmul`). Rows of no expert are left unwritten."""
    kernels = _kernels()
    return kernels.matmul(kernels.TileOperands(rows, joined(w)), plan, _row_tile())


def matmul_of_tokens(x: BFloat16[Array, "tokens k"], w: QuantisedMatrices) -> BFloat16[Array, "tokens out"]:
    """Computes x w^T for one matrix (`xla.matmul_of_tokens`)."""
    tokens = x.shape[0]
    p = plan_of_one(tokens, ROW_ALIGNMENT)
    rows = xla.rows_of_rounded(quantise_rows(x), p)
    return grouped_matmul(rows, QuantisedMatrices(w.values[None], w.scales[None]), p)[:tokens]


def gated_matmul_backward(
    dy_of_tokens: QuantisedRows,
    w_down_transposed: QuantisedMatrices,
    h: BFloat16[Array, "rows 2*inter"],
    weight_of_row: Float[Array, "rows"],
    plan: Plan,
    activation: Activation = SILU,
) -> tuple[QuantisedRows, Array, Array, Array]:
    """Computes dh and weight * act from dy, in XLA: there is no Triton kernel for it."""
    dy = xla.rows_of_rounded(dy_of_tokens, plan)
    return xla.gated_matmul_backward(dy, w_down_transposed, h, weight_of_row, plan, activation)


def _kernels() -> Any:
    return importlib.import_module("moe_jax.kernels.experts.triton.by_rows")


def _row_tile() -> Tile:
    """Returns the tile of a product: a step is a group of summands, and the columns are a block of w's scales.

    Four warps would spill on Ada with Triton 3.6 (docs/log/fp8.md).
    """
    return Tile(64, GROUP, GROUP, 4 if has_large_tiles() else 8, 3)


def _gated_tile() -> Tile:
    """Returns the tile of gate_up, with `columns` of gate and of up each.

    128 rows would spill: ptxas holds two totals and a sum in registers. With two buffers Ada's shared memory is full.
    """
    return Tile(64, GROUP, GROUP, 8, 4 if has_large_tiles() else 3)
