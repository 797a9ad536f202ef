"""Rows times their expert's matrix: out[r] = a[source(r)] @ w[e(r)].T or @ w[e(r)], with an activation on the sums.

One kernel computes the forward passes: a product, or with `gated` the activation of two. A matrix with a low-rank change adds
steps to the same sum: out[r] += c[r] @ factor[e(r)].T, or @ factor[e(r)]. The backward pass has its own kernel.

Cost for R rows: 2*R*K*N FLOPs; with tiles of 128 x 256, A and B cross from L2 R*N*K*(1/256 + 1/128) elements. Programs that run
at the same time are column tiles of neighbouring row tiles, mostly of one expert, whose matrix L2 keeps.

Rows and matrices may be in e4m3 with scales (`scaled`). A step of the loop is then a group of 128 summands, and a tile's 128
columns share a scale of w in each step. The tensor cores sum a group from zero, because they keep about 14 bits of a sum of FP8
products. The sum is scaled and added to an f32 total.

Imports `triton`, so it is itself imported only when a kernel is used.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.fp8 import quantise
from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedMatrices, QuantisedRows
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.experts.triton.launch import KernelCall, Tile, launch
from moe_jax.kernels.low_rank import RowsChange
from moe_jax.kernels.precision import sum_in_order

LEAST_MAXIMUM = tl.constexpr(float(quantise.LEAST_MAXIMUM))
INVERSE_LARGEST = tl.constexpr(float(quantise.INVERSE_LARGEST))


class TileOperands(NamedTuple):
    """The operands of a row kernel: rows, matrices, and optional scales, LoRA update and bias."""

    a: Float[Array, "sources k"] | QuantisedRows
    w: Float[Array, "experts ..."] | QuantisedMatrices
    """`QuantisedMatrices` may be a whole stack of layers, merged (`Plan.in_stack`); both are quantised, or neither is."""
    source_of_row: Int[Array, "rows"] | None = None
    change: RowsChange | None = None
    bias: Float[Array, "experts 2*inter"] | None = None
    """Added to the sums of `matmul_gated`."""


def matmul(operands: TileOperands, plan: Plan, tile: Tile, *, transpose: bool = False) -> Float[Array, "rows n"]:
    """Computes out[r] = a[source_of_row[r]] @ w[e].T, or @ w[e] with `transpose`. Rows without a pair are left unwritten."""
    columns = _values(operands.w).shape[2 if transpose else 1]
    call = _row_call("grouped_matmul", operands, plan, tile, columns, tile.columns, transpose=transpose)
    constants: Any = {"gated": False, "keep_h": False, "width": tile.columns}
    inputs, out = (*call.inputs, *call.inputs[:2]), jax.ShapeDtypeStruct((plan.num_rows, columns), _dtype(operands))
    return launch(matmul_kernel, _completed(call, [out], inputs, **constants), tile)[0]


def matmul_gated(
    operands: TileOperands, plan: Plan, tile: Tile, *, keep_h: bool, activation: Activation = SILU
) -> tuple[Float[Array, "rows 2*inter"] | None, Float[Array, "rows inter"] | QuantisedRows]:
    """Computes h = a @ w[e].T = [gate | up] and act = activation(gate, up).

    act is computed from the f32 sums before they are rounded to h. In FP8 it is rounded with a scale for 128 columns. Without
    `keep_h` h is None and not written.
    """
    scaled = isinstance(operands.a, QuantisedRows)
    columns, num_rows = _values(operands.w).shape[1], plan.num_rows
    inter, width = columns // 2, tile.columns if scaled else tile.columns // 2
    call = _row_call("gated_matmul", operands, plan, tile, inter, width, columns=columns)
    constants: Any = {"gated": True, "keep_h": keep_h, "width": width, "activation": activation}
    # The kernel has an argument for h even if it does not write h.
    outputs = [
        jax.ShapeDtypeStruct((num_rows, columns) if keep_h else (1,), _dtype(operands)),
        jax.ShapeDtypeStruct((num_rows, inter), _values(operands.a).dtype),
    ]
    if not scaled:
        call = _completed(call, outputs, (*call.inputs, call.inputs[0]), **constants)
        h, act = launch(matmul_kernel, call, tile)
        return h if keep_h else None, act
    outputs = [jax.ShapeDtypeStruct((inter // GROUP, num_rows), jnp.float32), *outputs]
    scales, h, act = launch(matmul_kernel, _completed(call, outputs, call.inputs, **constants), tile)
    return h if keep_h else None, QuantisedRows(act, scales)


def matmul_gated_backward(
    operands: TileOperands,
    h: Float[Array, "rows 2*inter"],
    weight_of_row: Float[Array, "rows"],
    plan: Plan,
    tile: Tile,
    activation: Activation = SILU,
) -> tuple[Float[Array, "rows 2*inter"], Float[Array, "rows inter"], Float[Array, "rows"]]:
    """Computes the gradients through the down matmul (`operands.w`) and the activation; `operands.a` is dy.

    With g = dy[source(r)] @ w_down[e] and the row's top-k weight v, returns dh and weighted_act = v * act in dy's dtype, and
    dv = <g, act> in f32. Rows without a pair are left unwritten. Besides the matmul's operands it reads h [R, 2I], and writes
    dh [R, 2I] and weighted_act [R, I].
    """
    (num_rows, columns), dtype = h.shape, _dtype(operands)
    inter = columns // 2
    outputs = [
        jax.ShapeDtypeStruct((num_rows, columns), dtype),
        jax.ShapeDtypeStruct((num_rows, inter), dtype),
        jax.ShapeDtypeStruct((-(-inter // tile.columns), num_rows), jnp.float32),
    ]
    call = _row_call("gated_matmul_backward", operands, plan, tile, inter, tile.columns, transpose=True)
    call = _completed(call, outputs, (*call.inputs, h, weight_of_row.astype(jnp.float32)), activation=activation)
    dh, weighted_act, dv = launch(matmul_gated_backward_kernel, call, tile)
    return dh, weighted_act, sum_in_order(dv, axis=0)


def _row_call(
    name: str,
    operands: TileOperands,
    plan: Plan,
    tile: Tile,
    outputs: int,
    width: int,
    *,
    columns: int | None = None,
    transpose: bool = False,
) -> KernelCall:
    """Builds the parts of a call that all kernels share: the inputs of the sums, the number of programs and the constants.

    The result has `outputs` columns, `width` a tile; w has `columns`, by default `outputs`.
    """
    a, w, source_of_row, change, bias = operands
    tiles = row_tiles(plan, tile.rows)
    # The kernels have arguments for arrays that they do not read.
    expert, nothing, *_ = tiles
    rank, more = 0, [nothing] * 2
    if isinstance(a, QuantisedRows):
        assert isinstance(w, QuantisedMatrices) and tile.step == tile.columns == GROUP
        tiles, more = (plan.in_stack(expert), *tiles[1:]), [a.scales, w.scales]
    elif change is not None:
        rank, more = change.rows.shape[1], list(change)
    source = nothing if source_of_row is None else source_of_row
    (sources, depth), column_tiles = _values(a).shape, -(-outputs // width)
    inputs = (*tiles, source, _values(a), _values(w), sources, *more, nothing if bias is None else bias, plan.num_rows)
    constants: dict[str, Any] = {
        "columns": columns or outputs,
        "transpose": transpose,
        "scaled": isinstance(a, QuantisedRows),
        "biased": bias is not None,
        "rank": rank,
        "rank_step": min(tile.step, triton.next_power_of_2(rank)) if rank else 0,
        "gathers": source_of_row is not None,
        "depth": depth,
        "column_tiles": column_tiles,
        "tile_rows": tile.rows,
        "tile_columns": tile.columns,
        "step": tile.step,
    }
    name = f"fp8_{name}" if constants["scaled"] else name
    return KernelCall(inputs, [], len(expert) * column_tiles, constants, name)


def _completed(
    call: KernelCall, outputs: list[jax.ShapeDtypeStruct], inputs: tuple, activation: Activation = SILU, **constants: Any
) -> KernelCall:
    of_activation = {"alpha": activation.alpha, "limit": activation.limit or 0.0, "offset": activation.offset}
    return call._replace(inputs=inputs, outputs=outputs, constants=call.constants | of_activation | constants)


def _values(of: Array | QuantisedRows | QuantisedMatrices) -> Array:
    return of.values if isinstance(of, (QuantisedRows, QuantisedMatrices)) else of


def _dtype(operands: TileOperands) -> jnp.dtype:
    return jnp.dtype(jnp.bfloat16) if isinstance(operands.a, QuantisedRows) else operands.a.dtype


def row_tiles(plan: Plan, height: int) -> tuple[Array, Array, Array, Array]:
    """Cuts each expert's rows into tiles of `height` rows; returns the first four inputs of a row kernel.

    These are each tile's expert, its first row and the row after its last, and [1] the number of tiles. Later entries are
    unused.
    """
    counts = plan.ends - plan.offsets[:-1]
    tiles = -(-counts // height)
    last = jnp.cumsum(tiles).astype(jnp.int32)
    # Each expert with rows ends with at most one tile that is not full.
    most = plan.max_pairs // height + min(plan.num_experts, plan.max_pairs)
    index = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.searchsorted(last, index, side="right", method="compare_all").astype(jnp.int32)
    expert = jnp.minimum(expert, plan.num_experts - 1)
    row = plan.offsets[expert] + (index - (last - tiles)[expert]) * height
    return expert, row, jnp.minimum(row + height, plan.ends[expert]), last[-1:]


@triton.jit
def matmul_kernel(
    tile_expert, tile_row, tile_end, num_tiles, source_of_row, a, w, num_sources, a_more, w_more, bias, num_rows,
    scales, h, out,
    gated: tl.constexpr, keep_h: tl.constexpr, width: tl.constexpr,
    alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr,
    columns: tl.constexpr, transpose: tl.constexpr, scaled: tl.constexpr, biased: tl.constexpr,
    rank: tl.constexpr, rank_step: tl.constexpr, gathers: tl.constexpr, depth: tl.constexpr,
    column_tiles: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Triton kernel: computes one tile of out [rows, columns]; w is [experts, columns, depth], or transposed.

    `gated`: computes one tile of out [rows, columns / 2], which is act, with `keep_h` both of its tiles of h, and with `scaled`
    its scales. `a_more` and `w_more` are a low-rank change, or with `scaled` the scales of a and w.
    """
    i = tl.program_id(0) // column_tiles
    if i >= tl.load(num_tiles):
        return
    column_tile = tl.program_id(0) % column_tiles
    outputs: tl.constexpr = columns // 2 if gated else columns
    row, is_own = rows_of_tile(tile_row, tile_end, i, tile_rows)
    expert = tl.load(tile_expert + i).to(tl.int64)
    source, is_read = sources_of_rows(source_of_row, row, num_sources, gathers)
    if scaled:
        a_rows = a + source.to(tl.int64)[:, None] * depth
        w_columns = w + expert * (columns * depth) + (column_tile * width + tl.arange(0, width))[None, :] * depth
        groups: tl.constexpr = depth // step
        a_scales = a_more + source
        w_scales = w_more + (expert * (columns // tile_columns) + column_tile) * groups
        total, up = _scaled_products(
            a_rows, w_columns, a_scales, w_scales, num_sources, gated, outputs, depth, tile_rows, tile_columns, step
        )
        total = tl.where(is_read[:, None], total, 0.0) if gathers else total
        if gated:
            up = tl.where(is_read[:, None], up, 0.0) if gathers else up
    else:
        # Columns of gated sums alternate between gate and up: in every layout of an accumulator one thread holds a pair.
        number = tl.arange(0, tile_columns)
        place = column_tile * width + (number // 2 if gated else number)
        total = _sums_of_tile(
            a, w, a_more, w_more, expert, row, source, is_read, number % 2 * outputs + place if gated else place,
            place < outputs, outputs % width == 0, columns, transpose, rank, rank_step, gathers, depth, step,
        )  # fmt: skip
        if biased:
            total += tl.load(bias + expert * columns + number % 2 * outputs + place, mask=place < outputs, other=0.0)[None, :]
        if gated:
            total, up = tl.split(tl.reshape(total, (tile_rows, width, 2)))
    # Made after the loop: columns that live through it cost registers, and `gated_matmul` spilled 40 bytes on Blackwell.
    column = column_tile * width + tl.arange(0, width)
    if gated:
        if keep_h:
            of_h = h + row.to(tl.int64)[:, None] * columns + column[None, :]
            store(of_h, total, is_own, column < outputs)
            store(of_h + outputs, up, is_own, column < outputs)
        total = activate(total, up, alpha, limit, offset)
        if scaled:
            total, scale = round_to_e4m3(total)
            tl.store(scales + column_tile * num_rows + row, scale, mask=is_own)
    store(out + row.to(tl.int64)[:, None] * outputs + column[None, :], total, is_own, column < outputs)


@triton.jit
def matmul_gated_backward_kernel(
    tile_expert, tile_row, tile_end, num_tiles, source_of_row, dy, w_down, num_sources, change, factor, bias, num_rows,
    h, weight_of_row, dh, weighted_act, dv,
    alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr,
    columns: tl.constexpr, transpose: tl.constexpr, scaled: tl.constexpr, biased: tl.constexpr,
    rank: tl.constexpr, rank_step: tl.constexpr, gathers: tl.constexpr, depth: tl.constexpr,
    column_tiles: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Computes a tile of weighted_act [rows, columns], both of its tiles of dh, and its share of dv [column_tiles, rows]."""
    i = tl.program_id(0) // column_tiles
    if i >= tl.load(num_tiles):
        return
    column_tile = tl.program_id(0) % column_tiles
    column = column_tile * tile_columns + tl.arange(0, tile_columns)
    row, is_own = rows_of_tile(tile_row, tile_end, i, tile_rows)
    expert = tl.load(tile_expert + i).to(tl.int64)
    source, is_read = sources_of_rows(source_of_row, row, num_sources, gathers)
    g = _sums_of_tile(
        dy, w_down, change, factor, expert, row, source, is_read, column,
        column < columns, columns % tile_columns == 0, columns, transpose, rank, rank_step, gathers, depth, step,
    )  # fmt: skip
    # In halves: the gradients of a whole tile do not fit in the registers.
    half: tl.constexpr = tile_columns // 2
    g_left, g_right = tl.split(tl.permute(tl.reshape(g, (tile_rows, 2, half)), (0, 2, 1)))
    column = column_tile * tile_columns + tl.arange(0, half)
    v = tl.load(weight_of_row + row)
    left = _store_gradients(g_left, v, h, dh, weighted_act, row, is_own, column, columns, alpha, limit, offset)
    right = _store_gradients(g_right, v, h, dh, weighted_act, row, is_own, column + half, columns, alpha, limit, offset)
    tl.store(dv + column_tile.to(tl.int64) * num_rows + row, left + right, mask=is_own)


@triton.jit
def _store_gradients(
    g, v, h, dh, weighted_act, row, is_own, column,
    inter: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr,
):  # fmt: skip
    """Stores dh and weighted_act of a tile of g; returns its <g, act>."""
    long_row, is_column = row.to(tl.int64)[:, None], column < inter
    place_in_h = long_row * (2 * inter) + column[None, :]
    gate = tl.load(h + place_in_h, mask=is_column[None, :], other=0.0).to(tl.float32)
    up = tl.load(h + place_in_h + inter, mask=is_column[None, :], other=0.0).to(tl.float32)
    act, dgate, dup = activation_gradients(gate, up, v[:, None] * g, alpha, limit, offset)
    store(weighted_act + long_row * inter + column[None, :], v[:, None] * act, is_own, is_column)
    store(dh + place_in_h, dgate, is_own, is_column)
    store(dh + place_in_h + inter, dup, is_own, is_column)
    return tl.sum(g * act, axis=1)


@triton.jit
def activate(gate, up, alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr):
    """Computes `Activation.forward` in a Triton kernel; limit 0 means no limit."""
    if limit > 0:
        gate, up = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
    return gate / (1 + tl.exp(-(gate if alpha == 1 else alpha * gate))) * (up if offset == 0 else up + offset)


@triton.jit
def activation_gradients(gate, up, dact, alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr):
    """Computes act, dgate and dup (`Activation.vjp`) in a Triton kernel."""
    g, u = gate, up
    if limit > 0:
        g, u = tl.minimum(gate, limit), tl.maximum(tl.minimum(up, limit), -limit)
    sigmoid = 1 / (1 + tl.exp(-(g if alpha == 1 else alpha * g)))
    swish = g * sigmoid
    factor = u if offset == 0 else u + offset
    dgate = dact * factor * (sigmoid + (swish if alpha == 1 else alpha * swish) * (1 - sigmoid))
    dup = dact * swish
    if limit > 0:
        dgate, dup = tl.where(gate <= limit, dgate, 0.0), tl.where(tl.abs(up) <= limit, dup, 0.0)
    return swish * factor, dgate, dup


@triton.jit
def _sums_of_tile(
    a, w, change, factor, expert, row, source, is_read, column, is_column, all_columns: tl.constexpr,
    columns: tl.constexpr, transpose: tl.constexpr, rank: tl.constexpr, rank_step: tl.constexpr,
    gathers: tl.constexpr, depth: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Returns the products of rows with columns [tile_columns] of an expert's matrix, plus its change."""
    w_stride: tl.constexpr = columns if transpose else 1
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    w_columns = w + expert * (columns * depth) + column[None, :] * (1 if transpose else depth)
    total = add_products(
        total, a + source.to(tl.int64)[:, None] * depth, w_columns, w_stride, is_column, all_columns, depth, step
    )
    total = tl.where(is_read[:, None], total, 0.0) if gathers else total
    if rank > 0:
        rows = change + row.to(tl.int64)[:, None] * rank
        w_columns = factor + expert * (columns * rank) + column[None, :] * (1 if transpose else rank)
        total = add_products(total, rows, w_columns, w_stride, is_column, all_columns, rank, rank_step)
    return total


@triton.jit
def _scaled_products(
    a_rows, w_columns, a_scales, w_scales, num_sources,
    gated: tl.constexpr, inter: tl.constexpr, depth: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Returns the products of rows with columns of w, both in e4m3, and with `gated` also with the columns `inter` later."""
    groups: tl.constexpr = depth // step
    k = tl.arange(0, step)
    a_pointers, w_pointers = a_rows + k[None, :], w_columns + k[:, None]
    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    up = tl.zeros((tile_rows, tile_columns), tl.float32)
    for group in range(0, groups):
        a_step = tl.load(a_pointers)
        a_scale = tl.load(a_scales + group * num_sources)
        sums = tl.dot(a_step, tl.load(w_pointers))
        total += (a_scale * tl.load(w_scales + group))[:, None] * sums
        if gated:
            sums = tl.dot(a_step, tl.load(w_pointers + inter * depth))
            up += (a_scale * tl.load(w_scales + inter // tile_columns * groups + group))[:, None] * sums
        a_pointers += step
        w_pointers += step
    return total, up


@triton.jit
def round_to_e4m3(x):
    """Quantizes x to e4m3 with one scale per row, bit for bit as in `quantise`."""
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), LEAST_MAXIMUM) * INVERSE_LARGEST
    return (x * tl.div_rn(1.0, scale)[:, None]).to(tl.float8e4nv), scale


@triton.jit
def rows_of_tile(tile_row, tile_end, i, tile_rows: tl.constexpr):
    """Returns the rows of tile i and a mask of valid ones; others repeat the last row, so loads need no mask."""
    row = tl.load(tile_row + i) + tl.arange(0, tile_rows)
    end = tl.load(tile_end + i)
    return tl.minimum(row, end - 1), row < end


@triton.jit
def sources_of_rows(source_of_row, row, num_sources, gathers: tl.constexpr):
    """Returns the index in `a` of each row, and a mask of indices inside `a`.

    A row outside `a` reads row 0, and its sums must be replaced by zeros.
    """
    source = tl.load(source_of_row + row) if gathers else row
    is_read = (source >= 0) & (source < num_sources)
    return tl.where(is_read, source, 0) if gathers else source, is_read


@triton.jit
def add_products(
    total, a_rows, w_columns, w_stride: tl.constexpr, is_column,
    all_columns: tl.constexpr, depth: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Accumulates a matmul over the contracted axis into `total` [tile_rows, tile_columns], in f32, in fixed order.

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
    """Stores values under a mask, rounded to the dtype of `pointers`."""
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
