"""The experts of a few pairs of a token and an expert, as decoding needs them: each pair reads its expert's weights for itself.

The time is that of reading them, 3*I*D elements a pair, and no plan is made before. A unit of work is 16 columns of gate and
the same 16 of up, or 32 columns of down, of one pair: so many that every core reads about as much.

A pair's row stands in registers, the same in all 64 rows of wgmma: the bits are those of the kernels for many rows.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moe_jax.kernels.experts.mosaic.tile_limits import SHARED_MEMORY
from moe_jax.kernels.hopper.interpreter import is_interpreted, wgmma_registers
from moe_jax.kernels.hopper.launch import launch, operand_transforms
from moe_jax.kernels.hopper.mainloop import CONSUMERS, WGMMA_ROWS, Tile, ring_barriers, run_tiles

COLUMNS = 32
"""Rows of w that a unit reads; a multiple of 16 as gate and up have half of them each."""

WIDEST_STEP = 256
"""Summands of a step of the ring, if they divide all: half a KiB of each row of the weights at a time."""

MOST_PAIRS = 32

WIDEST_ROW = 32768
"""Elements of which a row for each multiplying warpgroup leaves room for a ring of 5 stages."""

MOST_STAGES = 6
"""Copies on their way beyond these are waited for by those that are needed first (measured: docs/kernels.md)."""

RESERVED = 4096
"""Bytes of shared memory for barriers and for what Pallas takes."""


def takes(topk_experts: Int[Array, "tokens k"], w_down: Float[Array, "experts hidden inter"]) -> bool:
    """Whether these are few pairs, of sizes that the kernel can take.

    Few: at most MOST_PAIRS, and so few beside the experts that tokens seldom share one.
    """
    (tokens, k), (num_experts, hidden, inter) = topk_experts.shape, w_down.shape
    is_few = 0 < tokens * k <= MOST_PAIRS and 4 * (tokens - 1) * k <= num_experts
    # 128 threads copy a row.
    return is_few and all(0 < size <= WIDEST_ROW and size % 128 == 0 for size in (hidden, inter))


@jax.jit
def experts_of_pairs(
    x: Float[Array, "tokens hidden"],
    w_gate_up: Float[Array, "experts 2*inter hidden"],
    w_down: Float[Array, "experts hidden inter"],
    topk_experts: Int[Array, "tokens k"],
) -> Float[Array, "tokens*k hidden"]:
    """rows[p] = w_down[e] (silu(gate) * up), (gate, up) = w_gate_up[e] x[p // k], e of pair p. Zero where e is no expert."""
    experts = topk_experts.reshape(-1)
    act = _matmul_of_pairs("gated_matmul_of_pairs", x, w_gate_up, experts, topk_experts.shape[1], is_gated=True)
    return _matmul_of_pairs("matmul_of_pairs", act, w_down, experts, 1, is_gated=False)


def _matmul_of_pairs(
    name: str,
    rows: Float[Array, "sources in"],
    w: Float[Array, "experts out in"],
    experts: Int[Array, "pairs"],
    pairs_of_row: int,
    *,
    is_gated: bool,
) -> Float[Array, "pairs columns"]:
    """w[e of pair p] rows[p // pairs_of_row]; if gated, silu of the first half of these columns times the second half."""
    (num_experts, out, summands), num_pairs, dtype = w.shape, experts.size, rows.dtype
    half = COLUMNS // 2
    columns = out // 2 if is_gated else out
    unit_columns = half if is_gated else COLUMNS
    parts, second_half = columns // unit_columns, columns if is_gated else half
    step = math.gcd(summands, WIDEST_STEP)
    slot, row, output = (n * dtype.itemsize for n in (COLUMNS * step, summands, WGMMA_ROWS * COLUMNS))
    stages = min((SHARED_MEMORY - CONSUMERS * (row + output) - RESERVED) // slot, MOST_STAGES)
    tile = Tile(WGMMA_ROWS, COLUMNS, stages, by_turns=True)

    def body(experts_ref, rows_ref, w_ref, out_ref, b_smem, row_smem, output_smem, pipe, *staging):
        def describe(unit):
            pair, part = lax.div(unit, jnp.int32(parts)), lax.rem(unit, jnp.int32(parts))
            expert = experts_ref[pair]
            is_expert = (expert >= 0) & (expert < num_experts)
            steps = jnp.where(is_expert, jnp.int32(summands // step), 0)
            return steps, (pair, part * unit_columns, jnp.where(is_expert, expert, 0))

        def load(unit, k, slot, barrier):
            _, first, expert = unit
            for i, row in enumerate((first, first + second_half)):
                source = w_ref.at[expert, pl.ds(row, half), pl.ds(k * step, step)]
                plgpu.copy_gmem_to_smem(source, b_smem.at[slot, pl.ds(i * half, half)], barrier)

        def take_row(unit, warpgroup):
            row_smem[warpgroup] = rows_ref[lax.div(unit[0], jnp.int32(pairs_of_row))]

        def multiply(accumulator, unit, k, slot, warpgroup):
            own = plgpu.load(row_smem.at[warpgroup, pl.ds(k * step, step)], layout=plgpu.Layout.WGMMA.reduce(0))
            row = plgpu.layout_cast(lax.broadcast_in_dim(own, (WGMMA_ROWS, step), (1,)), plgpu.Layout.WGMMA)
            own_staging = staging[0].at[warpgroup] if staging else None
            wgmma_registers(accumulator, row, b_smem.at[slot].transpose((1, 0)), own_staging)

        def store(accumulator, unit, warpgroup):
            pair, first, _ = unit
            if is_gated:
                gate, up = accumulator[:, :half], accumulator[:, half:]
                accumulator = gate / (1 + jnp.exp(-gate)) * up
            # A sum or maximum over rows would go through scratch memory that Pallas gives both warpgroups at once.
            own = output_smem.at[warpgroup, :, pl.ds(0, unit_columns)]
            own[...] = accumulator.astype(dtype)
            out_ref[pair, pl.ds(first, unit_columns)] = plgpu.load(own.at[0], layout=plgpu.Layout.WGMMA.reduce(0))

        run_tiles(
            num_pairs * parts,
            describe,
            load,
            multiply,
            store,
            tile_shape=tile,
            pipe=pipe,
            prepare=take_row,
            in_flight=0,
        )

    scratch = [
        plgpu.SMEM((stages, COLUMNS, step), dtype, transforms=operand_transforms(dtype)),
        plgpu.SMEM((CONSUMERS, summands), dtype),
        plgpu.SMEM((CONSUMERS, WGMMA_ROWS, COLUMNS), dtype),
        ring_barriers(tile, copies=2),
        *([plgpu.SMEM((CONSUMERS, WGMMA_ROWS, step), dtype)] if is_interpreted() else []),
    ]
    # With two blocks a core the second would begin behind the first, and load nothing meanwhile.
    kernel = launch(
        name, body, [jax.ShapeDtypeStruct((num_pairs, columns), dtype)], scratch, warpgroups=CONSUMERS + 1, blocks_per_core=1
    )
    return kernel(experts, rows, w)[0]
