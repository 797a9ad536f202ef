"""The FP8 matmuls on Hopper in Pallas Mosaic GPU: `fp8.xla`'s functions, as kernels of TMA, wgmma and promoted sums.

Cost for R rows, E experts, weights [E, N, K]: 2*R'*N*K FLOPs, R' being the rows padded to blocks of 64. Each output element is
one sum over k in groups of 128, in one order for every tile. The bits of a row do not depend on other rows. Rounding in an
epilogue uses the hardware's approximate inverse of a scale. It can differ from `fp8.xla` by one unit in the last place, like
the f32 sums.

On a CPU the kernels run in JAX's GPU interpreter, slowly.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int

from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.fp8 import quantise, xla
from moe_jax.kernels.experts.fp8.mosaic import by_pairs, by_rows, by_rows_backward
from moe_jax.kernels.experts.fp8.mosaic.gather import gather_rounded, gather_rows
from moe_jax.kernels.experts.fp8.mosaic.promoted import Fp8TileShape
from moe_jax.kernels.experts.fp8.mosaic.round_groups import GROUPS, TOKENS, keep_rows, round_tokens
from moe_jax.kernels.experts.fp8.mosaic.round_matrices import round_matrices
from moe_jax.kernels.experts.fp8.precision import Kept
from moe_jax.kernels.experts.fp8.quantise import GROUP, InFp8, KeptRows, QuantisedMatrices, QuantisedRows, joined, quantise_rows
from moe_jax.kernels.experts.mosaic import is_native
from moe_jax.kernels.experts.mosaic.by_pairs import takes
from moe_jax.kernels.experts.routing import Plan, int32_ids, is_an_expert, plan_of_one
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS

__all__ = [
    "ROW_ALIGNMENT",
    "experts_of_few_pairs",
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

WIDE = Fp8TileShape(128, 256, 4)
"""The tile of most products, limited by the registers for totals and block sums of two warpgroups."""

FEW_ROWS = Fp8TileShape(64, 256, 4, ping_pong=True)
"""The tile if experts have 64 rows or fewer on average."""

NARROW = Fp8TileShape(64, 128, 8, ping_pong=True)
"""The tile if FEW_ROWS would leave cores idle: for one token, 128 tiles for down instead of 64."""

CORES = 132
"""The cores of a Hopper GPU."""

BACKWARD = Fp8TileShape(128, 128, 3)
"""The tile of dSwiGLU for short sums: its epilogue is long, and shorter with one block per warpgroup."""

BACKWARD_OF_LONG_SUMS = Fp8TileShape(128, 256, 3)
"""The tile of dSwiGLU for sums of LONG_SUM or more, which reads the matrix half as often (docs/log/fp8.md)."""

LONG_SUM = 4096


def refusal(dtype: jnp.dtype, hidden: int, inter: int) -> str | None:
    """Returns why these kernels do not support such experts, with the supported sizes; None if they do."""
    return quantise.refusal(dtype, hidden, inter) or mosaic.refusal(dtype, hidden, inter)


def matrices_in_both_orders(w: Float[Array, "*stack n k"]) -> InFp8:
    """Quantizes matrices, and returns their transposes too; those in bf16 in one kernel, others in XLA."""
    return round_matrices(w) if w.dtype == jnp.bfloat16 and w.size else xla.matrices_in_both_orders(w)


def rows_of_tokens(x: BFloat16[Array, "tokens hidden"], plan: Plan) -> QuantisedRows:
    """Quantizes x and gathers its rows in expert order, in one kernel. Rows from offsets[-1] on are left unwritten.

    If `plan.holds_all_tokens` the rows are the tokens themselves, padded to a multiple of 8.
    """
    if plan.holds_all_tokens:
        return round_tokens(x)
    return gather_rows(x, plan) if plan.num_rows else quantise_rows(jnp.zeros((0, x.shape[1]), x.dtype))


def rows_of_rounded(tokens: QuantisedRows, plan: Plan) -> QuantisedRows:
    """Gathers already quantized tokens in expert order, in one kernel, with rows as in `rows_of_tokens`."""
    if plan.holds_all_tokens:
        fill = -tokens.values.shape[0] % TOKENS
        widths = ((0, fill), (0, 0)), ((0, 0), (0, fill))
        return QuantisedRows(*(jnp.pad(a, width) for a, width in zip(tokens, widths, strict=True)))
    return gather_rounded(tokens, plan) if plan.num_rows else QuantisedRows(tokens.values[:0], tokens.scales[:, :0])


def experts_of_few_pairs(
    x: BFloat16[Array, "tokens hidden"],
    w_gate_up: QuantisedMatrices,
    w_down: QuantisedMatrices,
    topk_experts: Int[Array, "tokens k"],
    layer: Int[Array, ""] | None = None,
    activation: Activation = SILU,
) -> BFloat16[Array, "tokens*k hidden"] | None:
    """Computes all experts of a few (token, expert) pairs in FP8; None for unsupported sizes or too many pairs.

    With `layer` the matrices are stacks of layers.
    """
    num_experts = w_down.values.shape[-3]
    if not takes(topk_experts, num_experts, *w_down.values.shape[-2:]):
        return None
    ids = int32_ids(topk_experts, num_experts)
    if layer is not None:
        ids = jnp.where(is_an_expert(ids, num_experts), ids + layer * num_experts, -1)
    return by_pairs.experts_of_pairs(x, joined(w_gate_up), joined(w_down), ids, activation)


def grouped_matmul(rows: QuantisedRows, w: QuantisedMatrices, plan: Plan) -> BFloat16[Array, "rows out"]:
    """Computes y[r] = w[e] rows[r] in one kernel (`xla.grouped_matmul`). Padding rows may be left unwritten."""
    columns, tile = w.values.shape[-2], _tile(plan)
    experts = min(plan.num_experts, plan.max_pairs)
    if tile == FEW_ROWS and experts * (columns // tile.columns) < CORES:
        tile = NARROW
    elif columns % tile.columns:
        tile = dataclasses.replace(tile, columns=GROUP)
    return by_rows.matmul(rows, joined(w), plan, tile)


def matmul_of_tokens(x: BFloat16[Array, "tokens k"], w: QuantisedMatrices) -> BFloat16[Array, "tokens out"]:
    """Computes x w^T for one matrix in two kernels (`xla.matmul_of_tokens`)."""
    tokens = x.shape[0]
    p = plan_of_one(tokens, ROW_ALIGNMENT)
    return grouped_matmul(rows_of_tokens(x, p), QuantisedMatrices(w.values[None], w.scales[None]), p)[:tokens]


def gated_matmul(
    rows: QuantisedRows, w: QuantisedMatrices, plan: Plan, *, keep_h: bool = True, activation: Activation = SILU
) -> tuple[BFloat16[Array, "rows 2*inter"] | None, QuantisedRows]:
    """Computes h = w[e] rows[r] and act = activation(gate, up) in one kernel. Padding rows may be left unwritten."""
    return by_rows.matmul_gated(rows, joined(w), plan, _tile(plan), keep_h=keep_h, activation=activation)


def kept_h(h: BFloat16[Array, "rows 2*inter"], form: Kept) -> BFloat16[Array, "rows 2*inter"] | KeptRows:
    """Converts h to the form that is kept for the backward pass, to 8 bits in one kernel."""
    is_whole = h.size and h.size % (GROUPS * GROUP) == 0
    return keep_rows(h) if form == "fp8" and is_whole else xla.kept_h(h, form)


def gated_matmul_backward(
    dy: QuantisedRows,
    w_down_transposed: QuantisedMatrices,
    h: BFloat16[Array, "rows 2*inter"],
    weight_of_row: Float[Array, "rows"],
    plan: Plan,
    activation: Activation = SILU,
) -> tuple[QuantisedRows, Array, Array, Array]:
    """Computes dh, weight * act and dweight from dy (as `xla.gated_matmul_backward`). Rows of no expert are unwritten."""
    *_, inter, hidden = w_down_transposed.values.shape
    tile = BACKWARD if hidden < LONG_SUM or inter % BACKWARD_OF_LONG_SUMS.columns else BACKWARD_OF_LONG_SUMS
    w = joined(w_down_transposed)
    return by_rows_backward.matmul_gated_backward(dy, w, h, weight_of_row, plan, tile, activation)


def _tile(plan: Plan) -> Fp8TileShape:
    has_few_rows = plan.holds_all_tokens or plan.max_pairs <= WGMMA_ROWS * plan.num_experts
    return FEW_ROWS if has_few_rows else WIDE
