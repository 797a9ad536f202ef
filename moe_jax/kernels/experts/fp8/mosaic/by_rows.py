"""Rows in FP8 times their expert's matrix in FP8: out[r] = a[r] @ w[e(r)].T, with an epilogue on the f32 sums.

Cost for R rows: 2*R*K*N FLOPs. With tiles of 128 x 256, A and B cross from L2 R*N*K*(1/256 + 1/128) bytes.

Kernels `fp8_grouped_matmul`, `fp8_gated_matmul`, and `fp8_gated_matmul_backward` of by_rows_backward.py:

    roles     producer WG2 (40 registers)   TMA a[row : row+rows, k : k+128], w[expert, columns of the tile, k : k+128] -> slot
                                            fp8_gated_matmul: TMA w twice a warpgroup, 128 of gate and 128 of up
              consumers WG0, WG1 (232)      promoted.py: wgmma 64 x 128 x 128, promotion; then the epilogue by 64 rows
    smem      a stages x rows x 128 | w stages x columns x 128, e4m3 | out 2 WG x 1 x 64 x 64, bf16 | the epilogue's | barriers
              128 x 256 x 4 stages: a 4 x 16 KiB | w 4 x 32 KiB | out 2 x 8 KiB | 8 x 8 bytes               = 208 KiB of 227
    barriers  full[slot]    1 arrival a TMA copy (a: 1; w: 1, 2 or 4), waited for by both consumers
                            (with ping-pong full[consumer, slot], waited for by that one)
              empty[slot]   1 arrival a consumer that reads the slot (2; with ping-pong 1), waited for by the producer
    invariant the rows of a tile belong to one expert; rows below its last block are not stored
              an `out` chunk is written again only after the TMA store before it has read it
    time      mainloop.py
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from moe_jax.kernels.experts.fp8.mosaic.promoted import BLOCK, STEP, Place, accumulate
from moe_jax.kernels.experts.fp8.mosaic.round_groups import rounded_group
from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedMatrices, QuantisedRows
from moe_jax.kernels.experts.mosaic.by_rows import CHUNK
from moe_jax.kernels.experts.mosaic.row_tiles import TileCoord, row_tiles
from moe_jax.kernels.experts.mosaic.tile_order import rows_in_group
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.hopper.launch import launch, operand_transforms
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT, TileProgram, TileShape, run_tiles
from moe_jax.kernels.hopper.pipeline import CONSUMERS, WGMMA_ROWS, Pipeline, Registers

F8 = jnp.float8_e4m3fn

REGISTERS = Registers(producer=40, consumer=216)


@partial(jax.jit, static_argnames="tile")
def matmul(a: QuantisedRows, w: QuantisedMatrices, plan: Plan, tile: TileShape) -> BFloat16[Array, "rows n"]:
    """Returns a[r] @ w[e].T, e = expert of r. Rows of no expert are left unwritten."""

    def store(sums, part, write, references):
        (out_ref,) = references.outputs
        for place, block in sums.items():
            for c in range(0, GROUP, CHUNK):
                write(out_ref, part.column + place.column + c, block[:, c : c + CHUNK])

    shape = jax.ShapeDtypeStruct((plan.num_rows, w.values.shape[1]), jnp.bfloat16)
    return launch_rows(a, w, plan, tile, Epilogue("fp8_grouped_matmul", [shape], store))[0]


@partial(jax.jit, static_argnames=("tile", "keep_h"))
def matmul_gated_silu(
    a: QuantisedRows, w: QuantisedMatrices, plan: Plan, tile: TileShape, *, keep_h: bool
) -> tuple[BFloat16[Array, "rows 2*inter"] | None, QuantisedRows]:
    """Returns h = a @ w[e].T = [gate | up] and act = silu(gate) * up, act rounded from the f32 sums.

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
        act = gate / (1 + jnp.exp(-gate)) * up
        store_group(act, values_ref, scales_ref, part, column, references.groups)

    outputs = [
        *([jax.ShapeDtypeStruct((plan.num_rows, 2 * inter), jnp.bfloat16)] if keep_h else []),
        *rows_shapes(plan.num_rows, inter),
    ]
    epilogue = Epilogue("fp8_gated_matmul", outputs, store)
    *h, values, scales = launch_rows(a, w, plan, tile, epilogue, pairs_halves=True)
    return (h[0] if keep_h else None), QuantisedRows(values, scales)


def rows_shapes(rows: int, columns: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the shapes of the parts of `QuantisedRows`."""
    return jax.ShapeDtypeStruct((rows, columns), F8), jax.ShapeDtypeStruct((columns // GROUP, rows), jnp.float32)


def store_group(group, values_ref, scales_ref, part: "WarpgroupPart", column, groups) -> None:
    """Rounds 64 x 128 f32 to e4m3 with a scale for each row, and stores both."""
    values, scales = rounded_group(group)
    scales_ref[column // GROUP, pl.ds(part.row, WGMMA_ROWS)] = scales
    chunk = groups.at[part.warpgroup]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    chunk[...] = values
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(chunk, values_ref.at[pl.ds(part.row, WGMMA_ROWS), pl.ds(column, GROUP)])


class WarpgroupPart(NamedTuple):
    """The 64 rows and the columns of a tile that a consumer's epilogue works on."""

    row: jax.Array
    """The first of the 64 rows, in the whole array."""
    column: jax.Array
    """The first column, in the whole array; of gate and up counted together."""
    warpgroup: Any


class EpilogueReferences(NamedTuple):
    """The references that an epilogue reads and writes."""

    outputs: tuple[Any, ...]
    inputs: Any
    scratch: Any
    groups: Any
    """`RowsScratch.out`, as 64 x 128 e4m3 of each consumer."""


@dataclass(frozen=True)
class Epilogue:
    """The part of a kernel that turns a tile's sums into results."""

    name: str
    """Name of the whole kernel, in profiles."""
    outputs: list[jax.ShapeDtypeStruct]
    store: Callable[[dict[Place, Any], WarpgroupPart, Callable, EpilogueReferences], None]
    """(sums of 64 rows, part, write, references). write(output reference, column, values) rounds and stores 64 columns."""
    inputs: Any = ()
    scratch: Any = ()
    prepare: Callable[[WarpgroupPart, EpilogueReferences], None] = lambda part, references: None
    """Runs before `store`; for a tile's first rows before its first step, for example to start loads that `store` waits for."""


class RowsInputs(NamedTuple):
    """Arrays that the kernel reads."""

    tiles: tuple[Any, ...]
    """`RowTiles.arrays`."""
    a: QuantisedRows
    w: QuantisedMatrices
    epilogue: Any


class RowsScratch(NamedTuple):
    """Shared memory. Swizzled buffers come first: each starts at a multiple of 1024 bytes."""

    a: Any
    """[stages, rows, 128]."""
    w: Any
    """[stages, columns, 128]."""
    out: Any
    """Chunks on their way to memory: [consumers, 64, 64] bf16 and [consumers, 64, 128] e4m3, in one place."""
    scales: Any
    """[stages, rows] f32, of a. A copy by TMA needs a multiple of 128 bytes."""
    epilogue: Any
    pipe: Pipeline


def launch_rows(
    a: QuantisedRows, w: QuantisedMatrices, plan: Plan, tile: TileShape, epilogue: Epilogue, *, pairs_halves: bool = False
) -> list[Array]:
    """Runs the kernel and returns the epilogue's outputs.

    Args:
        pairs_halves: half of a warpgroup's columns come from the first half of w's rows, half from the second half. Gate and up
            of one column are then sums of one thread.
    """
    _, columns, summands = w.values.shape
    num_steps, column_tiles = summands // STEP, columns // tile.columns
    group = rows_in_group((columns, summands), F8)
    tiles = row_tiles(plan, tile.rows, column_tiles, group)

    def body(inputs: RowsInputs, *references):
        *output_refs, scratch = references
        out, groups = scratch.out
        epilogue_refs = EpilogueReferences(tuple(output_refs), inputs.epilogue, scratch.epilogue, groups)

        def locate(index):
            coord = tiles.find(index, *inputs.tiles)
            return num_steps, coord._replace(row=pl.multiple_of(coord.row, ROW_ALIGNMENT))

        def part_of(coord: TileCoord, warpgroup, row):
            """64 rows of the warpgroup, `row` below its first, and whether they are the expert's: below its last block, no."""
            first = tile.first_row(warpgroup) + row
            column_block = coord.column_tile * tile.column_blocks + tile.column_block(warpgroup)
            return WarpgroupPart(coord.row + first, column_block * tile.warpgroup_columns, warpgroup), first < coord.num_rows

        def prologue(coord, warpgroup):
            part, has_rows = part_of(coord, warpgroup, 0)
            pl.when(has_rows)(lambda: epilogue.prepare(part, epilogue_refs))

        def has_rows(coord, warpgroup):
            # As in the kernels of 16 bits: with large matrices all tiles take equally long.
            return part_of(coord, warpgroup, 0)[1] if group == 1 else True

        def scales_of_rows(slot, row, warpgroup):
            rows = pl.ds(tile.first_row(warpgroup) + row, WGMMA_ROWS)
            return plgpu.load(scratch.scales.at[slot, rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

        def store_tile(sums, coord, warpgroup):
            def write(part, output, column, values):
                chunk = out.at[warpgroup]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                chunk[...] = values.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(chunk, output.at[pl.ds(part.row, WGMMA_ROWS), pl.ds(column, CHUNK)])

            def store(row, part):
                if row > 0:
                    epilogue.prepare(part, epilogue_refs)
                own = {place: block for place, block in sums.items() if place.row == row}
                epilogue.store(own, part, partial(write, part), epilogue_refs)

            for row in range(0, tile.warpgroup_rows, WGMMA_ROWS):
                part, is_of_expert = part_of(coord, warpgroup, row)
                pl.when(is_of_expert)(partial(store, row, part))

        program = TileProgram(
            locate=locate,
            load=partial(_load, inputs, scratch, tile, pairs_halves=pairs_halves),
            multiply=partial(_multiply, scratch, tile),
            accumulate=partial(
                accumulate,
                scales_of_rows=scales_of_rows,
                scales_of_columns=partial(_scale_of_columns, inputs.w, tile, pairs_halves=pairs_halves),
            ),
            epilogue=store_tile,
            prologue=prologue,
            has_rows=has_rows,
        )
        run_tiles(tiles.count(*inputs.tiles) * column_tiles, program, tile, scratch.pipe, REGISTERS)

    swizzled = operand_transforms(F8, STEP)
    scratch = RowsScratch(
        a=plgpu.SMEM((tile.stages, tile.rows, STEP), F8, transforms=swizzled),
        w=plgpu.SMEM((tile.stages, tile.columns, STEP), F8, transforms=swizzled),
        out=plgpu.RefUnion(
            plgpu.SMEM((CONSUMERS, WGMMA_ROWS, CHUNK), jnp.bfloat16, transforms=operand_transforms(jnp.bfloat16)),
            plgpu.SMEM((CONSUMERS, *BLOCK), F8, transforms=operand_transforms(F8, GROUP)),
        ),
        scales=plgpu.SMEM((tile.stages, tile.rows), jnp.float32),
        epilogue=epilogue.scratch,
        pipe=tile.pipeline(copies=2 + (2 * tile.column_blocks if pairs_halves else 1)),
    )
    kernel = launch(epilogue.name, body, epilogue.outputs, [scratch], warpgroups=CONSUMERS + 1)
    return kernel(RowsInputs(tiles.arrays, a, w, epilogue.inputs))


def _load(inputs: RowsInputs, scratch: RowsScratch, tile: TileShape, step, full_barrier, _, *, pairs_halves: bool) -> None:
    """Starts the copies of one step: rows of a, columns of w."""
    coord, k, slot = step
    ks, w = pl.ds(k * STEP, STEP), inputs.w.values
    # Rows beyond a's are read as zeros.
    rows = pl.ds(coord.row, tile.rows)
    plgpu.copy_gmem_to_smem(inputs.a.values.at[rows, ks], scratch.a.at[slot], full_barrier)
    plgpu.copy_gmem_to_smem(inputs.a.scales.at[k, rows], scratch.scales.at[slot], full_barrier)
    if pairs_halves:
        half, inter = tile.warpgroup_columns // 2, w.shape[1] // 2
        for i in range(2 * tile.column_blocks):
            block = coord.column_tile * tile.column_blocks + i // 2
            source = w.at[coord.expert, pl.ds(i % 2 * inter + block * half, half), ks]
            plgpu.copy_gmem_to_smem(source, scratch.w.at[slot, pl.ds(i * half, half)], full_barrier)
    else:
        ns = pl.ds(coord.column_tile * tile.columns, tile.columns)
        plgpu.copy_gmem_to_smem(w.at[coord.expert, ns, ks], scratch.w.at[slot], full_barrier)


def _multiply(scratch: RowsScratch, tile: TileShape, accumulator, slot, place: Place, warpgroup) -> None:
    """Issues the wgmma of one block of a warpgroup."""
    rows = pl.ds(tile.first_row(warpgroup) + place.row, WGMMA_ROWS)
    columns = pl.ds(tile.column_block(warpgroup) * tile.warpgroup_columns + place.column, GROUP)
    plgpu.wgmma(accumulator, scratch.a.at[slot, rows], scratch.w.at[slot, columns].transpose((1, 0)))


def _scale_of_columns(w: QuantisedMatrices, tile: TileShape, coord: TileCoord, column, warpgroup, k, *, pairs_halves: bool):
    """Reads the scale of step k of the 128 columns of a warpgroup that begin at `column`."""
    column_block = coord.column_tile * tile.column_blocks + tile.column_block(warpgroup)
    groups = tile.warpgroup_columns // GROUP // (2 if pairs_halves else 1)
    half, group = divmod(column // GROUP, groups)
    return w.scales[coord.expert, half * (w.scales.shape[1] // 2) + column_block * groups + group, k]
