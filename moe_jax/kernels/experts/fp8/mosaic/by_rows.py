"""Rows in FP8 times their expert's matrix in FP8: out[r] = a[r] @ w[e(r)].T, with an epilogue on the f32 sums.

Cost for R rows: 2*R*K*N FLOPs. With tiles of 128 x 256, A and B cross from L2 R*N*K*(1/256 + 1/128) bytes.

Kernels `fp8_grouped_matmul`, `fp8_gated_matmul`, and `fp8_gated_matmul_backward` of by_rows_backward.py:

    roles     producer WG2                  TMA a[row : row+rows, k : k+128], w[expert, columns of the tile, k : k+128] -> slot,
                                            and the scales of both
                                            fp8_gated_matmul: TMA w and its scales twice a warpgroup, for gate and for up
              consumers WG0, WG1            promoted.py: wgmma 64 x 128 x 128, promotion; then the epilogue by 64 rows
    smem      a stages x rows x 128 | w stages x columns x 128, e4m3 | out 2 WG x 64 x 64, bf16 | the epilogue's
              row_scales stages x rows | column_scales stages x copies of w x 32, f32 | barriers
              128 x 256 x 4 stages: a 64 KiB | w 128 KiB | out 16 KiB | scales 2 + 1 KiB | 64 bytes           = 211 KiB of 227
              fp8_gated_matmul      with h: halves of act 8 KiB besides; without: 16 KiB, and no out          = 219 or 211
    barriers  full[slot]    1 arrival per TMA copy (2 for a and its scales; 2, 4 or 8 for w and its scales), waited for by both
                            consumers (with ping-pong full[consumer, slot], waited for by that one)
              empty[slot]   1 arrival a consumer that reads the slot (2; with ping-pong 1), waited for by the producer
    invariant the rows of a tile belong to one expert; rows below its last block are not stored
              few tokens: rows after the last token are not loaded, and 8 rows of a block are stored if one of them has a token
              (`Plan.chosen_rows`, ../../mosaic/chosen_rows.py). The others are unchanged in memory
              an `out` chunk is overwritten only after the previous TMA store has read it
              TMA copies scales to multiples of 128 bytes, and from multiples of 16 bytes of a row: anything less stops the
              kernel with "misaligned address" or "illegal instruction" (`column_scales`)
    time      promoted.py
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.fp8.mosaic.promoted import (
    BLOCK,
    LINES,
    PIECE,
    STEP,
    Fp8TileShape,
    Place,
    PromotedProgram,
    SlotStep,
    in_pieces,
    piece_of,
    place_in_piece,
    run_tiles,
)
from moe_jax.kernels.experts.fp8.mosaic.round_groups import inverse_scales
from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedMatrices, QuantisedRows, scales_of
from moe_jax.kernels.experts.mosaic.by_rows import (
    CHUNK,
    Epilogue,
    RowsOperands,
    WarpgroupPart,
    epilogue_steps,
)
from moe_jax.kernels.experts.mosaic.chosen_rows import (
    LoadedRows,
    chosen_rows_of,
    loaded_rows,
    store_rows,
)
from moe_jax.kernels.experts.mosaic.tile_order import TileCoord, row_tiles, rows_in_group
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.hopper.launch import Named, launch, operand_transforms
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT
from moe_jax.kernels.hopper.pipeline import CONSUMERS, WGMMA_ROWS, Registers

F8 = jnp.float8_e4m3fn

REGISTERS = Registers(producer=72, consumer=208)
"""The numbers with which ptxas spills least in most kernels (promoted.py)."""


@partial(jax.jit, static_argnames="tile")
def matmul(a: QuantisedRows, w: QuantisedMatrices, plan: Plan, tile: Fp8TileShape) -> BFloat16[Array, "rows n"]:
    """Returns a[r] @ w[e].T, e = expert of r. Rows without a pair may be left unwritten."""

    def store(sums, part, write, references):
        (out_ref,) = references.outputs
        for place, block in sums.items():
            for c in range(0, GROUP, CHUNK):
                write(out_ref, part.column + place.column + c, block[:, c : c + CHUNK])

    shape = jax.ShapeDtypeStruct((plan.num_rows, w.values.shape[1]), jnp.bfloat16)
    return launch_rows(a, w, plan, tile, Epilogue("fp8_grouped_matmul", [shape], store, staged=1, registers=REGISTERS))[0]


@partial(jax.jit, static_argnames=("tile", "keep_h", "activation"))
def matmul_gated(
    a: QuantisedRows,
    w: QuantisedMatrices,
    plan: Plan,
    tile: Fp8TileShape,
    *,
    keep_h: bool,
    activation: Activation = SILU,
) -> tuple[BFloat16[Array, "rows 2*inter"] | None, QuantisedRows]:
    """Returns h = a @ w[e].T = [gate | up] and act = activation(gate, up), act rounded from the f32 sums.

    Without `keep_h`, h is None and not written.
    """
    inter = w.values.shape[1] // 2

    def store(sums, part, write, references):
        *h_ref, values_ref, scales_ref = references.outputs
        gate, up = sums.values()
        column = pl.multiple_of(part.column // 2, GROUP)
        if keep_h:
            for half, block in ((0, gate), (inter, up)):
                for c in range(0, GROUP, CHUNK):
                    write(h_ref[0], half + column + c, block[:, c : c + CHUNK])
        act = activation.forward(gate, up, in_kernel=True)
        store_group(act, values_ref, scales_ref, part, column, references.scratch)

    outputs = [
        *([jax.ShapeDtypeStruct((plan.num_rows, 2 * inter), jnp.bfloat16)] if keep_h else []),
        *rows_shapes(plan.num_rows, inter),
    ]
    few = plan.holds_all_tokens or plan.expert_of_block is not None
    epilogue = Epilogue(
        "fp8_gated_matmul",
        outputs,
        store,
        scratch=halves_scratch(1 if keep_h else 2),
        staged=1 if keep_h else 0,
        registers=Registers(producer=72, consumer=216 if keep_h or few else 208),
    )
    *h, values, scales = launch_rows(a, w, plan, tile, epilogue, pairs_halves=True)
    return (h[0] if keep_h else None), QuantisedRows(values, scales)


def rows_shapes(rows: int, columns: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of `QuantisedRows` with this size."""
    return jax.ShapeDtypeStruct((rows, columns), F8), jax.ShapeDtypeStruct((columns // GROUP, rows), jnp.float32)


def halves_scratch(halves: int):
    """Returns shared memory for e4m3 results in flight: `halves` (1 or 2) blocks of 64 x 64 per consumer."""
    return plgpu.SMEM((CONSUMERS, halves, WGMMA_ROWS, CHUNK), F8, transforms=operand_transforms(F8))


def store_group(group, values_ref, scales_ref, part: WarpgroupPart, column, scratch) -> None:
    """Quantizes a 64 x 128 block from f32 to e4m3 with one scale per row, and stores both."""
    scales = scales_of(jnp.abs(group).max(axis=1))
    scales_ref[column // GROUP, pl.ds(part.row, WGMMA_ROWS)] = scales
    values = (group * inverse_scales(scales, BLOCK)).astype(F8)
    halves = scratch.shape[1]
    for n in range(GROUP // CHUNK):
        if n % halves == 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        half = scratch.at[part.warpgroup, n % halves]
        half[...] = values[:, n * CHUNK : (n + 1) * CHUNK]
        plgpu.commit_smem()
        store_rows(half, values_ref, part.row, column + n * CHUNK, part.stored)


def launch_rows(
    a: QuantisedRows, w: QuantisedMatrices, plan: Plan, tile: Fp8TileShape, epilogue: Epilogue, *, pairs_halves: bool = False
) -> list[Array]:
    """Launches the FP8 row kernel with an epilogue; returns the epilogue's outputs.

    Args:
        pairs_halves: half of a warpgroup's columns come from the first half of w's rows, half from the second half. One thread
            then has gate and up of a column.
    """
    if plan.num_rows == 0:
        return [jnp.zeros(output.shape, output.dtype) for output in epilogue.outputs]
    _, columns, summands = w.values.shape
    assert summands % (tile.steps_of_slot * STEP) == 0
    num_slots, column_tiles = summands // STEP // tile.steps_of_slot, columns // tile.columns
    group = rows_in_group((columns, summands), F8)
    tiles = row_tiles(plan, tile.rows, column_tiles, group)
    # The columns of a tile are contiguous, or one piece of gate and one of up for each warpgroup.
    column_copies = 2 * tile.column_blocks if pairs_halves else 1
    groups_of_copy = tile.columns // column_copies // GROUP
    assert not plan.holds_all_tokens or tile.rows == WGMMA_ROWS

    def body(inputs: Named, *references):
        *output_refs, scratch = references
        epilogue_refs = Named(outputs=tuple(output_refs), inputs=inputs.epilogue, scratch=scratch.epilogue)

        def locate(index):
            # The coordinates are loop-carried arrays, so nothing is known about them at compile time.
            return jax.tree.map(jnp.int32, tiles.find(index, *inputs.tiles))

        def factor(step: SlotStep, place, warpgroup):
            group = tile.column_block(warpgroup) * (tile.warpgroup_columns // GROUP) + place.column // GROUP
            copy, line = group // groups_of_copy, group % groups_of_copy
            rows = pl.ds(tile.first_row(warpgroup) + place.row, WGMMA_ROWS)
            own = scratch.row_scales.at[step.slot, step.step, rows]
            of_rows = plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            return of_rows * scratch.column_scales[step.slot, copy, line, place_in_piece(step, tile.steps_of_slot)]

        def rows_of(sums, row):
            return {place: block for place, block in sums.items() if place.row == row}

        prologue, has_rows, store_tile = epilogue_steps(
            epilogue, epilogue_refs, scratch.out, tile, plan, inputs.chosen, rows_of
        )
        program = PromotedProgram(
            locate=locate,
            load=partial(_load, inputs, scratch, tile, loaded, pairs_halves=pairs_halves),
            multiply=partial(_multiply, scratch, tile),
            factor=factor,
            prologue=prologue,
            epilogue=store_tile,
            has_rows=has_rows,
        )
        run_tiles(tiles.count(*inputs.tiles) * column_tiles, num_slots, program, tile, scratch.pipe, epilogue.registers)

    loaded = loaded_rows(plan, tile.rows, a.values.shape[0])
    swizzled = operand_transforms(F8, STEP)
    scratch = Named(
        a=plgpu.SMEM((tile.stages, tile.rows, tile.steps_of_slot * STEP), F8, transforms=swizzled),
        w=plgpu.SMEM((tile.stages, tile.columns, tile.steps_of_slot * STEP), F8, transforms=swizzled),
        # Chunks in flight to memory; None if there are none.
        out=plgpu.SMEM(
            (CONSUMERS, epilogue.staged, WGMMA_ROWS, CHUNK), jnp.bfloat16, transforms=operand_transforms(jnp.bfloat16)
        )
        if epilogue.staged
        else None,
        epilogue=epilogue.scratch,
        row_scales=plgpu.SMEM((tile.stages, tile.steps_of_slot, tile.rows), jnp.float32),
        # A piece of scales for each 128 columns of a copy.
        column_scales=plgpu.SMEM((tile.stages, column_copies, LINES, PIECE), jnp.float32),
        pipe=tile.pipeline(copies=1 + tile.steps_of_slot + 2 * column_copies),
    )
    kernel = launch(epilogue.name, body, epilogue.outputs, [scratch], warpgroups=CONSUMERS + 1)
    w = QuantisedMatrices(w.values, in_pieces(w.scales))
    return kernel(Named(tiles=tiles.arrays, operands=RowsOperands(a, w), chosen=chosen_rows_of(plan), epilogue=epilogue.inputs))


def _load(
    inputs: Named,
    scratch: Named,
    tile: Fp8TileShape,
    loaded: LoadedRows,
    coord: TileCoord,
    k,
    slot,
    full_barrier,
    *,
    pairs_halves: bool,
) -> None:
    """Starts the copies of the steps of one slot: rows of a, columns of w, and the scales of both."""
    steps, (w, w_scales) = tile.steps_of_slot, inputs.operands.w
    ks = pl.ds(k * steps * STEP, steps * STEP)
    rows = pl.ds(pl.multiple_of(loaded.first_row(coord.row), ROW_ALIGNMENT), loaded.number)
    slot_rows = pl.ds(0, loaded.number)
    a, a_scales = inputs.operands.a
    plgpu.copy_gmem_to_smem(a.at[rows, ks], scratch.a.at[slot, slot_rows], full_barrier)
    for step in range(steps):
        target = scratch.row_scales.at[slot, step, slot_rows]
        plgpu.copy_gmem_to_smem(a_scales.at[k * steps + step, rows], target, full_barrier)

    def load_columns(first, columns, i):
        source = w.at[coord.expert, pl.ds(pl.multiple_of(first, GROUP), columns), ks]
        plgpu.copy_gmem_to_smem(source, scratch.w.at[slot, pl.ds(i * columns, columns)], full_barrier)
        groups = pl.ds(first // GROUP, columns // GROUP)
        target = scratch.column_scales.at[slot, i, pl.ds(0, columns // GROUP)]
        plgpu.copy_gmem_to_smem(w_scales.at[coord.expert, groups, piece_of(k, steps)], target, full_barrier)

    if pairs_halves:
        half, inter = tile.warpgroup_columns // 2, w.shape[1] // 2
        for i in range(2 * tile.column_blocks):
            block = coord.column_tile * tile.column_blocks + i // 2
            load_columns(i % 2 * inter + block * half, half, i)
    else:
        load_columns(coord.column_tile * tile.columns, tile.columns, 0)


def _multiply(scratch: Named, tile: Fp8TileShape, accumulator, step: SlotStep, place: Place, warpgroup) -> None:
    """Issues the wgmma of one block of a warpgroup."""
    ks = pl.ds(step.step * STEP, STEP)
    rows = pl.ds(tile.first_row(warpgroup) + place.row, WGMMA_ROWS)
    columns = pl.ds(tile.column_block(warpgroup) * tile.warpgroup_columns + place.column, GROUP)
    plgpu.wgmma(accumulator, scratch.a.at[step.slot, rows, ks], scratch.w.at[step.slot, columns, ks].transpose((1, 0)))
