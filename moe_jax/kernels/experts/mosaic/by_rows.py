"""Rows times their expert's matrix: out[r] = a[r] @ w[e(r)].T or @ w[e(r)], with an epilogue on the accumulator.

A matrix with a low-rank change adds steps to the same sum: out[r] = a[r] @ w[e(r)].T + c[r] @ factor[e(r)].T.

Cost for R rows: 2*R*K*N FLOPs. With tiles of 128 x 256, A and B cross from L2 R*N*K*(1/256 + 1/128) elements.

Kernels `grouped_matmul`, `grouped_matmul_transposed`, `gated_matmul`, and `gated_matmul_backward` of by_rows_backward.py:

    roles     producer WG2 (40 registers)   TMA a[row : row+rows, k : k+64], w[expert, columns of the tile, k : k+64] -> slot
                                            gated_matmul: TMA w twice or four times a slot, gate and up of each warpgroup
                                            with source_of_row: cp.async a[source_of_row[row + r], k : k+64] (row_copies.py)
              consumers WG0, WG1 (232)      wgmma [warpgroup rows] x [warpgroup columns] x 64; then the epilogue by 64 rows
    smem      a stages x rows x 64 | w stages x columns x 64 | out 2 WG x 2 x 64 x 64 | the epilogue's | barriers; all 16-bit
              128 x 256 x 3 stages: a 3 x 16 KiB | w 3 x 32 KiB | out 2 x 2 x 8 KiB | 6 x 8 bytes          = 176 KiB of 227
    barriers  full[slot]    1 arrival per TMA copy (a: 1, or 0 with source_of_row; w: 1, 2 or 4), waited for by both consumers
                            (with ping-pong full[consumer, slot], waited for by that one)
              empty[slot]   1 arrival a consumer that reads the slot (2; with ping-pong 1), waited for by the producer
              landed[slot]  with source_of_row: 128 arrivals, one a thread of the producer; waited for with full[slot]
    invariant the rows of a tile belong to one expert; rows below its last block are not stored
              few tokens: rows after the last token are not loaded, and 8 rows of a block are stored if one of them has a token
              (`Plan.chosen_rows`, chosen_rows.py). The others are unchanged in memory
              an `out` chunk is overwritten only after the previous TMA store has read it
    time      mainloop.py
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.mosaic.chosen_rows import (
    ChosenRows,
    LoadedRows,
    chosen_rows_of,
    loaded_rows,
    store_rows,
    stored_rows,
)
from moe_jax.kernels.experts.mosaic.tile_order import TileCoord, row_tiles, rows_in_group
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.hopper.launch import Named, launch, operand_transforms
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT, STEP, TileProgram, TileShape, run_tiles
from moe_jax.kernels.hopper.pipeline import CONSUMERS, MATMUL_REGISTERS, WGMMA_ROWS, Registers
from moe_jax.kernels.hopper.row_copies import (
    initialize,
    landing_barriers,
    read_sources,
    start_copies,
    wait_for_copies,
)
from moe_jax.kernels.low_rank import RowsChange

CHUNK = 64
"""Columns that an epilogue rounds, stages in shared memory and stores at a time."""


@partial(jax.jit, static_argnames=("tile", "transpose"))
def matmul(
    a: Float[Array, "rows k"],
    w: Float[Array, "experts ..."],
    plan: Plan,
    tile: TileShape,
    *,
    transpose: bool,
    change: RowsChange | None = None,
) -> Float[Array, "rows n"]:
    """Returns a[r] @ w[e].T, or a[r] @ w[e] with `transpose`, e = expert of r. Rows without a pair may be left unwritten."""

    def store(sums, part, write, references):
        (out_ref,) = references.outputs
        for c in range(0, tile.warpgroup_columns, CHUNK):
            write(out_ref, part.column_block * tile.warpgroup_columns + c, sums[:, c : c + CHUNK])

    columns = w.shape[2] if transpose else w.shape[1]
    name = "grouped_matmul_transposed" if transpose else "grouped_matmul"
    epilogue = Epilogue(name, [jax.ShapeDtypeStruct((plan.num_rows, columns), a.dtype)], store)
    return launch_rows(RowsOperands(a, w, change=change), plan, tile, epilogue, transpose=transpose)[0]


@partial(jax.jit, static_argnames=("tile", "keep_h", "activation"))
def matmul_gated(
    operands: "RowsOperands", plan: Plan, tile: TileShape, *, keep_h: bool, activation: Activation = SILU
) -> tuple[Float[Array, "rows 2*inter"] | None, Float[Array, "rows inter"]]:
    """Returns h = a @ w[e].T = [gate | up] and act = activation(gate, up).

    act is computed from the f32 sums before h is rounded. Without `keep_h`, h is None and not written.
    """
    inter, half, dtype = operands.w.shape[1] // 2, tile.warpgroup_columns // 2, operands.a.dtype
    is_whole = operands.bias is None or len(operands.bias) == len(operands.w)

    def store(sums, part, write, references):
        *h_ref, act_ref = references.outputs
        for c in range(0, half, CHUNK):
            gate, up = sums[:, c : c + CHUNK], sums[:, half + c : half + c + CHUNK]
            column = part.column_block * half + c
            if operands.bias is not None:
                # The bias is one layer's, and the expert's index is that in a stack of layers.
                expert = part.expert if is_whole else jax.lax.rem(part.expert, jnp.int32(len(operands.bias)))
                gate = gate + load_bias(references.inputs, expert, column)
                up = up + load_bias(references.inputs, expert, inter + column)
            if keep_h:
                write(h_ref[0], column, gate)
                write(h_ref[0], inter + column, up)
            write(act_ref, column, activation.forward(gate, up, in_kernel=True))

    widths = (2 * inter, inter) if keep_h else (inter,)
    shapes = [jax.ShapeDtypeStruct((plan.num_rows, width), dtype) for width in widths]
    epilogue = Epilogue("gated_matmul", shapes, store, inputs=operands.bias)
    *h, act = launch_rows(operands._replace(bias=None), plan, tile, epilogue, transpose=False, pairs_halves=True)
    return (h[0] if keep_h else None), act


def load_bias(bias: Any, expert: Any, column: Any) -> Float[Array, "64 64"]:
    """Loads CHUNK elements of an expert's bias from `column` on, in f32, broadcast to 64 rows."""
    numbers = plgpu.load(bias.at[expert, pl.ds(column, CHUNK)], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return jax.lax.broadcast_in_dim(numbers.astype(jnp.float32), (WGMMA_ROWS, CHUNK), [1])


class WarpgroupPart(NamedTuple):
    """The 64 rows and the columns of a tile that one epilogue call processes."""

    row: jax.Array
    """The first of the 64 rows, in the whole array."""
    column_block: Any
    """Number of the block of columns in the whole array, in units of `tile.warpgroup_columns`; gate and up count as one."""
    column: Any
    """The block's first column, computed before the tile's steps. In bf16 another register there would cause spills later."""
    warpgroup: Any
    expert: Any
    stored: Any = None
    """`chosen_rows.stored_rows`; None in `prepare`."""


@dataclass(frozen=True)
class Epilogue:
    """The callbacks that convert a tile's sums to outputs, shared by bf16 and FP8 kernels."""

    name: str
    """Name of the whole kernel, in profiles."""
    outputs: list[jax.ShapeDtypeStruct]
    store: Callable[[Any, WarpgroupPart, Callable, Named], None]
    """(sums of 64 rows in f32, part, write, references). write(output reference, column, values) rounds and stores a chunk."""
    inputs: Any = ()
    scratch: Any = ()
    prepare: Callable[[WarpgroupPart, Named], None] = lambda part, references: None
    """Runs before `store`; for a tile's first rows before its first step, for example to start loads that `store` waits for."""
    staged: int = 2
    """Number of chunks that `write` keeps in shared memory. With two, one is filled while the other is being stored."""
    registers: Registers = MATMUL_REGISTERS
    """Only FP8 kernels override it, with the numbers at which ptxas spills least (promoted.py)."""


def epilogue_steps(
    epilogue: Epilogue,
    references: Named,
    out: Any,
    tile: Any,
    plan: Plan,
    chosen: ChosenRows,
    rows_of: Callable[[Any, int], Any],
) -> tuple[Callable, Callable, Callable]:
    """Builds the prologue, has_rows and epilogue callbacks of a `TileProgram` or `PromotedProgram`.

    Args:
        out: [consumers, staged, 64, 64], shared memory of chunks in flight to memory.
        tile: a `TileShape` or `Fp8TileShape`.
        rows_of: (a warpgroup's sums, first row) -> the sums of 64 rows.
    """

    def part_of(coord: TileCoord, warpgroup, row):
        """Returns 64 rows of the warpgroup's part from `row` on, and True if they belong to the expert."""
        first = tile.first_row(warpgroup) + row
        column_block = coord.column_tile * tile.column_blocks + tile.column_block(warpgroup)
        row, column = pl.multiple_of(coord.row, ROW_ALIGNMENT) + first, column_block * tile.warpgroup_columns
        return WarpgroupPart(row, column_block, column, warpgroup, coord.expert), first < coord.num_rows

    def prologue(coord, warpgroup):
        part, has_rows = part_of(coord, warpgroup, 0)
        pl.when(has_rows)(lambda: epilogue.prepare(part, references))

    def store_tile(sums, coord, warpgroup):
        written = 0

        def write(part, output, column, values):
            nonlocal written
            chunk = out.at[warpgroup, written % epilogue.staged]
            # The last tile's stores may have used any chunk; during this tile's steps they have long finished.
            plgpu.wait_smem_to_gmem(min(written, epilogue.staged - 1), wait_read_only=True)
            written += 1
            chunk[...] = values.astype(output.dtype)
            plgpu.commit_smem()
            store_rows(chunk, output, part.row, column, part.stored)

        def store(row, part):
            if row > 0:
                epilogue.prepare(part, references)
            part = part._replace(stored=stored_rows(chosen, plan, coord, part.row))
            epilogue.store(rows_of(sums, row), part, partial(write, part), references)

        for row in range(0, tile.warpgroup_rows, WGMMA_ROWS):
            part, is_of_expert = part_of(coord, warpgroup, row)
            pl.when(is_of_expert)(partial(store, row, part))

    return prologue, lambda coord, warpgroup: part_of(coord, warpgroup, 0)[1], store_tile


class RowsOperands(NamedTuple):
    """The operands of a row kernel: rows a, matrices w, and optional gather indices, LoRA update and bias."""

    a: Any
    """Rows in expert order. If `plan.holds_all_tokens` they may be the tokens themselves, which are fewer than the rows."""
    w: Any
    source_of_row: Any = None
    """The producer gathers a[source_of_row] itself (`row_copies`). The full barrier then signals w's columns, and `landed` the
    rows. None if a's rows are in order."""
    change: RowsChange | None = None
    """The change of the experts of a plan without `layer`. Its rank is a multiple of 64, and its steps come last."""
    bias: Any = None
    """[experts, 2*inter], which `matmul_gated` adds to the sums."""


def launch_rows(
    operands: RowsOperands, plan: Plan, tile: TileShape, epilogue: Epilogue, *, transpose: bool, pairs_halves: bool = False
) -> list[Array]:
    """Launches the row kernel with an epilogue; returns the epilogue's outputs.

    Args:
        pairs_halves: half of a warpgroup's columns come from the first half of w's rows, half from the second half. Gate and up
            of one column are then sums of one thread.
    """
    a, w, source_of_row, change, _ = operands
    if plan.num_rows == 0:
        return [jnp.zeros(output.shape, output.dtype) for output in epilogue.outputs]
    assert change is None or (source_of_row is None and plan.layer is None and not plan.holds_all_tokens)
    summands, dtype = a.shape[1], a.dtype
    num_steps = (summands + (0 if change is None else change.rows.shape[1])) // STEP
    columns = w.shape[2] if transpose else w.shape[1]
    # The last tile may exceed w's columns: TMA reads zeros there and writes nothing.
    column_tiles = -(-columns // tile.columns)
    group = rows_in_group((columns, summands), dtype)
    tiles = row_tiles(plan, tile.rows, column_tiles, group)

    def body(inputs: Named, *references):
        *output_refs, scratch = references
        if scratch.landed is not None:
            initialize(scratch.landed)
        epilogue_refs = Named(outputs=tuple(output_refs), inputs=inputs.epilogue, scratch=scratch.epilogue)

        def locate(index):
            coord = tiles.find(index, *inputs.tiles)
            return num_steps, coord._replace(row=pl.multiple_of(coord.row, ROW_ALIGNMENT))

        def rows_of(accumulator, row):
            return accumulator[row : row + WGMMA_ROWS]

        prologue, has_rows, store_tile = epilogue_steps(
            epilogue, epilogue_refs, scratch.out, tile, plan, inputs.chosen, rows_of
        )
        program = TileProgram(
            locate=locate,
            load=partial(_load, inputs.operands, scratch, tile, loaded, transpose=transpose, pairs_halves=pairs_halves),
            multiply=partial(_multiply, scratch, tile, transpose=transpose),
            epilogue=store_tile,
            prologue=prologue,
            # Half a tile takes less time than a whole one, so cores would no longer read a large matrix in step. Data that one
            # core read would then have left the L2 cache when the next core needs it.
            has_rows=has_rows if group == 1 else lambda coord, warpgroup: True,
        )
        if gathers:
            program = dataclasses.replace(
                program,
                begin=lambda coord: read_sources(inputs.operands.source_of_row, coord.row, tile.rows, a.shape[0]),
                also_wait=lambda step: wait_for_copies(scratch.landed, step, tile.stages),
            )
        run_tiles(tiles.count(*inputs.tiles) * column_tiles, program, tile, scratch.pipe)

    gathers = source_of_row is not None
    loaded = loaded_rows(plan, tile.rows, a.shape[0])
    swizzled = operand_transforms(dtype)
    scratch = Named(
        a=plgpu.SMEM((tile.stages, tile.rows, STEP), dtype, transforms=swizzled),
        # [stages, 64, columns] with `transpose`.
        w=plgpu.SMEM((tile.stages, *((STEP, tile.columns) if transpose else (tile.columns, STEP))), dtype, transforms=swizzled),
        # Chunks on their way to memory.
        out=plgpu.SMEM((CONSUMERS, epilogue.staged, WGMMA_ROWS, CHUNK), dtype, transforms=swizzled),
        epilogue=epilogue.scratch,
        pipe=tile.pipeline(copies=(0 if gathers else 1) + (2 * tile.column_blocks if pairs_halves else 1)),
        # Barriers of gathered rows (row_copies.py); None if TMA copies them.
        landed=landing_barriers(tile.stages) if gathers else None,
    )
    kernel = launch(epilogue.name, body, epilogue.outputs, [scratch], warpgroups=CONSUMERS + 1)
    return kernel(Named(tiles=tiles.arrays, operands=operands, chosen=chosen_rows_of(plan), epilogue=epilogue.inputs))


def _load(
    operands: RowsOperands,
    scratch: Named,
    tile: TileShape,
    loaded: LoadedRows,
    step,
    full_barrier,
    sources,
    *,
    transpose: bool,
    pairs_halves: bool,
) -> None:
    """Starts the copies of one step: rows of a, columns of w."""
    own_steps = operands.a.shape[1] // STEP
    options = dict(transpose=transpose, pairs_halves=pairs_halves)

    def load_own():
        ks = pl.ds(step.k * STEP, STEP)
        if scratch.landed is not None:
            start_copies(operands.a, sources, step.k * STEP, scratch.a.at[step.slot], scratch.landed, step.slot)
        else:
            # Rows past a's end are read as zeros.
            rows = pl.ds(loaded.first_row(step.coord.row), loaded.number)
            target = scratch.a.at[step.slot, pl.ds(0, loaded.number)]
            plgpu.copy_gmem_to_smem(operands.a.at[rows, ks], target, full_barrier)
        _load_columns(operands.w, scratch, tile, step, ks, full_barrier, **options)

    def load_change():
        ks, rows = pl.ds((step.k - own_steps) * STEP, STEP), pl.ds(step.coord.row, tile.rows)
        plgpu.copy_gmem_to_smem(operands.change.rows.at[rows, ks], scratch.a.at[step.slot], full_barrier)
        _load_columns(operands.change.factor, scratch, tile, step, ks, full_barrier, **options)

    if operands.change is None:
        load_own()
    else:
        pl.when(step.k < own_steps)(load_own)
        pl.when(step.k >= own_steps)(load_change)


def _load_columns(w, scratch: Named, tile: TileShape, step, ks, full_barrier, *, transpose: bool, pairs_halves: bool) -> None:
    """Starts the copies of the tile's columns of w, summands `ks`."""
    coord, _, slot = step
    if pairs_halves:
        half, inter = tile.warpgroup_columns // 2, w.shape[1] // 2
        for i in range(2 * tile.column_blocks):
            block = coord.column_tile * tile.column_blocks + i // 2
            source = w.at[coord.expert, pl.ds(i % 2 * inter + block * half, half), ks]
            plgpu.copy_gmem_to_smem(source, scratch.w.at[slot, pl.ds(i * half, half)], full_barrier)
    else:
        ns = pl.ds(coord.column_tile * tile.columns, tile.columns)
        source = w.at[coord.expert, ks, ns] if transpose else w.at[coord.expert, ns, ks]
        plgpu.copy_gmem_to_smem(source, scratch.w.at[slot], full_barrier)


def _multiply(scratch: Named, tile: TileShape, accumulator, step, warpgroup, *, transpose: bool) -> None:
    """Issues the wgmma of a warpgroup's rows and columns of one step."""
    rows = pl.ds(tile.first_row(warpgroup), tile.warpgroup_rows)
    columns = pl.ds(tile.column_block(warpgroup) * tile.warpgroup_columns, tile.warpgroup_columns)
    w = scratch.w.at[step.slot, :, columns] if transpose else scratch.w.at[step.slot, columns].transpose((1, 0))
    plgpu.wgmma(accumulator, scratch.a.at[step.slot, rows], w)
