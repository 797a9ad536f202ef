"""Rows times their expert's matrix: out[r] = a[source(r)] @ w[e(r)].T or @ w[e(r)], with silu(gate) * up on the sums.

A matrix with a low-rank change takes further steps of the same sum: out[r] += c[r] @ factor[e(r)].T, or @ factor[e(r)].

Cost for R rows: 2*R*K*N FLOPs; with tiles of 128 x 256, A and B cross from L2 R*N*K*(1/256 + 1/128) elements. Programs that run
at the same time are column tiles of neighbouring row tiles, mostly of one expert, whose matrix L2 keeps.

Imports `triton`, so it is itself imported only when a kernel is asked for.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.experts.triton.launch import KernelCall, Tile, launch
from moe_jax.kernels.low_rank import RowsChange


def matmul(
    a: Float[Array, "sources k"],
    w: Float[Array, "experts ..."],
    plan: Plan,
    tile: Tile,
    *,
    source_of_row: Int[Array, "rows"] | None,
    transpose: bool,
    change: RowsChange | None = None,
) -> Float[Array, "rows n"]:
    """Computes out[r] = a[source_of_row[r]] @ w[e].T, or @ w[e] with `transpose`. Rows without a pair are left unwritten."""
    columns = w.shape[2] if transpose else w.shape[1]
    outputs = [jax.ShapeDtypeStruct((plan.num_rows, columns), a.dtype)]
    call = row_kernel_call(a, w, plan, tile, source_of_row, column_tiles=-(-columns // tile.columns))
    call = with_change(call, change, tile)
    return launch(matmul_kernel, call.extended(outputs, columns=columns, transpose=transpose), tile)[0]


def matmul_gated_silu(
    a: Float[Array, "sources k"],
    w: Float[Array, "experts 2*inter k"],
    plan: Plan,
    tile: Tile,
    *,
    source_of_row: Int[Array, "rows"] | None,
    keep_h: bool,
    change: RowsChange | None = None,
) -> tuple[Float[Array, "rows 2*inter"] | None, Float[Array, "rows inter"]]:
    """Computes h = a @ w[e].T = [gate | up] and act = silu(gate) * up.

    act comes from the f32 sums before they are rounded to h. Without `keep_h` h is None and not written.
    """
    inter = w.shape[1] // 2
    # The kernel has an argument for h even if it does not write h.
    h_shape = (plan.num_rows, 2 * inter) if keep_h else (1,)
    outputs = [jax.ShapeDtypeStruct(shape, a.dtype) for shape in (h_shape, (plan.num_rows, inter))]
    column_tiles = -(-inter // (tile.columns // 2))
    call = with_change(row_kernel_call(a, w, plan, tile, source_of_row, column_tiles=column_tiles), change, tile)
    h, act = launch(matmul_gated_silu_kernel, call.extended(outputs, inter=inter, keep_h=keep_h), tile)
    return h if keep_h else None, act


def row_kernel_call(
    a: Array, w: Array, plan: Plan, tile: Tile, source_of_row: Array | None, *, column_tiles: int
) -> KernelCall:
    """Builds the part of a call that all kernels by rows share: the first inputs, the number of programs and the constants."""
    tiles = row_tiles(plan, tile.rows)
    gathers = source_of_row is not None
    inputs = (*tiles, source_of_row if gathers else tiles.row, a, w, a.shape[0])
    constants = {
        "gathers": gathers,
        "depth": a.shape[1],
        "column_tiles": column_tiles,
        "tile_rows": tile.rows,
        "tile_columns": tile.columns,
        "step": tile.step,
    }
    return KernelCall(inputs, [], tiles.expert.shape[0] * column_tiles, constants)


def with_change(call: KernelCall, change: RowsChange | None, tile: Tile) -> KernelCall:
    """Adds the inputs and constants of a low-rank change; its rank is 0 without one."""
    if change is None:
        # The kernel has arguments for a change even if it reads none.
        nothing = call.inputs[0]
        return call._replace(inputs=(*call.inputs, nothing, nothing), constants=call.constants | {"rank": 0, "rank_step": 0})
    rank = change.rows.shape[1]
    constants = {"rank": rank, "rank_step": min(tile.step, triton.next_power_of_2(rank))}
    return call._replace(inputs=(*call.inputs, *change), constants=call.constants | constants)


class TilesOfRows(NamedTuple):
    """The first four inputs of a kernel by rows; entries from `num_tiles` on are unused."""

    expert: Int[Array, "tiles"]
    row: Int[Array, "tiles"]
    """The first row of each tile."""
    end: Int[Array, "tiles"]
    """The row behind the last row of each tile."""
    num_tiles: Int[Array, "1"]


def row_tiles(plan: Plan, height: int) -> TilesOfRows:
    """Cuts each expert's pairs into tiles of `height` rows."""
    counts = plan.ends - plan.offsets[:-1]
    tiles = -(-counts // height)
    last = jnp.cumsum(tiles).astype(jnp.int32)
    # Each expert with rows ends with at most one tile that is not full.
    most = plan.max_pairs // height + min(plan.num_experts, plan.max_pairs)
    index = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.searchsorted(last, index, side="right", method="compare_all").astype(jnp.int32)
    expert = jnp.minimum(expert, plan.num_experts - 1)
    row = plan.offsets[expert] + (index - (last - tiles)[expert]) * height
    return TilesOfRows(expert, row, jnp.minimum(row + height, plan.ends[expert]), last[-1:])


@triton.jit
def matmul_kernel(
    tile_expert,
    tile_row,
    tile_end,
    num_tiles,
    source_of_row,
    a,
    w,
    num_sources,
    change,
    factor,
    out,
    columns: tl.constexpr,
    transpose: tl.constexpr,
    rank: tl.constexpr,
    rank_step: tl.constexpr,
    gathers: tl.constexpr,
    depth: tl.constexpr,
    column_tiles: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    step: tl.constexpr,
):
    """Computes one tile of out [rows, columns]; w is [experts, columns, depth], with `transpose` [experts, depth, columns]."""
    i = tl.program_id(0) // column_tiles
    if i >= tl.load(num_tiles):
        return
    column = tl.program_id(0) % column_tiles * tile_columns + tl.arange(0, tile_columns)
    row, is_own = rows_of_tile(tile_row, tile_end, i, tile_rows)
    expert = tl.load(tile_expert + i).to(tl.int64)
    source, is_read = sources_of_rows(source_of_row, row, num_sources, gathers)
    total = add_products(
        tl.zeros((tile_rows, tile_columns), tl.float32),
        a + source.to(tl.int64)[:, None] * depth,
        w + expert * (columns * depth) + column[None, :] * (1 if transpose else depth),
        columns if transpose else 1,
        column < columns,
        columns % tile_columns == 0,
        depth,
        step,
    )
    total = tl.where(is_read[:, None], total, 0.0) if gathers else total
    if rank > 0:
        total = add_products(
            total,
            change + row.to(tl.int64)[:, None] * rank,
            factor + expert * (columns * rank) + column[None, :] * (1 if transpose else rank),
            columns if transpose else 1,
            column < columns,
            columns % tile_columns == 0,
            rank,
            rank_step,
        )
    store(out + row.to(tl.int64)[:, None] * columns + column[None, :], total, is_own, column < columns)


@triton.jit
def matmul_gated_silu_kernel(
    tile_expert,
    tile_row,
    tile_end,
    num_tiles,
    source_of_row,
    a,
    w,
    num_sources,
    change,
    factor,
    h,
    act,
    inter: tl.constexpr,
    keep_h: tl.constexpr,
    rank: tl.constexpr,
    rank_step: tl.constexpr,
    gathers: tl.constexpr,
    depth: tl.constexpr,
    column_tiles: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    step: tl.constexpr,
):
    """Computes one tile of act [rows, inter] and, with `keep_h`, both of its tiles of h.

    Columns of the sums alternate between gate and up: in every layout of an accumulator one thread holds both of a pair.
    """
    i = tl.program_id(0) // column_tiles
    if i >= tl.load(num_tiles):
        return
    half: tl.constexpr = tile_columns // 2
    first = tl.program_id(0) % column_tiles * half
    pair = tl.arange(0, tile_columns)
    row, is_own = rows_of_tile(tile_row, tile_end, i, tile_rows)
    expert = tl.load(tile_expert + i).to(tl.int64)
    source, is_read = sources_of_rows(source_of_row, row, num_sources, gathers)
    total = add_products(
        tl.zeros((tile_rows, tile_columns), tl.float32),
        a + source.to(tl.int64)[:, None] * depth,
        w + expert * (2 * inter * depth) + (pair % 2 * inter + first + pair // 2)[None, :] * depth,
        1,
        first + pair // 2 < inter,
        inter % half == 0,
        depth,
        step,
    )
    total = tl.where(is_read[:, None], total, 0.0) if gathers else total
    if rank > 0:
        total = add_products(
            total,
            change + row.to(tl.int64)[:, None] * rank,
            factor + expert * (2 * inter * rank) + (pair % 2 * inter + first + pair // 2)[None, :] * rank,
            1,
            first + pair // 2 < inter,
            inter % half == 0,
            rank,
            rank_step,
        )
    gate, up = tl.split(tl.reshape(total, (tile_rows, half, 2)))
    column = first + tl.arange(0, half)
    if keep_h:
        place = h + row.to(tl.int64)[:, None] * (2 * inter) + column[None, :]
        store(place, gate, is_own, column < inter)
        store(place + inter, up, is_own, column < inter)
    place = act + row.to(tl.int64)[:, None] * inter + column[None, :]
    store(place, gate / (1 + tl.exp(-gate)) * up, is_own, column < inter)


@triton.jit
def rows_of_tile(tile_row, tile_end, i, tile_rows: tl.constexpr):
    """Returns the rows of tile i and a mask of its expert's rows; the others repeat the last, so that loads need no mask."""
    row = tl.load(tile_row + i) + tl.arange(0, tile_rows)
    end = tl.load(tile_end + i)
    return tl.minimum(row, end - 1), row < end


@triton.jit
def sources_of_rows(source_of_row, row, num_sources, gathers: tl.constexpr):
    """Returns each row's place in `a` and a mask of rows that lie in `a`.

    A row outside `a` reads row 0, and its sums must be replaced by zeros.
    """
    source = tl.load(source_of_row + row) if gathers else row
    is_read = (source >= 0) & (source < num_sources)
    return tl.where(is_read, source, 0) if gathers else source, is_read


@triton.jit
def add_products(
    total,
    a_rows,
    w_columns,
    w_stride: tl.constexpr,
    is_column,
    all_columns: tl.constexpr,
    depth: tl.constexpr,
    step: tl.constexpr,
):
    """Adds sums over depth to `total` [tile_rows, tile_columns], in f32 and in one order.

    `a_rows` [tile_rows, 1] and `w_columns` [1, tile_columns] point at the first summands; the next are 1 and `w_stride` away.
    """
    k = tl.arange(0, step)
    a_pointers = a_rows + k[None, :]
    w_pointers = w_columns + k[:, None] * w_stride
    for first in range(0, depth, step):
        if depth % step == 0:
            a_step = tl.load(a_pointers)
            w_step = tl.load(w_pointers) if all_columns else tl.load(w_pointers, mask=is_column[None, :], other=0.0)
        else:
            is_k = first + k < depth
            a_step = tl.load(a_pointers, mask=is_k[None, :], other=0.0)
            w_step = tl.load(w_pointers, mask=is_k[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(a_step, w_step, total, input_precision="ieee")
        a_pointers += step
        w_pointers += step * w_stride
    return total


@triton.jit
def store(pointers, values, is_row, is_column):
    """Stores values, rounded to the dtype of `pointers`."""
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
