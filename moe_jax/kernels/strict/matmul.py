"""Rows times a matrix, x @ w.T, on Hopper: a row's bits depend on that row and the matrix alone.

Each result is one sum in f32 over k in order, in steps of 64, by one wgmma after the other. No sum is split. A sum of wgmma
depends on its operands alone (docs/performance.md), so tiles may be chosen by the number of rows.

Kernel `strict_matmul`:

    roles     producer WG2 (40 registers)    TMA x[row : row+rows, k : k+64], w[column : column+columns, k : k+64] -> slot
              consumers WG0, WG1 (232)       wgmma [warpgroup rows] x [warpgroup columns] x 64; then rounded and stored
    smem      x stages x rows x 64 | w stages x columns x 64, 16-bit | out 2 WG x 64 x at most 64 of the result's dtype
    barriers  full[slot] 2 TMA copies; empty[slot] 2 consumers (pipeline.py)
    time      few rows: w crosses memory once, through tiles of so few columns that every core has one
"""

from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moe_jax.kernels.experts.mosaic.tile_order import coord_in_order, rows_in_group
from moe_jax.kernels.hopper import target
from moe_jax.kernels.hopper.interpreter import is_interpreted
from moe_jax.kernels.hopper.launch import launch, operand_transforms
from moe_jax.kernels.hopper.mainloop import STEP, Step, TileProgram, TileShape, run_tiles
from moe_jax.kernels.hopper.pipeline import CONSUMERS, SHARED_MEMORY, WGMMA_ROWS, Pipeline

WIDTHS = (256, 128, 64, 32, 16)
"""Columns of a tile, the widest first: it is the fastest where every core has a tile of it."""

MOST_STAGES = 16

CHUNK = 64
"""Columns that are stored at a time, at most."""


class _Scratch(NamedTuple):
    """Shared memory. Swizzled buffers come first: each starts at a multiple of 1024 bytes."""

    x: Any
    w: Any
    out: Any
    pipe: Pipeline


@partial(jax.jit, static_argnames="out_dtype")
def matmul(x: Float[Array, "rows k"], *weights: Float[Array, "_ k"], out_dtype: DTypeLike) -> Float[Array, "rows n"]:
    """Returns x @ w.T, summed in f32 and rounded once to `out_dtype`; w is the weights, one below the other.

    Raises:
        ValueError: operands that are not 16-bit floats of one dtype, k no multiple of 64 or a matrix's n no multiple of 16.
    """
    rows, k = x.shape
    if {w.dtype for w in weights} != {x.dtype} or x.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"x and w must be bfloat16 or float16, all alike; got {x.dtype} and {[w.dtype for w in weights]}")
    if not k or k % STEP or any(w.shape[1] != k or not len(w) or len(w) % WIDTHS[-1] for w in weights):
        raise ValueError(
            f"x [rows, k] and w [n, k] must have k a multiple of {STEP} and n of {WIDTHS[-1]}; "
            f"got {x.shape} and {[w.shape for w in weights]}"
        )
    heights = tuple(len(w) for w in weights)
    if not rows:
        return jnp.zeros((0, sum(heights)), out_dtype)
    # Pallas copies fewer than 8 rows into a swizzled tile, or a multiple of 8.
    padded = jnp.pad(x, ((0, -rows % 8 if rows > 8 else 0), (0, 0)))
    return _matmul(padded, weights, jnp.dtype(out_dtype), tile_of(rows, heights))[:rows]


def tile_of(rows: int, heights: tuple[int, ...]) -> TileShape:
    """Returns the widest tile of which every core has one, or else the narrowest, with the stages that fit.

    Args:
        heights: rows of each matrix. No tile reads two matrices.
    """
    height = WGMMA_ROWS if rows <= WGMMA_ROWS or is_interpreted() else 2 * WGMMA_ROWS
    row_tiles = -(-rows // height)
    fitting = [width for width in WIDTHS if not any(n % width for n in heights[:-1])]
    if is_interpreted():
        # One tile for any number of rows: a CPU may sum products of another shape in another order.
        return TileShape(height, min(fitting[0], 128), 2)
    columns = next((width for width in fitting if row_tiles * -(-sum(heights) // width) >= target.num_cores()), fitting[-1])
    # Chunks of f32 on their way to memory, and barriers.
    rest = CONSUMERS * WGMMA_ROWS * CHUNK * 4 + 1024
    return TileShape(height, columns, min((SHARED_MEMORY - rest) // ((height + columns) * STEP * 2), MOST_STAGES))


def _matmul(x: Array, weights: tuple[Array, ...], out_dtype: jnp.dtype, tile: TileShape) -> Array:
    (rows, k), dtype = x.shape, x.dtype
    firsts = list(accumulate((len(w) for w in weights), initial=0))
    n = firsts[-1]
    row_tiles, column_tiles = -(-rows // tile.rows), -(-n // tile.columns)
    group, chunk = rows_in_group((n, k), dtype), min(CHUNK, tile.warpgroup_columns)

    def body(x_ref, weight_refs, out_ref, scratch: _Scratch):
        def locate(index):
            row, column = coord_in_order(index, row_tiles, column_tiles, group)
            return k // STEP, (row * tile.rows, column * tile.columns)

        def load(step: Step, full_barrier, kept):
            (row, column), ks = step.coord, pl.ds(step.k * STEP, STEP)
            # Rows and columns beyond the last are read as zeros.
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, tile.rows), ks], scratch.x.at[step.slot], full_barrier)

            def load_weight(w_ref, first):
                source = w_ref.at[pl.ds(column - first, tile.columns), ks]
                plgpu.copy_gmem_to_smem(source, scratch.w.at[step.slot], full_barrier)

            for w_ref, first, end in zip(weight_refs, firsts, firsts[1:], strict=False):
                pl.when((column >= first) & (column < end))(partial(load_weight, w_ref, first))

        def multiply(accumulator, step: Step, warpgroup):
            own_rows = pl.ds(tile.first_row(warpgroup), tile.warpgroup_rows)
            columns = pl.ds(tile.column_block(warpgroup) * tile.warpgroup_columns, tile.warpgroup_columns)
            own_w = scratch.w.at[step.slot, columns].transpose((1, 0))
            plgpu.wgmma(accumulator, scratch.x.at[step.slot, own_rows], own_w)

        def store(accumulator, coord, warpgroup):
            row = coord[0] + tile.first_row(warpgroup)
            column = coord[1] + tile.column_block(warpgroup) * tile.warpgroup_columns

            def store_chunk(first):
                staged = scratch.out.at[warpgroup]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                staged[...] = accumulator[:, first : first + chunk].astype(out_dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staged, out_ref.at[pl.ds(row, WGMMA_ROWS), pl.ds(column + first, chunk)])

            for first in range(0, tile.warpgroup_columns, chunk):
                pl.when((row < rows) & (column + first < n))(partial(store_chunk, first))

        program = TileProgram(locate=locate, load=load, multiply=multiply, epilogue=store)
        run_tiles(row_tiles * column_tiles, program, tile, scratch.pipe)

    swizzled = operand_transforms(dtype)
    # Rows of 16 bytes have no swizzle.
    of_results = operand_transforms(out_dtype, chunk) if chunk * out_dtype.itemsize > 16 else ()
    scratch = _Scratch(
        x=plgpu.SMEM((tile.stages, tile.rows, STEP), dtype, transforms=swizzled),
        w=plgpu.SMEM((tile.stages, tile.columns, STEP), dtype, transforms=swizzled),
        out=plgpu.SMEM((CONSUMERS, WGMMA_ROWS, chunk), out_dtype, transforms=of_results),
        pipe=tile.pipeline(copies=2),
    )
    outputs = [jax.ShapeDtypeStruct((rows, n), out_dtype)]
    (result,) = launch("strict_matmul", body, outputs, [scratch], warpgroups=CONSUMERS + 1)(x, weights)
    return result
