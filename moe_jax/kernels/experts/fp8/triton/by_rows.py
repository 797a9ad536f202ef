"""Rows times their expert's matrix, both in e4m3 with scales: out[r] = a[r] @ w[e(r)].T, with silu(gate) * up on the sums.

Cost for R rows: 2*R*K*N FLOPs. With tiles of 128 x 128, a and w cross from L2 R*N*K*(1/128 + 1/128) bytes.

A step of the loop is a group of 128 summands. The tensor cores sum its products from zero, for they keep about 14 bits of a sum
of FP8 products. The sum is scaled and added to an f32 total. A tile's 128 columns share a scale in each step.

Imports `triton`, so it is itself imported only when a kernel is asked for.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, BFloat16, Int

from moe_jax.kernels.experts.fp8 import quantise
from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedMatrices, QuantisedRows
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.experts.triton.by_rows import row_kernel_call, rows_of_tile, sources_of_rows, store
from moe_jax.kernels.experts.triton.launch import KernelCall, Tile, launch

LEAST_MAXIMUM = tl.constexpr(float(quantise.LEAST_MAXIMUM))
INVERSE_LARGEST = tl.constexpr(float(quantise.INVERSE_LARGEST))


def matmul(rows: QuantisedRows, w: QuantisedMatrices, plan: Plan, tile: Tile) -> BFloat16[Array, "rows n"]:
    """Computes out[r] = rows[r] @ w[e].T. Rows without a pair are left unwritten."""
    columns = w.values.shape[1]
    outputs = [jax.ShapeDtypeStruct((plan.num_rows, columns), jnp.bfloat16)]
    call = _kernel_call(rows, w, plan, tile, None, columns)
    return launch(fp8_matmul_kernel, call.extended(outputs, columns=columns), tile)[0]


def matmul_gated_silu(
    tokens: QuantisedRows, w: QuantisedMatrices, plan: Plan, tile: Tile, *, keep_h: bool
) -> tuple[BFloat16[Array, "rows 2*inter"] | None, QuantisedRows]:
    """Computes h[r] = tokens[token of r] @ w[e].T = [gate | up] and act = silu(gate) * up.

    act comes from the f32 sums, and is rounded with a scale for 128 columns. Without `keep_h` h is None and not written.
    """
    inter, num_rows = w.values.shape[1] // 2, plan.num_rows
    outputs = [
        # The kernel has an argument for h even if it does not write h.
        jax.ShapeDtypeStruct((num_rows, 2 * inter) if keep_h else (1,), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_rows, inter), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((inter // GROUP, num_rows), jnp.float32),
    ]
    call = _kernel_call(tokens, w, plan, tile, plan.token_of_row, inter)
    call = call._replace(inputs=(*call.inputs, num_rows)).extended(outputs, inter=inter, keep_h=keep_h)
    h, act, scales = launch(fp8_matmul_gated_silu_kernel, call, tile)
    return h if keep_h else None, QuantisedRows(act, scales)


def _kernel_call(
    rows: QuantisedRows,
    w: QuantisedMatrices,
    plan: Plan,
    tile: Tile,
    source_of_row: Int[Array, "rows"] | None,
    columns: int,
) -> KernelCall:
    """Builds the part of a call that both kernels share. `columns` are those of all tiles; w may be a stack of layers."""
    assert tile.step == tile.columns == GROUP
    call = row_kernel_call(rows.values, w.values, plan, tile, source_of_row, column_tiles=columns // GROUP)
    expert, *others = call.inputs
    return call._replace(inputs=(plan.in_stack(expert), *others, rows.scales, w.scales))


@triton.jit
def fp8_matmul_kernel(
    tile_expert,
    tile_row,
    tile_end,
    num_tiles,
    source_of_row,
    a,
    w,
    num_sources,
    a_scales,
    w_scales,
    out,
    columns: tl.constexpr,
    gathers: tl.constexpr,
    depth: tl.constexpr,
    column_tiles: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    step: tl.constexpr,
):
    """Computes one tile of out [rows, columns]; w is [experts, columns, depth], its scales [experts, column_tiles, groups]."""
    i = tl.program_id(0) // column_tiles
    if i >= tl.load(num_tiles):
        return
    groups: tl.constexpr = depth // step
    column_tile = tl.program_id(0) % column_tiles
    column, k = column_tile * tile_columns + tl.arange(0, tile_columns), tl.arange(0, step)
    row, is_own = rows_of_tile(tile_row, tile_end, i, tile_rows)
    expert = tl.load(tile_expert + i).to(tl.int64)
    source, is_read = sources_of_rows(source_of_row, row, num_sources, gathers)
    a_pointers = a + source.to(tl.int64)[:, None] * depth + k[None, :]
    w_pointers = w + expert * (columns * depth) + column[None, :] * depth + k[:, None]
    w_scale = w_scales + (expert * column_tiles + column_tile) * groups
    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for group in range(0, groups):
        a_scale = tl.load(a_scales + group * num_sources + source)
        sums = tl.dot(tl.load(a_pointers), tl.load(w_pointers))
        total += (a_scale * tl.load(w_scale + group))[:, None] * sums
        a_pointers += step
        w_pointers += step
    store(out + row.to(tl.int64)[:, None] * columns + column[None, :], total, is_own, column < columns)


@triton.jit
def fp8_matmul_gated_silu_kernel(
    tile_expert,
    tile_row,
    tile_end,
    num_tiles,
    source_of_row,
    a,
    w,
    num_sources,
    a_scales,
    w_scales,
    num_rows,
    h,
    act,
    act_scales,
    inter: tl.constexpr,
    keep_h: tl.constexpr,
    gathers: tl.constexpr,
    depth: tl.constexpr,
    column_tiles: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    step: tl.constexpr,
):
    """Computes one tile of act [rows, inter], its scales, and with `keep_h` both of its tiles of h."""
    i = tl.program_id(0) // column_tiles
    if i >= tl.load(num_tiles):
        return
    groups: tl.constexpr = depth // step
    column_tile = tl.program_id(0) % column_tiles
    column, k = column_tile * tile_columns + tl.arange(0, tile_columns), tl.arange(0, step)
    row, is_own = rows_of_tile(tile_row, tile_end, i, tile_rows)
    expert = tl.load(tile_expert + i).to(tl.int64)
    source, is_read = sources_of_rows(source_of_row, row, num_sources, gathers)
    a_pointers = a + source.to(tl.int64)[:, None] * depth + k[None, :]
    w_pointers = w + expert * (2 * inter * depth) + column[None, :] * depth + k[:, None]
    w_scale = w_scales + (expert * (2 * column_tiles) + column_tile) * groups
    gate = tl.zeros((tile_rows, tile_columns), tl.float32)
    up = tl.zeros((tile_rows, tile_columns), tl.float32)
    for group in range(0, groups):
        a_step = tl.load(a_pointers)
        a_scale = tl.load(a_scales + group * num_sources + source)
        sums = tl.dot(a_step, tl.load(w_pointers))
        gate += (a_scale * tl.load(w_scale + group))[:, None] * sums
        sums = tl.dot(a_step, tl.load(w_pointers + inter * depth))
        up += (a_scale * tl.load(w_scale + column_tiles * groups + group))[:, None] * sums
        a_pointers += step
        w_pointers += step
    gate = tl.where(is_read[:, None], gate, 0.0) if gathers else gate
    up = tl.where(is_read[:, None], up, 0.0) if gathers else up
    if keep_h:
        place = h + row.to(tl.int64)[:, None] * (2 * inter) + column[None, :]
        store(place, gate, is_own, column < inter)
        store(place + inter, up, is_own, column < inter)
    values, scale = round_to_e4m3(gate / (1 + tl.exp(-gate)) * up)
    store(act + row.to(tl.int64)[:, None] * inter + column[None, :], values, is_own, column < inter)
    tl.store(act_scales + column_tile * num_rows + row, scale, mask=is_own)


@triton.jit
def round_to_e4m3(x):
    """Returns x in e4m3 and the scale of each row, by the rule and with the bits of `quantise`."""
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), LEAST_MAXIMUM) * INVERSE_LARGEST
    return (x * tl.div_rn(1.0, scale)[:, None]).to(tl.float8e4nv), scale
