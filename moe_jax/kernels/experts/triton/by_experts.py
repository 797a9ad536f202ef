"""The outer products of each expert's rows: out[e] = sum over the rows r of expert e of outer(a[r], b[r]).

Cost for R rows: 2*R*N*M FLOPs; each program sums all rows of one expert, so nothing is accumulated in memory.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.experts.triton.launch import KernelCall, Tile, launch


def outer(
    a: Float[Array, "a_sources n"],
    b: Float[Array, "b_sources m"],
    plan: Plan,
    tile: Tile,
    dtype: jnp.dtype,
    *,
    a_source_of_row: Int[Array, "rows"] | None,
    b_source_of_row: Int[Array, "rows"] | None,
    accumulate_into: Float[Array, "experts n m"] | None = None,
) -> Float[Array, "experts n m"]:
    """Computes out[e] = a[rows of e].T @ b[rows of e], summed in f32 and rounded to `dtype` once.

    An expert without rows yields zeros. Rows without a pair are not read. With `accumulate_into`, f32 like `dtype`, the sums
    are added in place; the entry of an expert without rows is neither read nor written.
    """
    n, m = a.shape[1], b.shape[1]
    sources = [plan.offsets if source is None else source for source in (a_source_of_row, b_source_of_row)]
    added = plan.offsets if accumulate_into is None else accumulate_into
    constants = {
        "accumulates": accumulate_into is not None,
        "n": n,
        "m": m,
        "gathers_a": a_source_of_row is not None,
        "gathers_b": b_source_of_row is not None,
        "tile_n": tile.rows,
        "tile_m": tile.columns,
        "step": tile.step,
    }
    call = KernelCall(
        inputs=(plan.offsets, plan.ends, *sources, a, b, added, a.shape[0], b.shape[0]),
        outputs=[jax.ShapeDtypeStruct((plan.num_experts, n, m), dtype)],
        programs=plan.num_experts * -(-n // tile.rows) * -(-m // tile.columns),
        constants=constants,
        name="grouped_outer",
        in_place=None if accumulate_into is None else 6,
    )
    return launch(outer_kernel, call, tile)[0]


@triton.jit
def outer_kernel(
    offsets, ends, a_source_of_row, b_source_of_row, a, b, added, num_a_sources, num_b_sources, out,
    accumulates: tl.constexpr, n: tl.constexpr, m: tl.constexpr, gathers_a: tl.constexpr, gathers_b: tl.constexpr,
    tile_n: tl.constexpr, tile_m: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Triton kernel: computes one tile of one expert's out [n, m], or adds it to the same tile of `added`."""
    m_tiles: tl.constexpr = tl.cdiv(m, tile_m)
    tiles: tl.constexpr = tl.cdiv(n, tile_n) * m_tiles
    expert = tl.program_id(0) // tiles
    place = tl.program_id(0) % tiles
    n_column = place // m_tiles * tile_n + tl.arange(0, tile_n)
    m_column = place % m_tiles * tile_m + tl.arange(0, tile_m)
    total = tl.zeros((tile_n, tile_m), tl.float32)
    end = tl.load(ends + expert)
    begin = tl.load(offsets + expert)
    for first in tl.range(begin, end, step):
        row = first + tl.arange(0, step)
        a_rows = _load_rows(a, a_source_of_row, row, end, num_a_sources, n_column, n, gathers_a, n % tile_n == 0)
        b_rows = _load_rows(b, b_source_of_row, row, end, num_b_sources, m_column, m, gathers_b, m % tile_m == 0)
        total = tl.dot(tl.trans(a_rows), b_rows, total, input_precision="ieee")
    out_of_expert = (added if accumulates else out) + expert.to(tl.int64) * (n * m)
    if accumulates:
        if begin < end:
            add_tile(out_of_expert, total, n_column, place % m_tiles * tile_m, n, m)
    else:
        store_tile(out_of_expert, total, n_column, m_column, n, m, False)


@triton.jit
def add_tile(out, tile, n_column, first_m_column, n: tl.constexpr, m: tl.constexpr):
    """Adds `tile` to out in two halves of columns, so that registers hold it only once."""
    half: tl.constexpr = tile.shape[1] // 2
    left, right = tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, half)), (0, 2, 1)))
    m_column = first_m_column + tl.arange(0, half)
    store_tile(out, left, n_column, m_column, n, m, True)
    store_tile(out, right, n_column, m_column + half, n, m, True)


@triton.jit
def store_tile(out, tile, n_column, m_column, n: tl.constexpr, m: tl.constexpr, adds: tl.constexpr):
    """Stores `tile` at out[n_column, m_column], added to the old values if `adds`."""
    pointers = out + n_column[:, None] * m + m_column[None, :]
    mask = (n_column < n)[:, None] & (m_column < m)[None, :]
    if adds:
        tile += tl.load(pointers, mask=mask)
    tl.store(pointers, tile.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load_rows(
    x, source_of_row, row, end, num_sources, column,
    width: tl.constexpr, gathers: tl.constexpr, all_columns: tl.constexpr,
):  # fmt: skip
    """Loads x[source of row, column]; zeros from row `end` on and for sources outside x."""
    is_read = row < end
    if gathers:
        source = tl.load(source_of_row + row, mask=is_read, other=-1)
        is_read = (source >= 0) & (source < num_sources)
    else:
        source = row
    mask = is_read[:, None] if all_columns else is_read[:, None] & (column < width)[None, :]
    return tl.load(x + source.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0)
