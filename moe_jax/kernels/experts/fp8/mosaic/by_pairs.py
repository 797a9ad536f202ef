"""The experts of a few (token, expert) pairs in FP8, for decoding: each pair reads its expert's weights separately.

The kernels of `experts/mosaic/by_pairs.py` with promoted sums. The first rounds the pair's row of x, the second its row of act,
which is f32 in between. There is no plan, and no separate rounding kernel. Bits equal the row kernels'.

Cost: the time to read the weights, 3*I*D bytes a pair.

Kernels `fp8_gated_matmul_of_pairs` and `fp8_matmul_of_pairs`, with slots of up to 4 steps of 128 summands:

    roles     producer WG2                  TMA w[expert, 2 x 16 columns, summands of a slot] -> slot, and the scales of both
              consumers WG0, WG1            ping-pong; round the pair's row into shared memory; for each step the row to
                                            registers, wgmma 64 x 16 x 128 twice, promotion (promoted.py)
    smem      w up to 6 x 32 x 512, e4m3 | row 2 WG x summands, e4m3 | out 2 WG x 64 x 32, f32 | scales | barriers
    barriers  full[consumer, slot]   4 arrivals (TMA of both halves and of their scales), waited for by that consumer
              empty[slot]            1 arrival (the consumer that read it), waited for by the producer
    invariant a warpgroup's row is overwritten only after all its warps have read the last one
              a pair without an expert multiplies nothing and yields zeros
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int

from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.fp8.mosaic.promoted import (
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
from moe_jax.kernels.experts.fp8.mosaic.round_groups import GROUPS_LAYOUT, rounded_group
from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedMatrices
from moe_jax.kernels.experts.mosaic.by_pairs import COLUMNS, MOST_STAGES
from moe_jax.kernels.hopper.interpreter import operand_staging, wgmma_registers
from moe_jax.kernels.hopper.launch import Named, launch, operand_transforms, store
from moe_jax.kernels.hopper.pipeline import CONSUMERS, WGMMA_ROWS, Registers

F8 = jnp.float8_e4m3fn

HALF = COLUMNS // 2
"""Columns of gate, and of up; a block of a tile."""

GROUPS_AT_A_TIME = 8
"""Groups of a row that a warpgroup rounds together: the minimum of GROUPS_LAYOUT."""


@partial(jax.jit, static_argnames="activation")
def experts_of_pairs(
    x: BFloat16[Array, "tokens hidden"],
    w_gate_up: QuantisedMatrices,
    w_down: QuantisedMatrices,
    topk_experts: Int[Array, "tokens k"],
    activation: Activation = SILU,
) -> BFloat16[Array, "tokens*k hidden"]:
    """Returns rows[p] = w_down[e] activation(gate, up), (gate, up) = w_gate_up[e] x[p // k], e being the expert of pair p.

    Matrices are [experts, ...]. A row is zero if e is not an expert.
    """
    experts, k = topk_experts.reshape(-1), topk_experts.shape[1]
    groups = x.reshape(-1, GROUP)
    # Groups are rounded 8 at a time. Padding after the last row may be any number.
    groups = jnp.pad(groups, ((0, -(x.shape[1] // GROUP) % GROUPS_AT_A_TIME), (0, 0)))
    act = _matmul_of_pairs("fp8_gated_matmul_of_pairs", groups, w_gate_up, experts, k, activation)
    return _matmul_of_pairs("fp8_matmul_of_pairs", act, w_down, experts, 1, None)


def _matmul_of_pairs(
    name: str,
    rows: Float[Array, "groups 128"],
    w: QuantisedMatrices,
    experts: Int[Array, "pairs"],
    pairs_of_row: int,
    activation: Activation | None,
) -> Array:
    """w[e of pair p] rows[p // pairs_of_row] in bf16; with an activation, the activation of these columns' two halves.

    The result of a gated product is f32 groups, like `rows`, padded for the last groups of a row.
    """
    is_gated = activation is not None
    num_experts, out, summands = w.values.shape
    num_pairs, groups = experts.size, summands // GROUP
    columns = out // 2 if is_gated else out
    tile_columns = HALF if is_gated else COLUMNS
    column_tiles, second_half = columns // tile_columns, columns if is_gated else HALF
    steps = math.gcd(groups, PIECE)
    tile = Fp8TileShape(WGMMA_ROWS, COLUMNS, MOST_STAGES, ping_pong=True, steps_of_slot=steps, block_columns=HALF)
    rounded_groups = -(-groups // GROUPS_AT_A_TIME) * GROUPS_AT_A_TIME

    def body(inputs: Named, out_ref, scratch: Named):
        def locate(index):
            pair, column_tile = lax.div(index, jnp.int32(column_tiles)), lax.rem(index, jnp.int32(column_tiles))
            expert = inputs.experts[pair]
            has_expert = (expert >= 0) & (expert < num_experts)
            return Named(
                pair=pair,
                column=column_tile * tile_columns,
                expert=jnp.where(has_expert, expert, 0),
                has_expert=has_expert.astype(jnp.int32),
            )

        def load(coord, number, slot, full_barrier):
            # The coordinates are loop-carried, so nothing is known about them at compile time.
            first = pl.multiple_of(coord.column, HALF)
            for i, column in enumerate((first, first + second_half)):
                ks = pl.ds(number * steps * STEP, steps * STEP)
                source = inputs.w.at[coord.expert, pl.ds(column, HALF), ks]
                plgpu.copy_gmem_to_smem(source, scratch.w.at[slot, pl.ds(i * HALF, HALF)], full_barrier)
                group = pl.ds(lax.div(column, jnp.int32(GROUP)), 1)
                target = scratch.column_scales.at[slot, i, pl.ds(0, 1)]
                plgpu.copy_gmem_to_smem(inputs.scales.at[coord.expert, group, piece_of(number, steps)], target, full_barrier)

        def round_row(coord, warpgroup):
            # Wait until all warps have read the last row.
            plgpu.commit_smem()
            first = lax.div(coord.pair, jnp.int32(pairs_of_row)) * groups
            for i in range(0, rounded_groups, GROUPS_AT_A_TIME):
                source = inputs.rows.at[pl.ds(first + i, GROUPS_AT_A_TIME), pl.ds(0, GROUP)]
                piece = plgpu.load(source, layout=GROUPS_LAYOUT, optimized=False)
                values, scales = rounded_group(piece.astype(jnp.float32))
                scratch.row[warpgroup, pl.ds(i, GROUPS_AT_A_TIME)] = values
                scratch.row_scales[warpgroup, pl.ds(i, GROUPS_AT_A_TIME)] = scales
            plgpu.commit_smem()

        def factor(step: SlotStep, place: Place, warpgroup):
            of_row = scratch.row_scales[warpgroup, step.number * steps + step.step]
            return of_row * scratch.column_scales[step.slot, place.column // HALF, 0, place_in_piece(step, steps)]

        def store_row(sums, coord, warpgroup):
            first, second = sums.values()
            halves = [first, second] if activation is None else [activation.forward(first, second, in_kernel=True)]
            for i, half in enumerate(halves):
                tile_out = scratch.out.at[warpgroup, :, pl.ds(i * HALF, HALF)]
                store(tile_out, half)
                row = plgpu.load(tile_out.at[0], layout=plgpu.Layout.WGMMA.reduce(0))
                if is_gated:
                    group = coord.pair * (columns // GROUP) + lax.div(coord.column, jnp.int32(GROUP))
                    store(out_ref.at[group, pl.ds(lax.rem(coord.column, jnp.int32(GROUP)), HALF)], row)
                else:
                    store(out_ref.at[coord.pair, pl.ds(coord.column + i * HALF, HALF)], row.astype(jnp.bfloat16))

        program = PromotedProgram(
            locate=locate,
            load=load,
            multiply=partial(_multiply, scratch, steps),
            factor=factor,
            prologue=round_row,
            epilogue=store_row,
            has_rows=lambda coord, warpgroup: coord.has_expert != 0,
        )
        registers = Registers(producer=72, consumer=208)
        run_tiles(jnp.int32(num_pairs * column_tiles), groups // steps, program, tile, scratch.pipe, registers)

    scratch = Named(
        w=plgpu.SMEM((tile.stages, COLUMNS, steps * STEP), F8, transforms=operand_transforms(F8, STEP)),
        # The row of the pair that a consumer works on.
        row=plgpu.SMEM((CONSUMERS, rounded_groups, GROUP), F8),
        row_scales=plgpu.SMEM((CONSUMERS, -(-rounded_groups // 32) * 32), jnp.float32),
        # A piece of scales for each half.
        column_scales=plgpu.SMEM((tile.stages, 2, LINES, PIECE), jnp.float32),
        # A tile's sums: all 64 rows are equal, and one is stored.
        out=plgpu.SMEM((CONSUMERS, WGMMA_ROWS, COLUMNS), jnp.float32),
        pipe=tile.pipeline(copies=4),
        # For the interpreter; None on a GPU.
        staging=operand_staging((CONSUMERS, WGMMA_ROWS, STEP), F8),
    )
    if is_gated:
        of_next = columns // GROUP
        like = jax.ShapeDtypeStruct((num_pairs * of_next + -of_next % GROUPS_AT_A_TIME, GROUP), jnp.float32)
    else:
        like = jax.ShapeDtypeStruct((num_pairs, columns), jnp.bfloat16)
    # With two blocks per core the second would start after the first, without prefetching.
    kernel = launch(name, body, [like], [scratch], warpgroups=CONSUMERS + 1, blocks_per_core=1)
    return kernel(Named(experts=experts, rows=rows, w=w.values, scales=in_pieces(w.scales)))[0]


def _multiply(scratch: Named, steps: int, accumulator, step: SlotStep, place: Place, warpgroup) -> None:
    """Issues the wgmma of one block and step, with the pair's row in each of the 64 rows of the left operand."""
    layout = plgpu.Layout.WGMMA_8BIT
    group = scratch.row.at[warpgroup, step.number * steps + step.step]
    summands = plgpu.load(group, layout=layout.reduce(0), optimized=False)
    row = plgpu.layout_cast(lax.broadcast_in_dim(summands, (WGMMA_ROWS, STEP), (1,)), layout)
    columns = scratch.w.at[step.slot, pl.ds(place.column, HALF), pl.ds(step.step * STEP, STEP)]
    staging = None if scratch.staging is None else scratch.staging.at[warpgroup]
    wgmma_registers(accumulator, row, columns.transpose((1, 0)), staging)
