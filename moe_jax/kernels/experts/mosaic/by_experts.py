"""Each expert's own product of columns: out[e] = sum over the rows r of expert e of outer(a[r], b[r])."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.experts.mosaic.tile_order import place_in_order, rows_in_group
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.hopper.launch import launch, operand_transforms
from moe_jax.kernels.hopper.mainloop import (
    CONSUMERS,
    ROW_ALIGNMENT,
    STEP,
    WGMMA_ROWS,
    Tile,
    ring_barriers,
    run_tiles,
)


class Part(NamedTuple):
    """Some tokens' rows."""

    a: Float[Array, "rows m"]
    b: Float[Array, "rows n"]
    plan: Plan


def outer(
    parts: Sequence[Part], tile: Tile, dtype: jnp.dtype, accumulate_into: Float[Array, "experts m n"] | None = None
) -> Float[Array, "experts m n"]:
    """out[e] = the sum over parts of a[rows of e].T @ b[rows of e], summed in f32 and rounded to `dtype` once; zeros for an
    expert without rows.

    Rows that fill an expert's last block must be zero in a or b, and finite in the other. An expert's rows lie in as many
    places as there are parts; the ring runs on from one to the next, so that parts cost neither copies nor further sums.

    To `accumulate_into`, f32 as `dtype`, the sums are added in place; what an expert without rows has there is neither read nor
    written. The tile's columns must then divide n: totals are read by loads that know no border.
    """
    count, (a, b, plan) = len(parts), parts[0]
    m, n = a.shape[1], b.shape[1]
    # Of the last tile's columns those beyond b's are read as zeros and not written.
    row_tiles, column_tiles = m // tile.rows, -(-n // tile.columns)
    chunk = 128 // jnp.dtype(dtype).itemsize
    group = rows_in_group((m, n), a.dtype)
    adds = accumulate_into is not None

    def body(*references):
        offsets_refs, a_refs, b_refs = (references[i * count : (i + 1) * count] for i in range(3))
        out_ref, a_smem, b_smem, out_smem, pipe = references[3 * count :]

        def describe(index):
            expert = lax.div(index, jnp.int32(row_tiles * column_tiles))
            place = lax.rem(index, jnp.int32(row_tiles * column_tiles))
            row, column = place_in_order(place, row_tiles, column_tiles, group)
            rows_from, steps_to = [], [jnp.int32(0)]
            for offsets_ref in offsets_refs:
                first = pl.multiple_of(offsets_ref[expert], ROW_ALIGNMENT)
                rows_from.append(first)
                steps_to.append(steps_to[-1] + lax.div(offsets_ref[expert + 1] - first, jnp.int32(STEP)))
            return steps_to[-1], (expert, rows_from, steps_to, row * tile.rows, column * tile.columns)

        def load(place, k, slot, barrier):
            _, rows_from, steps_to, row, column = place

            def load_from(part):
                ks = pl.ds(rows_from[part] + (k - steps_to[part]) * STEP, STEP)
                plgpu.copy_gmem_to_smem(a_refs[part].at[ks, pl.ds(row, tile.rows)], a_smem.at[slot], barrier)
                plgpu.copy_gmem_to_smem(b_refs[part].at[ks, pl.ds(column, tile.columns)], b_smem.at[slot], barrier)

            if count == 1:
                return load_from(0)
            for part in range(count):
                pl.when((k >= steps_to[part]) & (k < steps_to[part + 1]))(partial(load_from, part))

        def multiply(accumulator, place, k, slot, warpgroup):
            a_own = a_smem.at[slot, :, pl.ds(tile.first_row(warpgroup), tile.own_rows)]
            b_own = b_smem.at[slot, :, pl.ds(tile.column_part(warpgroup) * tile.own_columns, tile.own_columns)]
            plgpu.wgmma(accumulator, a_own.transpose((1, 0)), b_own)

        def finish(accumulator, place, warpgroup):
            expert, _, steps_to, row, column = place
            first_row = row + tile.first_row(warpgroup)
            first_column = column + tile.column_part(warpgroup) * tile.own_columns
            starts = [(r, c) for r in range(0, tile.own_rows, WGMMA_ROWS) for c in range(0, tile.own_columns, chunk)]
            targets = [out_ref.at[expert, pl.ds(first_row + r, WGMMA_ROWS), pl.ds(first_column + c, chunk)] for r, c in starts]

            def summed_before(target):
                return plgpu.load(target, layout=plgpu.Layout.WGMMA, optimized=False)

            def store():
                # Read one chunk ahead, so that memory is waited for at the first alone.
                before = summed_before(targets[0]) if adds else None
                for i, ((r, c), target) in enumerate(zip(starts, targets, strict=True)):
                    total = accumulator[r : r + WGMMA_ROWS, c : c + chunk]
                    if adds:
                        total += before
                        before = summed_before(targets[i + 1]) if i + 1 < len(targets) else None
                    slot = out_smem.at[warpgroup, i % 2]
                    plgpu.wait_smem_to_gmem(min(i, 1), wait_read_only=True)
                    slot[...] = total.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(slot, target)

            if adds:
                pl.when(steps_to[-1] > 0)(store)
            else:
                store()

        run_tiles(
            plan.num_experts * row_tiles * column_tiles,
            describe,
            load,
            multiply,
            finish,
            tile_shape=tile,
            pipe=pipe,
        )

    scratch = [
        plgpu.SMEM((tile.stages, STEP, tile.rows), a.dtype, transforms=operand_transforms(a.dtype)),
        plgpu.SMEM((tile.stages, STEP, tile.columns), a.dtype, transforms=operand_transforms(a.dtype)),
        plgpu.SMEM((CONSUMERS, 2, WGMMA_ROWS, chunk), dtype, transforms=operand_transforms(dtype, chunk)),
        ring_barriers(tile, copies=2),
    ]
    added = [] if accumulate_into is None else [accumulate_into]
    inputs = [plan.offsets for _, _, plan in parts] + [a for a, _, _ in parts] + [b for _, b, _ in parts] + added
    outputs = [] if adds else [jax.ShapeDtypeStruct((plan.num_experts, m, n), dtype)]
    return launch("grouped_outer", body, outputs, scratch, warpgroups=CONSUMERS + 1, in_place=adds)(*inputs)[0]
