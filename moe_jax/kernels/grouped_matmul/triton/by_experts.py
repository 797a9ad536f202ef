"""Each expert's own product of columns: out[e] = sum over the rows r of expert e of outer(a[r], b[r]).

Cost for R rows: 2*R*N*M FLOPs; each program sums all rows of one expert, so nothing is added up in memory.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from moe_jax.kernels.grouped_matmul.triton.launch import Tile, launch
from moe_jax.kernels.routing import Plan


def outer(
    a: Float[Array, "a_sources n"],
    b: Float[Array, "b_sources m"],
    plan: Plan,
    tile: Tile,
    dtype: jnp.dtype,
    *,
    a_source_of_row: Int[Array, "rows"] | None,
    b_source_of_row: Int[Array, "rows"] | None,
) -> Float[Array, "experts n m"]:
    """out[e] = a[rows of e].T @ b[rows of e], summed in f32 and rounded to `dtype` once; zeros for an expert without rows.

    Rows of no pair are not read.
    """
    n, m = a.shape[1], b.shape[1]
    sources = [plan.offsets if source is None else source for source in (a_source_of_row, b_source_of_row)]
    return launch(
        outer_kernel,
        (plan.offsets, plan.ends, *sources, a, b, a.shape[0], b.shape[0]),
        [jax.ShapeDtypeStruct((plan.num_experts, n, m), dtype)],
        plan.num_experts * -(-n // tile.rows) * -(-m // tile.columns),
        tile,
        n=n,
        m=m,
        gathers_a=a_source_of_row is not None,
        gathers_b=b_source_of_row is not None,
        tile_n=tile.rows,
        tile_m=tile.columns,
        step=tile.step,
    )[0]


@triton.jit
def outer_kernel(
    offsets,
    ends,
    a_source_of_row,
    b_source_of_row,
    a,
    b,
    num_a_sources,
    num_b_sources,
    out,
    n: tl.constexpr,
    m: tl.constexpr,
    gathers_a: tl.constexpr,
    gathers_b: tl.constexpr,
    tile_n: tl.constexpr,
    tile_m: tl.constexpr,
    step: tl.constexpr,
):
    """One tile of one expert's out [n, m]."""
    m_tiles: tl.constexpr = tl.cdiv(m, tile_m)
    tiles: tl.constexpr = tl.cdiv(n, tile_n) * m_tiles
    expert = tl.program_id(0) // tiles
    place = tl.program_id(0) % tiles
    n_column = place // m_tiles * tile_n + tl.arange(0, tile_n)
    m_column = place % m_tiles * tile_m + tl.arange(0, tile_m)
    total = tl.zeros((tile_n, tile_m), tl.float32)
    end = tl.load(ends + expert)
    for first in tl.range(tl.load(offsets + expert), end, step):
        row = first + tl.arange(0, step)
        a_rows = load_rows(a, a_source_of_row, row, end, num_a_sources, n_column, n, gathers_a, n % tile_n == 0)
        b_rows = load_rows(b, b_source_of_row, row, end, num_b_sources, m_column, m, gathers_b, m % tile_m == 0)
        total = tl.dot(tl.trans(a_rows), b_rows, total, input_precision="ieee")
    pointers = out + expert.to(tl.int64) * (n * m) + n_column[:, None] * m + m_column[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=(n_column < n)[:, None] & (m_column < m)[None, :])


@triton.jit
def load_rows(
    x,
    source_of_row,
    row,
    end,
    num_sources,
    column,
    width: tl.constexpr,
    gathers: tl.constexpr,
    all_columns: tl.constexpr,
):
    """x[source of row, column], zeros from row `end` on and where the source is none of x's rows."""
    is_read = row < end
    if gathers:
        source = tl.load(source_of_row + row, mask=is_read, other=-1)
        is_read = (source >= 0) & (source < num_sources)
    else:
        source = row
    mask = is_read[:, None] if all_columns else is_read[:, None] & (column < width)[None, :]
    return tl.load(x + source.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0)
