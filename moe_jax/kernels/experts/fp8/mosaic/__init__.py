"""The FP8 matmuls on Hopper in Pallas Mosaic GPU: `fp8.xla`'s functions, as kernels of TMA, wgmma and promoted sums.

Cost for R rows, E experts, weights [E, N, K]: 2*R'*N*K FLOPs, R' being the rows filled up to blocks of 64. Each output element
is one sum over k in groups of 128, in one order for every tile. The bits of a row do not depend on the rows beside it.

Rounding in an epilogue takes the hardware's approximate inverse of a scale. It can differ from `fp8.xla` by one unit in the
last place, as the f32 sums do.

On a CPU the kernels run in JAX's GPU interpreter, slowly.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from moe_jax.kernels.experts import mosaic
from moe_jax.kernels.experts.fp8 import quantise
from moe_jax.kernels.experts.fp8.mosaic import by_rows, by_rows_backward
from moe_jax.kernels.experts.fp8.mosaic.gather import gather_rows
from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedMatrices, QuantisedRows, quantise_rows
from moe_jax.kernels.experts.fp8.xla import Fp8Backward
from moe_jax.kernels.experts.mosaic import is_native
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT, TileShape
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS

__all__ = [
    "ROW_ALIGNMENT",
    "gated_matmul",
    "gated_matmul_backward",
    "grouped_matmul",
    "is_native",
    "refusal",
    "rows_of_tokens",
]

WIDE = TileShape(128, 256, 4)
"""The tile of most products: what two warpgroups' totals and sums of a block fill."""

FEW_ROWS = TileShape(64, 256, 4, ping_pong=True)
"""The tile where experts have 64 rows or fewer on average."""

BACKWARD = TileShape(128, 128, 3)
"""The tile of dSwiGLU: h of the tile and its gradients stand beside three slots."""


def refusal(dtype: jnp.dtype, hidden: int, inter: int) -> str | None:
    """Returns why these kernels cannot compute such experts, and what would be right; None if they can."""
    return quantise.refusal(dtype, hidden, inter) or mosaic.refusal(dtype, hidden, inter)


def rows_of_tokens(x: BFloat16[Array, "tokens hidden"], plan: Plan) -> QuantisedRows:
    """Computes `xla.rows_of_tokens` in one kernel. Rows from offsets[-1] on are left unwritten.

    If `plan.holds_all_tokens` the rows are the tokens themselves, filled up to one block.
    """
    if plan.holds_all_tokens:
        return quantise_rows(jnp.pad(x, ((0, ROW_ALIGNMENT - x.shape[0]), (0, 0))))
    return gather_rows(x, plan) if plan.num_rows else quantise_rows(jnp.zeros((0, x.shape[1]), x.dtype))


def grouped_matmul(rows: QuantisedRows, w: QuantisedMatrices, plan: Plan) -> BFloat16[Array, "rows out"]:
    """Computes `xla.grouped_matmul` in one kernel. Rows of no expert are left unwritten."""
    columns = w.values.shape[-2]
    if plan.num_rows == 0:
        return jnp.zeros((0, columns), jnp.bfloat16)
    tile = _tile(plan)
    if columns % tile.columns:
        tile = dataclasses.replace(tile, columns=GROUP)
    return by_rows.matmul(rows, _joined(w), plan, tile)


def gated_matmul(
    rows: QuantisedRows, w: QuantisedMatrices, plan: Plan, *, keep_h: bool = True
) -> tuple[BFloat16[Array, "rows 2*inter"] | None, QuantisedRows]:
    """Computes `xla.gated_matmul` in one kernel. Rows of no expert are left unwritten."""
    if plan.num_rows == 0:
        columns = w.values.shape[-2]
        h, act = (jnp.zeros((0, size), jnp.bfloat16) for size in (columns, columns // 2))
        return h if keep_h else None, quantise_rows(act)
    return by_rows.matmul_gated_silu(rows, _joined(w), plan, _tile(plan), keep_h=keep_h)


def gated_matmul_backward(
    dy: QuantisedRows,
    w_down_transposed: QuantisedMatrices,
    h: BFloat16[Array, "rows 2*inter"],
    weight_of_row: Float[Array, "rows"],
    plan: Plan,
) -> Fp8Backward:
    """Computes `xla.gated_matmul_backward` in one kernel. Rows of no expert are left unwritten."""
    if plan.num_rows == 0:
        return Fp8Backward(quantise_rows(h), h, h[:, : h.shape[1] // 2], jnp.zeros(0, jnp.float32))
    return by_rows_backward.matmul_gated_silu_backward(dy, _joined(w_down_transposed), h, weight_of_row, plan, BACKWARD)


def _joined(w: QuantisedMatrices) -> QuantisedMatrices:
    """Returns a stack of layers' experts as one list: the plan says which of them are meant (`Plan.in_stack`)."""
    return QuantisedMatrices(*(part.reshape(-1, *part.shape[-2:]) for part in w))


def _tile(plan: Plan) -> TileShape:
    return FEW_ROWS if plan.max_pairs <= WGMMA_ROWS * plan.num_experts else WIDE
