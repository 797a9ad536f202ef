"""Each expert's own product of columns: out[e] = sum over the rows r of expert e of outer(a[r], b[r])."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.grouped_matmul.mosaic.ring import CONSUMERS, ROW_ALIGNMENT, STEP, Tile, run_tiles
from moe_jax.kernels.mosaic_gpu import launch, operand_transforms
from moe_jax.kernels.routing import Plan


def outer(
    a: Float[Array, "rows m"], b: Float[Array, "rows n"], plan: Plan, tile: Tile, dtype: jnp.dtype
) -> Float[Array, "experts m n"]:
    """out[e] = a[rows of e].T @ b[rows of e], summed in f32 and rounded to `dtype` once; zeros for an expert without rows.

    Rows that fill an expert's last block must be zero in a or b, and finite in the other.
    """
    m, n = a.shape[1], b.shape[1]
    row_tiles, column_tiles = m // tile.rows, n // tile.columns
    chunk = 128 // jnp.dtype(dtype).itemsize

    def body(offsets_ref, a_ref, b_ref, out_ref, a_smem, b_smem, out_smem, full, empty):
        def describe(index):
            expert = lax.div(index, jnp.int32(row_tiles * column_tiles))
            place = lax.rem(index, jnp.int32(row_tiles * column_tiles))
            first = pl.multiple_of(offsets_ref[expert], ROW_ALIGNMENT)
            num_steps = lax.div(offsets_ref[expert + 1] - first, jnp.int32(STEP))
            row = lax.div(place, jnp.int32(column_tiles)) * tile.rows
            return num_steps, (expert, first, row, lax.rem(place, jnp.int32(column_tiles)) * tile.columns)

        def load(place, k, slot, barrier):
            _, first, row, column = place
            ks = pl.ds(first + k * STEP, STEP)
            plgpu.copy_gmem_to_smem(a_ref.at[ks, pl.ds(row, tile.rows)], a_smem.at[slot], barrier)
            plgpu.copy_gmem_to_smem(b_ref.at[ks, pl.ds(column, tile.columns)], b_smem.at[slot], barrier)

        def multiply(accumulator, place, slot, warpgroup):
            a_own = a_smem.at[slot, :, pl.ds(tile.first_row(warpgroup), tile.own_rows)]
            b_own = b_smem.at[slot, :, pl.ds(tile.column_part(warpgroup) * tile.own_columns, tile.own_columns)]
            plgpu.wgmma(accumulator, a_own.transpose((1, 0)), b_own)

        def finish(accumulator, place, warpgroup):
            expert, _, row, column = place
            rows_out = pl.ds(row + tile.first_row(warpgroup), tile.own_rows)
            first_column = column + tile.column_part(warpgroup) * tile.own_columns
            for i, c in enumerate(range(0, tile.own_columns, chunk)):
                slot = out_smem.at[warpgroup, i % 2]
                plgpu.wait_smem_to_gmem(min(i, 1), wait_read_only=True)
                slot[...] = accumulator[:, c : c + chunk].astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(slot, out_ref.at[expert, rows_out, pl.ds(first_column + c, chunk)])

        run_tiles(
            plan.num_experts * row_tiles * column_tiles,
            describe,
            load,
            multiply,
            finish,
            tile_shape=tile,
            full=full,
            empty=empty,
        )

    scratch = [
        plgpu.SMEM((tile.stages, STEP, tile.rows), a.dtype, transforms=operand_transforms(a.dtype)),
        plgpu.SMEM((tile.stages, STEP, tile.columns), a.dtype, transforms=operand_transforms(a.dtype)),
        plgpu.SMEM((CONSUMERS, 2, tile.own_rows, chunk), dtype, transforms=operand_transforms(dtype, chunk)),
        plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tile.stages),
    ]
    shape = jax.ShapeDtypeStruct((plan.num_experts, m, n), dtype)
    return launch("grouped_outer", body, [shape], scratch, warpgroups=CONSUMERS + 1)(plan.offsets, a, b)[0]
