"""Rows times their expert's matrix: out[r] = a[r] @ w[e(r)].T or @ w[e(r)], with what follows it done on the accumulator.

Cost for R rows: 2*R*K*N FLOPs; with tiles of 128 x 256, A and B cross from L2 R*N*K*(1/256 + 1/128) elements.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts.mosaic.row_tiles import row_tiles
from moe_jax.kernels.experts.mosaic.tile_order import rows_in_group
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
from moe_jax.kernels.hopper.row_copies import (
    initialize,
    landing_barriers,
    read_sources,
    start_copies,
    wait_for_copies,
)

CHUNK = 64
"""Columns that an epilogue rounds, stages in shared memory and stores at a time."""


@partial(jax.jit, static_argnames=("tile", "transpose"))
def matmul(
    a: Float[Array, "rows k"], w: Float[Array, "experts ..."], plan: Plan, tile: Tile, *, transpose: bool
) -> Float[Array, "rows n"]:
    """out[r] = a[r] @ w[e].T, or @ w[e] with `transpose`. Rows of no expert are left unwritten."""

    def store(accumulator, place, warpgroup, write, references):
        for c in range(0, tile.own_columns, CHUNK):
            write(references[0], place.part * tile.own_columns + c, accumulator[:, c : c + CHUNK])

    columns = w.shape[2] if transpose else w.shape[1]
    name = "grouped_matmul_transposed" if transpose else "grouped_matmul"
    epilogue = Epilogue(name, [jax.ShapeDtypeStruct((plan.num_rows, columns), a.dtype)], store)
    return launch_rows(a, w, plan, tile, epilogue, transpose=transpose)[0]


@partial(jax.jit, static_argnames=("tile", "keep_h"))
def matmul_gated_silu(
    a: Float[Array, "sources k"],
    w: Float[Array, "experts 2*inter k"],
    plan: Plan,
    tile: Tile,
    *,
    keep_h: bool,
    source_of_row: Int[Array, "rows"] | None = None,
) -> tuple[Float[Array, "rows 2*inter"] | None, Float[Array, "rows inter"]]:
    """h = a @ w[e].T = [gate | up] and act = silu(gate) * up, computed from the f32 sums before they are rounded to h; without
    `keep_h` h is None and not written. With source_of_row, a[source_of_row] stands in a's place."""
    inter, half = w.shape[1] // 2, tile.own_columns // 2

    def store(accumulator, place, warpgroup, write, references):
        *h_ref, act_ref = references
        for c in range(0, half, CHUNK):
            gate, up = accumulator[:, c : c + CHUNK], accumulator[:, half + c : half + c + CHUNK]
            column = place.part * half + c
            if keep_h:
                write(h_ref[0], column, gate)
                write(h_ref[0], inter + column, up)
            write(act_ref, column, gate / (1 + jnp.exp(-gate)) * up)

    widths = (2 * inter, inter) if keep_h else (inter,)
    shapes = [jax.ShapeDtypeStruct((plan.num_rows, width), a.dtype) for width in widths]
    epilogue = Epilogue("gated_matmul", shapes, store)
    *h, act = launch_rows(a, w, plan, tile, epilogue, transpose=False, halves=True, source_of_row=source_of_row)
    return (h[0] if keep_h else None), act


@dataclass(frozen=True)
class Epilogue:
    """What becomes of a tile's sums. References are those of the outputs, then of the inputs, then of the scratch."""

    name: str
    """Of the whole kernel, for profiles."""
    outputs: list[jax.ShapeDtypeStruct]
    store: Callable
    """(sums of 64 rows, place, warpgroup, write, references); write(output reference, column, values) rounds and stores a
    chunk."""
    inputs: tuple[Array, ...] = ()
    scratch: tuple = ()
    prepare: Callable = lambda place, warpgroup, references: None
    """Runs before `store`, for a tile's first rows before its first step, for example to start loads that `store` waits for."""
    staged: int = 2
    """Chunks that `write` keeps in shared memory: with two, one is filled while the other is being stored."""


def launch_rows(
    a: Array,
    w: Array,
    plan: Plan,
    tile: Tile,
    epilogue: Epilogue,
    *,
    transpose: bool,
    halves: bool = False,
    source_of_row: Array | None = None,
) -> list[Array]:
    """`halves`: a warpgroup's columns are as many of the first half of w's rows as of the second, so that gate meets up.

    Where `plan.holds_all_tokens`, `a` may be the tokens themselves, which are fewer than the rows. With source_of_row the
    loading warpgroup gathers the rows of `a` (`row_copies`): `full` then says that the columns of w are there, `landed` that
    the rows are.
    """
    summands = a.shape[1]
    are_tokens = plan.holds_all_tokens and a.shape[0] < plan.num_rows
    columns = w.shape[2] if transpose else w.shape[1]
    # Of the last tile's columns those beyond w's are read as zeros and not written.
    column_tiles = -(-columns // tile.columns)
    half = tile.own_columns // 2
    dtype = a.dtype
    group = rows_in_group((columns, summands), dtype)
    tiles = row_tiles(plan, tile.rows, column_tiles, group)

    gathers = source_of_row is not None

    def body(*references):
        tiles_refs, (a_ref, w_ref, *rest) = references[: len(tiles.arrays)], references[len(tiles.arrays) :]
        if gathers:
            source_ref, *rest, landed = rest
            initialize(landed)
        num_inputs, num_outputs = len(epilogue.inputs), len(epilogue.outputs)
        input_refs, output_refs, scratch_refs = (
            rest[:num_inputs],
            rest[num_inputs : num_inputs + num_outputs],
            rest[num_inputs + num_outputs :],
        )
        a_smem, b_smem, out_smem, *epilogue_scratch, pipe = scratch_refs
        references = (*output_refs, *input_refs, *epilogue_scratch)

        def describe(index):
            place = tiles.find(index, *tiles_refs)
            return summands // STEP, dataclasses.replace(place, row=pl.multiple_of(place.row, ROW_ALIGNMENT))

        def load(place, k, slot, barrier, *sources):
            ks = pl.ds(k * STEP, STEP)
            if gathers:
                start_copies(a_ref, *sources, k * STEP, a_smem.at[slot], landed, slot)
            else:
                # Rows beyond a's are read as zeros.
                rows = pl.ds(0 if are_tokens else place.row, tile.rows)
                plgpu.copy_gmem_to_smem(a_ref.at[rows, ks], a_smem.at[slot], barrier)
            if halves:
                for i in range(2 * tile.column_parts):
                    part = place.part * tile.column_parts + i // 2
                    source = w_ref.at[place.expert, pl.ds(i % 2 * (columns // 2) + part * half, half), ks]
                    plgpu.copy_gmem_to_smem(source, b_smem.at[slot, pl.ds(i * half, half)], barrier)
            else:
                ns = pl.ds(place.part * tile.columns, tile.columns)
                source = w_ref.at[place.expert, ks, ns] if transpose else w_ref.at[place.expert, ns, ks]
                plgpu.copy_gmem_to_smem(source, b_smem.at[slot], barrier)

        def multiply(accumulator, place, k, slot, warpgroup):
            a_own = a_smem.at[slot, pl.ds(tile.first_row(warpgroup), tile.own_rows)]
            own_columns = pl.ds(tile.column_part(warpgroup) * tile.own_columns, tile.own_columns)
            b_own = b_smem.at[slot, :, own_columns] if transpose else b_smem.at[slot, own_columns].transpose((1, 0))
            plgpu.wgmma(accumulator, a_own, b_own)

        def own(place, warpgroup, row):
            """64 rows of the warpgroup's share, and whether they are the expert's: those below its last block are not."""
            first = tile.first_row(warpgroup) + row
            part = place.part * tile.column_parts + tile.column_part(warpgroup)
            return dataclasses.replace(place, row=place.row + first, part=part), first < place.num_rows

        def prepare(place, warpgroup):
            place, has_rows = own(place, warpgroup, 0)
            pl.when(has_rows)(lambda: epilogue.prepare(place, warpgroup, references))

        def multiplies(place, warpgroup):
            # Half a tile takes less time than a whole one, and the cores no longer read a large matrix in step: what one has
            # read from memory has left the L2 cache when the next needs it.
            return own(place, warpgroup, 0)[1] if group == 1 else True

        def finish(accumulator, place, warpgroup):
            written = 0

            def write(place, output, column, values):
                nonlocal written
                slot = out_smem.at[warpgroup, written % epilogue.staged]
                # The last tile's stores may have used any slot; during this tile's steps they have long finished.
                plgpu.wait_smem_to_gmem(min(written, epilogue.staged - 1), wait_read_only=True)
                written += 1
                slot[...] = values.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(slot, output.at[pl.ds(place.row, WGMMA_ROWS), pl.ds(column, CHUNK)])

            def store(row, place):
                if row > 0:
                    epilogue.prepare(place, warpgroup, references)
                sums = accumulator[row : row + WGMMA_ROWS]
                epilogue.store(sums, place, warpgroup, partial(write, place), references)

            for row in range(0, tile.own_rows, WGMMA_ROWS):
                own_place, has_rows = own(place, warpgroup, row)
                pl.when(has_rows)(partial(store, row, own_place))

        of_copies = {
            "begin": lambda place: (read_sources(source_ref, place.row, tile.rows),),
            "also_wait": lambda step: wait_for_copies(landed, step, tile.stages),
        }
        run_tiles(
            tiles.count(*tiles_refs) * column_tiles,
            describe,
            load,
            multiply,
            finish,
            tile_shape=tile,
            pipe=pipe,
            prepare=prepare,
            multiplies=multiplies,
            **(of_copies if gathers else {}),
        )

    swizzled = operand_transforms(dtype)
    b_shape = (STEP, tile.columns) if transpose else (tile.columns, STEP)
    # Swizzled tiles come first: each starts at a multiple of 1024 bytes.
    scratch = [
        plgpu.SMEM((tile.stages, tile.rows, STEP), dtype, transforms=swizzled),
        plgpu.SMEM((tile.stages, *b_shape), dtype, transforms=swizzled),
        plgpu.SMEM((CONSUMERS, epilogue.staged, WGMMA_ROWS, CHUNK), dtype, transforms=swizzled),
        *epilogue.scratch,
        ring_barriers(tile, copies=(0 if gathers else 1) + (2 * tile.column_parts if halves else 1)),
        *([landing_barriers(tile.stages)] if gathers else []),
    ]
    kernel = launch(epilogue.name, body, epilogue.outputs, scratch, warpgroups=CONSUMERS + 1)
    return kernel(*tiles.arrays, a, w, *([source_of_row] if gathers else []), *epilogue.inputs)
