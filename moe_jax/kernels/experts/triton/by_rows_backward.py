"""The gradient through an expert's second matrix and its activation, in one kernel.

With g = dy[source(r)] @ w_down[e], s = sigmoid(gate), act = gate * s * up and the row's top-k weight v:

    dgate = v * g * up * s * (1 + gate * (1 - s))      dup = v * g * gate * s
    weighted_act = v * act                             dv = <g, act>

Cost for R rows: 2*R*D*I FLOPs; besides the matmul's operands h [R, 2I] is read, dh [R, 2I] and weighted_act [R, I] written.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.experts.triton.by_rows import (
    add_products,
    row_kernel_call,
    rows_of_tile,
    sources_of_rows,
    store,
    with_change,
)
from moe_jax.kernels.experts.triton.launch import Tile, launch
from moe_jax.kernels.low_rank import RowsChange
from moe_jax.kernels.precision import sum_in_order


def matmul_gated_silu_backward(
    dy: Float[Array, "sources hidden"],
    w_down: Float[Array, "experts hidden inter"],
    h: Float[Array, "rows 2*inter"],
    weight_of_row: Float[Array, "rows"],
    plan: Plan,
    tile: Tile,
    *,
    source_of_row: Int[Array, "rows"] | None,
    change: RowsChange | None = None,
) -> tuple[Float[Array, "rows 2*inter"], Float[Array, "rows inter"], Float[Array, "rows"]]:
    """Returns dh and weighted_act in dy's dtype and dv in f32. Rows without a pair are left unwritten."""
    num_rows, inter = plan.num_rows, w_down.shape[2]
    column_tiles = -(-inter // tile.columns)
    outputs = [
        jax.ShapeDtypeStruct((num_rows, 2 * inter), dy.dtype),
        jax.ShapeDtypeStruct((num_rows, inter), dy.dtype),
        jax.ShapeDtypeStruct((column_tiles, num_rows), jnp.float32),
    ]
    call = with_change(row_kernel_call(dy, w_down, plan, tile, source_of_row, column_tiles=column_tiles), change, tile)
    call = call._replace(inputs=(*call.inputs, h, weight_of_row.astype(jnp.float32), num_rows)).extended(outputs, inter=inter)
    dh, weighted_act, dv = launch(matmul_gated_silu_backward_kernel, call, tile)
    return dh, weighted_act, sum_in_order(dv, axis=0)


@triton.jit
def matmul_gated_silu_backward_kernel(
    tile_expert,
    tile_row,
    tile_end,
    num_tiles,
    source_of_row,
    dy,
    w_down,
    num_sources,
    change,
    factor,
    h,
    weight_of_row,
    num_rows,
    dh,
    weighted_act,
    dv,
    inter: tl.constexpr,
    rank: tl.constexpr,
    rank_step: tl.constexpr,
    gathers: tl.constexpr,
    depth: tl.constexpr,
    column_tiles: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    step: tl.constexpr,
):
    """Computes a tile of weighted_act [rows, inter], both of its tiles of dh, and its share of dv [column_tiles, rows]."""
    i = tl.program_id(0) // column_tiles
    if i >= tl.load(num_tiles):
        return
    column_tile = tl.program_id(0) % column_tiles
    column = column_tile * tile_columns + tl.arange(0, tile_columns)
    row, is_own = rows_of_tile(tile_row, tile_end, i, tile_rows)
    expert = tl.load(tile_expert + i).to(tl.int64)
    source, is_read = sources_of_rows(source_of_row, row, num_sources, gathers)
    g = add_products(
        tl.zeros((tile_rows, tile_columns), tl.float32),
        dy + source.to(tl.int64)[:, None] * depth,
        w_down + expert * (inter * depth) + column[None, :],
        inter,
        column < inter,
        inter % tile_columns == 0,
        depth,
        step,
    )
    g = tl.where(is_read[:, None], g, 0.0) if gathers else g
    if rank > 0:
        g = add_products(
            g,
            change + row.to(tl.int64)[:, None] * rank,
            factor + expert * (inter * rank) + column[None, :],
            inter,
            column < inter,
            inter % tile_columns == 0,
            rank,
            rank_step,
        )

    # In halves: the gradients of a whole tile do not fit in the registers.
    half: tl.constexpr = tile_columns // 2
    g_left, g_right = tl.split(tl.permute(tl.reshape(g, (tile_rows, 2, half)), (0, 2, 1)))
    column = column_tile * tile_columns + tl.arange(0, half)
    v = tl.load(weight_of_row + row)
    dv_left = store_gradients(g_left, v, h, dh, weighted_act, row, is_own, column, inter)
    dv_right = store_gradients(g_right, v, h, dh, weighted_act, row, is_own, column + half, inter)
    tl.store(dv + column_tile.to(tl.int64) * num_rows + row, dv_left + dv_right, mask=is_own)


@triton.jit
def store_gradients(g, v, h, dh, weighted_act, row, is_own, column, inter: tl.constexpr):
    """Stores dh and weighted_act of a tile of g; returns its <g, act>."""
    long_row, is_column = row.to(tl.int64)[:, None], column < inter
    place_in_h = long_row * (2 * inter) + column[None, :]
    gate = tl.load(h + place_in_h, mask=is_column[None, :], other=0.0).to(tl.float32)
    up = tl.load(h + place_in_h + inter, mask=is_column[None, :], other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    silu = gate * sigmoid
    act = silu * up
    store(weighted_act + long_row * inter + column[None, :], v[:, None] * act, is_own, is_column)
    dact = v[:, None] * g
    store(dh + place_in_h, dact * up * (sigmoid + silu * (1 - sigmoid)), is_own, is_column)
    store(dh + place_in_h + inter, dact * silu, is_own, is_column)
    return tl.sum(g * act, axis=1)
