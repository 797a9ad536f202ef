"""The experts of a few (token, expert) pairs, for decoding: each pair reads its expert's weights separately, without a plan.

Cost: the time to read the weights, 3*I*D elements per pair. A tile is 16 columns of gate and the same 16 of up, or 32 columns
of down, of one pair. All cores then read about the same amount. A pair's row is in registers, copied to all 64 rows of wgmma:
the kernels for many rows yield the same bits.

Kernels `gated_matmul_of_pairs` and `matmul_of_pairs`, with k steps of `step` = 256 summands (or the largest divisor):

    roles     producer WG2 (40 registers)   TMA w[expert, 2 x 16 columns, k : k+step] -> slot
              consumers WG0, WG1 (232)      ping-pong; the pair's row from shared memory to registers, wgmma 64 x 32 x step
    smem      w up to 6 x 32 x step | row 2 WG x summands | out 2 WG x 64 x 32 | barriers, all 16-bit
              step 256, 2048 summands, 6 stages: w 6 x 16 KiB | row 2 x 4 KiB | out 2 x 4 KiB                = 112 KiB of 227
    barriers  full[consumer, slot]   2 arrivals (TMA of both halves), waited for by that consumer
              empty[slot]            1 arrival (the consumer that read it), waited for by the producer
    invariant no wgmma is in flight when the next step begins, because that step overwrites the row's registers
              a pair without an expert has no steps and yields zeros
    time      mainloop.py, ping-pong, with one thread block a core
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.hopper.interpreter import is_interpreted, operand_staging, wgmma_registers
from moe_jax.kernels.hopper.launch import Named, launch, operand_transforms, store
from moe_jax.kernels.hopper.mainloop import STEP, TileProgram, TileShape, run_tiles
from moe_jax.kernels.hopper.pipeline import CONSUMERS, SHARED_MEMORY, WGMMA_ROWS

COLUMNS = 32
"""Rows of w that a tile reads: half from gate and half from up, so a multiple of 16."""

WIDEST_STEP = 256
"""Summands of a step, if they divide the sum: half a KiB of each row of the weights at a time."""

MOST_PAIRS = 32

WIDEST_ROW = 32768
"""Elements of the longest row. One such row for each consumer leaves room for a pipeline of 5 stages."""

MOST_STAGES = 6
"""More copies in flight would delay the copies that are needed first (measured: docs/log/engine.md)."""

RESERVED = 4096
"""Bytes of shared memory reserved for barriers and Pallas."""


def takes(topk_experts: Int[Array, "tokens k"], num_experts: int, hidden: int, inter: int) -> bool:
    """Returns True if there are few enough pairs, of supported sizes, for these kernels.

    Few: at most MOST_PAIRS, and few enough, relative to the number of experts, that tokens seldom share one.
    """
    tokens, k = topk_experts.shape
    is_few = 0 < tokens * k <= MOST_PAIRS and 4 * (tokens - 1) * k <= num_experts
    # 128 threads copy a row.
    return is_few and all(0 < size <= WIDEST_ROW and size % 128 == 0 for size in (hidden, inter))


@partial(jax.jit, static_argnames="activation")
def experts_of_pairs(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "experts 2*inter hidden"],
    w_down: Float[Array, "experts hidden inter"],
    topk_experts: Int[Array, "tokens k"],
    activation: Activation = SILU,
) -> Float[Array, "tokens*k hidden"]:
    """Returns rows[p] = w_down[e] activation(gate, up), (gate, up) = w_gate_up[e] x[p // k], e being the expert of pair p.

    A row is zero if e is no expert.
    """
    experts = topk_experts.reshape(-1)
    act = _matmul_of_pairs("gated_matmul_of_pairs", x, w_gate_up, experts, topk_experts.shape[1], activation)
    return _matmul_of_pairs("matmul_of_pairs", act, w_down, experts, 1, None)


def _matmul_of_pairs(
    name: str,
    rows: Float[Array, "sources in"],
    w: Float[Array, "experts out in"],
    experts: Int[Array, "pairs"],
    pairs_of_row: int,
    activation: Activation | None,
) -> Float[Array, "pairs columns"]:
    """w[e of pair p] rows[p // pairs_of_row]; with an activation, the activation of these columns' two halves."""
    is_gated = activation is not None
    (num_experts, out, summands), num_pairs, dtype = w.shape, experts.size, rows.dtype
    half = COLUMNS // 2
    columns = out // 2 if is_gated else out
    tile_columns = half if is_gated else COLUMNS
    column_tiles, second_half = columns // tile_columns, columns if is_gated else half
    # A wider step would have other bits in the interpreter, which sums a step's products before adding them to the total.
    step_size = math.gcd(summands, STEP if is_interpreted() else WIDEST_STEP)
    slot_bytes, row_bytes, out_bytes = (n * dtype.itemsize for n in (COLUMNS * step_size, summands, WGMMA_ROWS * COLUMNS))
    stages = min((SHARED_MEMORY - CONSUMERS * (row_bytes + out_bytes) - RESERVED) // slot_bytes, MOST_STAGES)
    tile = TileShape(WGMMA_ROWS, COLUMNS, stages, ping_pong=True)

    def body(experts_ref, rows_ref, w_ref, out_ref, scratch: Named):
        def locate(index):
            pair, column_tile = lax.div(index, jnp.int32(column_tiles)), lax.rem(index, jnp.int32(column_tiles))
            expert = experts_ref[pair]
            is_expert = (expert >= 0) & (expert < num_experts)
            steps = jnp.where(is_expert, jnp.int32(summands // step_size), 0)
            return steps, Named(pair=pair, column=column_tile * tile_columns, expert=jnp.where(is_expert, expert, 0))

        def load(step, full_barrier, _):
            first = step.coord.column
            for i, column in enumerate((first, first + second_half)):
                source = w_ref.at[step.coord.expert, pl.ds(column, half), pl.ds(step.k * step_size, step_size)]
                plgpu.copy_gmem_to_smem(source, scratch.w.at[step.slot, pl.ds(i * half, half)], full_barrier)

        def take_row(coord, warpgroup):
            scratch.row[warpgroup] = rows_ref[lax.div(coord.pair, jnp.int32(pairs_of_row))]

        def store_row(accumulator, coord, warpgroup):
            if activation is not None:
                accumulator = activation.forward(accumulator[:, :half], accumulator[:, half:], in_kernel=True)
            # A sum or maximum over rows would use scratch memory that Pallas shares between both warpgroups.
            tile_out = scratch.out.at[warpgroup, :, pl.ds(0, tile_columns)]
            store(tile_out, accumulator.astype(dtype))
            row = plgpu.load(tile_out.at[0], layout=plgpu.Layout.WGMMA.reduce(0))
            store(out_ref.at[coord.pair, pl.ds(coord.column, tile_columns)], row)

        program = TileProgram(
            locate=locate,
            load=load,
            multiply=partial(_multiply, scratch, step_size),
            epilogue=store_row,
            prologue=take_row,
            wgmmas_in_flight=0,
        )
        run_tiles(num_pairs * column_tiles, program, tile, scratch.pipe)

    scratch = Named(
        w=plgpu.SMEM((stages, COLUMNS, step_size), dtype, transforms=operand_transforms(dtype)),
        # The row of the pair that a consumer processes.
        row=plgpu.SMEM((CONSUMERS, summands), dtype),
        # A tile's sums: all 64 rows are equal, and one is stored.
        out=plgpu.SMEM((CONSUMERS, WGMMA_ROWS, COLUMNS), dtype),
        pipe=tile.pipeline(copies=2),
        # For the interpreter; None on a GPU.
        staging=operand_staging((CONSUMERS, WGMMA_ROWS, step_size), dtype),
    )
    outputs = [jax.ShapeDtypeStruct((num_pairs, columns), dtype)]
    # With two blocks per core the second would start after the first, without prefetching.
    kernel = launch(name, body, outputs, [scratch], warpgroups=CONSUMERS + 1, blocks_per_core=1)
    return kernel(experts, rows, w)[0]


def _multiply(scratch: Named, step_size: int, accumulator, step, warpgroup) -> None:
    """Issues the wgmma of one step, with the pair's row in each of the 64 rows of the left operand."""
    summands = plgpu.load(scratch.row.at[warpgroup, pl.ds(step.k * step_size, step_size)], layout=plgpu.Layout.WGMMA.reduce(0))
    row = plgpu.layout_cast(lax.broadcast_in_dim(summands, (WGMMA_ROWS, step_size), (1,)), plgpu.Layout.WGMMA)
    staging = None if scratch.staging is None else scratch.staging.at[warpgroup]
    wgmma_registers(accumulator, row, scratch.w.at[step.slot].transpose((1, 0)), staging)
