"""The outer products of each expert's rows: out[e] = sum over the rows r of expert e of outer(a[r], b[r]).

Cost for R rows: 2*R*M*N FLOPs. With tiles of 128 x 256, a and b cross from L2 R*M*N*(1/256 + 1/128) elements.

Kernel `grouped_outer`:

    roles     producer WG2 (40 registers)   TMA a[k : k+64, row : row+rows], b[k : k+64, column : column+columns] -> slot
              consumers WG0, WG1 (232)      wgmma a^T b, [warpgroup rows] x [warpgroup columns] x 64; then the epilogue
    smem      a stages x 64 x rows | b stages x 64 x columns | out 2 WG x 2 x 64 rows x 128 bytes | barriers, operands 16-bit
              128 x 256 x 4 stages: a 4 x 16 KiB | b 4 x 32 KiB | out 2 x 2 x 8 KiB | 8 x 8 bytes         = 224 KiB of 227
    barriers  full[slot]    2 arrivals (TMA a, TMA b), waited for by both consumers (with ping-pong full[consumer, slot])
              empty[slot]   2 arrivals (the consumers; with ping-pong 1), waited for by the producer
    steps     64 rows of the expert each; of several parts (chunks of tokens) first all steps of the first part, and so on
    invariant a step's rows belong to one expert (ROW_ALIGNMENT); an expert without rows has no steps, and yields zeros
              an `out` chunk is overwritten only after the previous TMA store has read it
              accumulators are added to in memory, by TMA's reduction: a warpgroup that read them would wait for memory
    time      mainloop.py
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.experts.mosaic.tile_order import coord_in_order, rows_in_group
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.hopper.interpreter import add_to_memory
from moe_jax.kernels.hopper.launch import Named, launch, operand_transforms
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT, STEP, TileProgram, TileShape, run_tiles
from moe_jax.kernels.hopper.pipeline import CONSUMERS, WGMMA_ROWS


class OuterOperands(NamedTuple):
    """The two operands of an outer product for some tokens, in expert order, with their plan."""

    a: Float[Array, "rows m"]
    b: Float[Array, "rows n"]
    plan: Plan


def outer(
    parts: Sequence[OuterOperands],
    tile: TileShape,
    dtype: jnp.dtype,
    accumulate_into: Float[Array, "all_experts m n"] | None = None,
) -> Float[Array, "all_experts m n"]:
    """Returns out[e] = the sum over parts of a[rows of e].T @ b[rows of e], summed in f32 and rounded to `dtype` once.

    An expert without rows yields zeros. Padding rows of an expert's last block must be zero in a or b, and finite in the other.
    The pipeline continues from one part to the next, so parts cost neither copies nor extra sums.

    Args:
        accumulate_into: f32, as `dtype`. The sums are added to it in place. For an expert without rows it is neither read nor
            written. It may hold the experts of all layers; `Plan.layer` selects the layer to add to.
    """
    a, b, plan = parts[0]
    m, n = a.shape[1], b.shape[1]
    # The last tile may exceed b's columns: TMA reads zeros there and writes nothing.
    row_tiles, column_tiles = m // tile.rows, -(-n // tile.columns)
    group = rows_in_group((m, n), a.dtype)
    accumulates = accumulate_into is not None

    def body(inputs: Named, out_ref, scratch: Named):
        def locate(index):
            expert = lax.div(index, jnp.int32(row_tiles * column_tiles))
            in_expert = lax.rem(index, jnp.int32(row_tiles * column_tiles))
            row, column = coord_in_order(in_expert, row_tiles, column_tiles, group)
            first_rows, steps_to = [], [jnp.int32(0)]
            for offsets in inputs.offsets:
                first = pl.multiple_of(offsets[expert], ROW_ALIGNMENT)
                first_rows.append(first)
                steps_to.append(steps_to[-1] + lax.div(offsets[expert + 1] - first, jnp.int32(STEP)))
            matrix = expert if inputs.first_matrix is None else expert + inputs.first_matrix[0]
            return steps_to[-1], Named(
                matrix=matrix, first_rows=first_rows, steps_to=steps_to, row=row * tile.rows, column=column * tile.columns
            )

        program = TileProgram(
            locate=locate,
            load=partial(_load, inputs, scratch, tile),
            multiply=partial(_multiply, scratch, tile),
            epilogue=partial(_store, out_ref, scratch, tile, accumulates=accumulates),
        )
        run_tiles(plan.num_experts * row_tiles * column_tiles, program, tile, scratch.pipe)

    chunk = _chunk(dtype)
    operand, result = operand_transforms(a.dtype), operand_transforms(dtype, chunk)
    scratch = Named(
        a=plgpu.SMEM((tile.stages, STEP, tile.rows), a.dtype, transforms=operand),
        b=plgpu.SMEM((tile.stages, STEP, tile.columns), a.dtype, transforms=operand),
        # Chunks in flight to memory.
        out=plgpu.SMEM((CONSUMERS, 2, WGMMA_ROWS, chunk), dtype, transforms=result),
        pipe=tile.pipeline(copies=2),
    )
    outputs = [] if accumulates else [jax.ShapeDtypeStruct((plan.num_experts, m, n), dtype)]
    kernel = launch("grouped_outer", body, outputs, [scratch], warpgroups=CONSUMERS + 1, in_place=accumulates)
    first_matrix = plan.in_stack(jnp.zeros(1, jnp.int32)) if accumulates and plan.layer is not None else None
    inputs = Named(
        offsets=[part.plan.offsets for part in parts],
        a=[part.a for part in parts],
        b=[part.b for part in parts],
        first_matrix=first_matrix,
    )
    return kernel(inputs, *([accumulate_into] if accumulates else []))[0]


def _load(inputs: Named, scratch: Named, tile: TileShape, step, full_barrier, _) -> None:
    """Starts the copies of one step: 64 rows of a and of b."""
    coord, k, slot = step

    def load_from(i):
        ks = pl.ds(coord.first_rows[i] + (k - coord.steps_to[i]) * STEP, STEP)
        a = inputs.a[i].at[ks, pl.ds(coord.row, tile.rows)]
        b = inputs.b[i].at[ks, pl.ds(coord.column, tile.columns)]
        plgpu.copy_gmem_to_smem(a, scratch.a.at[slot], full_barrier)
        plgpu.copy_gmem_to_smem(b, scratch.b.at[slot], full_barrier)

    parts = len(inputs.a)
    if parts == 1:
        return load_from(0)
    for i in range(parts):
        pl.when((k >= coord.steps_to[i]) & (k < coord.steps_to[i + 1]))(partial(load_from, i))


def _multiply(scratch: Named, tile: TileShape, accumulator, step, warpgroup) -> None:
    """Issues the wgmma of a warpgroup's rows and columns of one step."""
    a = scratch.a.at[step.slot, :, pl.ds(tile.first_row(warpgroup), tile.warpgroup_rows)]
    first_column = tile.column_block(warpgroup) * tile.warpgroup_columns
    b = scratch.b.at[step.slot, :, pl.ds(first_column, tile.warpgroup_columns)]
    plgpu.wgmma(accumulator, a.transpose((1, 0)), b)


def _store(out_ref, scratch: Named, tile: TileShape, accumulator, coord, warpgroup, *, accumulates: bool) -> None:
    """Stores a warpgroup's sums in chunks of 64 rows, or adds them to the old values."""
    first_row = coord.row + tile.first_row(warpgroup)
    first_column = coord.column + tile.column_block(warpgroup) * tile.warpgroup_columns
    chunk = scratch.out.shape[-1]
    starts = [(r, c) for r in range(0, tile.warpgroup_rows, WGMMA_ROWS) for c in range(0, tile.warpgroup_columns, chunk)]
    targets = [out_ref.at[coord.matrix, pl.ds(first_row + r, WGMMA_ROWS), pl.ds(first_column + c, chunk)] for r, c in starts]

    def store():
        for i, ((r, c), target) in enumerate(zip(starts, targets, strict=True)):
            total = accumulator[r : r + WGMMA_ROWS, c : c + chunk]
            buffer = scratch.out.at[warpgroup, i % 2]
            plgpu.wait_smem_to_gmem(min(i, 1), wait_read_only=True)
            buffer[...] = total.astype(out_ref.dtype)
            plgpu.commit_smem()
            if accumulates:
                add_to_memory(buffer, target)
            else:
                plgpu.copy_smem_to_gmem(buffer, target)

    if accumulates:
        pl.when(coord.steps_to[-1] > 0)(store)
    else:
        store()


def _chunk(dtype: jnp.dtype) -> int:
    """Returns the number of columns in 128 bytes, the widest swizzle, of a stored chunk."""
    return 128 // jnp.dtype(dtype).itemsize
