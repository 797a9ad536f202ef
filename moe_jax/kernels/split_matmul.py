"""Rows times a matrix, x @ w.T, on Hopper, as partial sums over parts of the summands, or as their sum.

Each partial sum is one f32 sum over its part of k in order, by consecutive wgmmas. Its bounds depend only on k and the number
of parts. The parts are written for the reader to add, or added in registers from the first to the last. Both yield the same
bits if the reader starts with the first part.

Kernels `project_tokens` and `strict_matmul`, named by their callers:

    roles     producer WG2 (40 registers)    TMA x[row : row+rows, k : k+64], w[column : column+columns, k : k+64] -> slot
              consumers WG0, WG1 (232)       wgmma [warpgroup rows] x [warpgroup columns] x 64; then stored
    registers added parts: an accumulator and the sum of earlier parts, 64 + 64 per thread in tiles of 128 x 128
    smem      x stages x rows x 64 | w stages x columns x 64, 16-bit | out 2 WG x 2 x 64 rows x at most 128 bytes
    barriers  full[slot] 2 TMA copies; empty[slot] 2 consumers (pipeline.py)
    invariant a chunk of `out` is overwritten only after the previous TMA store has read it
    time      few rows: w crosses memory once. Every core has a part of it, and most of its loads start at once
"""

import math
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.experts.mosaic.tile_order import coord_in_order, rows_in_group
from moe_jax.kernels.hopper.launch import Named, launch, operand_transforms
from moe_jax.kernels.hopper.mainloop import STEP, Step, TileProgram, TileShape, first_step, run_tiles
from moe_jax.kernels.hopper.pipeline import CONSUMERS, SHARED_MEMORY, WGMMA_ROWS

CHUNK = 32
"""Maximum columns of a result stored at a time: the widest swizzle has rows of 128 bytes."""

WIDTHS = (256, 128, 64, 32, 16)
"""Columns of a tile, the widest first: it is the fastest if every core has one."""

MOST_STAGES = 16


def refusal(x: Float[Array, "rows k"], weights: tuple[Float[Array, "_ _"], ...]) -> str | None:
    """Returns why the kernel does not support these operands, with the supported ones; None if it does."""
    if {w.dtype for w in weights} != {x.dtype} or x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x and w must be bfloat16 or float16, all alike; got {x.dtype} and {[w.dtype for w in weights]}"
    k = x.shape[1]
    if not k or k % STEP or any(w.shape[1] != k or not len(w) or len(w) % WIDTHS[-1] for w in weights):
        return (
            f"x [rows, k] and w [n, k] must have k a multiple of {STEP} and n of {WIDTHS[-1]}; "
            f"got {x.shape} and {[w.shape for w in weights]}"
        )
    return None


def stages_of(rows: int, columns: int) -> int:
    """Returns how many pipeline stages of a tile fit in shared memory."""
    rest = CONSUMERS * 2 * WGMMA_ROWS * CHUNK * 4 + 1024
    return min((SHARED_MEMORY - rest) // ((rows + columns) * STEP * 2), MOST_STAGES)


def split_matmul(
    name: str,
    x: Float[Array, "rows k"],
    weights: tuple[Float[Array, "_ k"], ...],
    tile: TileShape,
    splits: int,
    *,
    adds_splits: bool = False,
) -> Float[Array, "splits rows n"]:
    """Computes x @ w.T as `splits` partial sums over k (split-K); w stacks the weights' rows.

    Parts are equal, or differ by one step of 64.

    Args:
        name: of the kernel, in profiles.
        tile: its columns divide the rows of each matrix except the last. No tile reads two matrices.
        adds_splits: the result is [1, rows, n], the sum of the parts from the first to the last.
    """
    written = 1 if adds_splits else splits
    num_rows = len(x)
    # Pallas copies fewer than 8 rows into a swizzled tile, or a multiple of 8.
    x = jnp.pad(x, ((0, -num_rows % 8 if num_rows > 8 else 0), (0, 0)))
    (rows, k), dtype, steps = x.shape, x.dtype, x.shape[1] // STEP
    firsts = list(accumulate((len(w) for w in weights), initial=0))
    n = firsts[-1]
    row_tiles, column_tiles = -(-rows // tile.rows), -(-n // tile.columns)
    # TMA requires rows of whole chunks in the array that it stores to.
    chunk = math.gcd(CHUNK, tile.warpgroup_columns, n)
    group = rows_in_group((n, k), dtype)

    def body(x_ref, weight_refs, out_ref, scratch: Named):
        def locate(index):
            split, index = lax.rem(index, jnp.int32(written)), lax.div(index, jnp.int32(written))
            row, column = coord_in_order(index, row_tiles, column_tiles, group)
            first, end = (first_step(part, steps, written) for part in (split, split + 1))
            return end - first, Named(split=split, first_step=first, row=row * tile.rows, column=column * tile.columns)

        def load(step: Step, full_barrier, kept):
            coord, ks = step.coord, pl.ds((step.coord.first_step + step.k) * STEP, STEP)
            # Rows and columns past the last are read as zeros.
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(coord.row, tile.rows), ks], scratch.x.at[step.slot], full_barrier)

            def load_weight(w_ref, first):
                source = w_ref.at[pl.ds(coord.column - first, tile.columns), ks]
                plgpu.copy_gmem_to_smem(source, scratch.w.at[step.slot], full_barrier)

            for w_ref, first, end in zip(weight_refs, firsts, firsts[1:], strict=False):
                pl.when((coord.column >= first) & (coord.column < end))(partial(load_weight, w_ref, first))

        def multiply(accumulator, step: Step, warpgroup):
            own_rows = pl.ds(tile.first_row(warpgroup), tile.warpgroup_rows)
            columns = pl.ds(tile.column_block(warpgroup) * tile.warpgroup_columns, tile.warpgroup_columns)
            own_w = scratch.w.at[step.slot, columns].transpose((1, 0))
            plgpu.wgmma(accumulator, scratch.x.at[step.slot, own_rows], own_w)

        def store(accumulator, coord: Named, warpgroup):
            first_row = coord.row + tile.first_row(warpgroup)
            first_column = coord.column + tile.column_block(warpgroup) * tile.warpgroup_columns
            starts = [
                (r, c) for r in range(0, tile.warpgroup_rows, WGMMA_ROWS) for c in range(0, tile.warpgroup_columns, chunk)
            ]

            def store_chunk(i, r, c):
                staged = scratch.out.at[warpgroup, i % 2]
                # The other buffer may still be read, if no earlier chunk was skipped.
                plgpu.wait_smem_to_gmem(1 if i and n % tile.columns == 0 else 0, wait_read_only=True)
                staged[...] = accumulator[r : r + WGMMA_ROWS, c : c + chunk]
                plgpu.commit_smem()
                place = out_ref.at[coord.split, pl.ds(first_row + r, WGMMA_ROWS), pl.ds(first_column + c, chunk)]
                plgpu.copy_smem_to_gmem(staged, place)

            for i, (r, c) in enumerate(starts):
                pl.when((first_row + r < rows) & (first_column + c < n))(partial(store_chunk, i, r, c))

        parts = splits if adds_splits else 1
        program = TileProgram(locate=locate, load=load, multiply=multiply, epilogue=store, parts=parts)
        run_tiles(written * row_tiles * column_tiles, program, tile, scratch.pipe)

    swizzled = operand_transforms(dtype)
    scratch = Named(
        x=plgpu.SMEM((tile.stages, tile.rows, STEP), dtype, transforms=swizzled),
        w=plgpu.SMEM((tile.stages, tile.columns, STEP), dtype, transforms=swizzled),
        # Chunks on their way to memory.
        out=plgpu.SMEM((CONSUMERS, 2, WGMMA_ROWS, chunk), jnp.float32, transforms=operand_transforms(jnp.float32, chunk)),
        pipe=tile.pipeline(copies=2),
    )
    outputs = [jax.ShapeDtypeStruct((written, rows, n), jnp.float32)]
    # A block uses all shared memory: a second one would wait for the first to end.
    kernel = launch(name, body, outputs, [scratch], warpgroups=CONSUMERS + 1, blocks_per_core=1)
    (result,) = kernel(x, weights)
    return result[:, :num_rows]
