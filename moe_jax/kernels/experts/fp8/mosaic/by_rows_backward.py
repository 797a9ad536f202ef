"""The gradient through an expert's second matrix and its activation in FP8, in one kernel.

The formulas are in `mosaic/by_rows_backward.py`. dh is stored twice: in bf16 for the weights' gradients, and rounded to e4m3
from the f32 values for the gradient of x.

Cost for R rows: 2*R*D*I FLOPs. Besides the matmul's operands it reads h [R, 2I], and writes dh [R, 2I] in 16 and in 8 bits and
weighted_act [R, I].

Kernel `fp8_gated_matmul_backward`, which is by_rows.py's with this epilogue:

    smem      besides a, w and scales: h 2 WG x 2 slots x (gate, up) x 64 x 64, bf16 | values 2 WG x 64 x 64, e4m3 | weights
              2 WG x 64, f32.  128 x 256 x 3 stages: a 48 KiB | w 96 KiB | h 64 KiB | values 8 KiB | 6 KiB = 222 of 227
              128 x 128 x 3 stages: 174. 64 x 256 x 3 stages: 197
    barriers  besides full and empty: loaded[WG, slot], 2 arrivals (TMA gate, TMA up), weights_loaded[WG], 1 arrival; waited for
              by that consumer
    epilogue  per 64 rows and 128 columns, one group of dgate and one of dup
              prepare   loads the first block's h before the tile's first step, so that it arrives during the matmul
              chunk c   of 64 columns: dv; weighted_act and dgate overwrite gate and up; dgate and dup are also kept in
                        registers
              at last   the groups' absolute maxima are known. dup of both chunks into the first chunk's slot; the second
                        chunk's slot loads the first chunk of the next block; then the gradients are rounded, and stored through
                        `values` 64 x 64 at a time. Meanwhile the other slot loads the next block's second chunk
    order     groups of TMA stores: [act, dgate] of chunk 0, of chunk 1, [dup of both, values 0], values 1, 2, 3
    invariant a buffer is overwritten or loaded only after the TMA store of its contents has read it
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.fp8.mosaic.by_rows import F8, launch_rows, rows_shapes
from moe_jax.kernels.experts.fp8.mosaic.promoted import Fp8TileShape
from moe_jax.kernels.experts.fp8.mosaic.round_groups import inverse_scales
from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedMatrices, QuantisedRows, scales_of
from moe_jax.kernels.experts.mosaic.by_rows import CHUNK, Epilogue
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.hopper.launch import Named, operand_transforms
from moe_jax.kernels.hopper.pipeline import CONSUMERS, WGMMA_ROWS, Registers
from moe_jax.kernels.precision import sum_in_order

CHUNKS = GROUP // CHUNK
"""Chunks of a block, and slots of h."""

REGISTERS, REGISTERS_OF_TWO_BLOCKS = Registers(producer=40, consumer=232), Registers(producer=24, consumer=240)
"""With one block per warpgroup and with two. Any number spills in the epilogue, but not in the loop over steps."""


@partial(jax.jit, static_argnames=("tile", "activation"))
def matmul_gated_backward(
    dy: QuantisedRows,
    w_down_t: QuantisedMatrices,
    h: BFloat16[Array, "rows 2*inter"],
    weight_of_row: Float[Array, "rows"],
    plan: Plan,
    tile: Fp8TileShape,
    activation: Activation = SILU,
) -> tuple[QuantisedRows, Array, Array, Array]:
    """Returns dh (bf16 and FP8), weight * act and dv; w_down_t is [experts, inter, hidden]. Rows of no expert are unwritten."""
    num_rows, inter = dy.values.shape[0], w_down_t.values.shape[1]

    def chunk_of(reference, part, column, half=0):
        """Returns the reference to 64 columns of the gate half or up half, or of an array with one half."""
        return reference.at[pl.ds(part.row, WGMMA_ROWS), pl.ds(half * inter + column, CHUNK)]

    def load_h(part, column, slot, references):
        own = references.scratch
        for half in range(2):
            source, barrier = chunk_of(references.inputs.h, part, column, half), own.loaded.at[part.warpgroup, slot]
            plgpu.copy_gmem_to_smem(source, own.h.at[part.warpgroup, slot, half], barrier)

    def prepare(part, references):
        own = references.scratch
        # Wait until the results of the last tile have left their buffers.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for n in range(CHUNKS):
            load_h(part, part.column + n * CHUNK, n, references)
        weights = references.inputs.weight_of_row.at[pl.ds(part.row, WGMMA_ROWS)]
        plgpu.copy_gmem_to_smem(weights, own.weights.at[part.warpgroup], own.weights_loaded.at[part.warpgroup])

    def store(sums, part, write, references):
        dh_values_ref, dh_scales_ref, dh_ref, act_ref, dv_ref = references.outputs
        own = references.scratch
        places_of_slot, values = own.h.at[part.warpgroup], own.values.at[part.warpgroup]

        def leave(*copies):
            """Starts these copies to global memory as one group."""
            plgpu.commit_smem()
            for source, target in copies:
                plgpu.copy_smem_to_gmem(source, target, commit_group=False)
            plgpu.commit_smem_to_gmem_group()

        plgpu.barrier_wait(own.weights_loaded.at[part.warpgroup])
        v = plgpu.load(own.weights.at[part.warpgroup], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        v = lax.broadcast_in_dim(v, (WGMMA_ROWS, CHUNK), [0])
        slots = list(range(CHUNKS))
        for i, (place, g_of_block) in enumerate(sums.items()):
            is_last = i == len(sums) - 1
            columns = [part.column + place.column + n * CHUNK for n in range(CHUNKS)]
            gradients: list[list[Any]] = [[], []]
            for n, (column, slot) in enumerate(zip(columns, slots, strict=True)):
                plgpu.barrier_wait(own.loaded.at[part.warpgroup, slot])
                own_h = [places_of_slot.at[slot, half] for half in range(2)]
                gate, up = (plgpu.layout_cast(chunk[...].astype(jnp.float32), plgpu.Layout.WGMMA) for chunk in own_h)
                g = g_of_block[:, n * CHUNK : (n + 1) * CHUNK]
                act, pullback = activation.vjp(gate, up)
                dv_ref[column // CHUNK, pl.ds(part.row, WGMMA_ROWS)] = (g * act).sum(axis=1)
                dgate, dup = pullback(v * g)
                # Each thread overwrites the h that it has read.
                own_h[0][...] = (v * act).astype(jnp.bfloat16)
                own_h[1][...] = dgate.astype(jnp.bfloat16)
                leave((own_h[0], chunk_of(act_ref, part, column)), (own_h[1], chunk_of(dh_ref, part, column)))
                gradients[0].append(dgate)
                gradients[1].append(dup)
            rounded = []
            for half, chunks in enumerate(gradients):
                scales = scales_of(jnp.maximum(*(jnp.abs(chunk).max(axis=1) for chunk in chunks)))
                dh_scales_ref[(half * inter + columns[0]) // GROUP, pl.ds(part.row, WGMMA_ROWS)] = scales
                factor = inverse_scales(scales, (WGMMA_ROWS, CHUNK))
                for chunk, column in zip(chunks, columns, strict=True):
                    rounded.append(((chunk * factor).astype(F8), chunk_of(dh_values_ref, part, column, half)))
            # Wait for all stores but the second chunk's: the first slot's, and the previous block's values.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            copies = []
            for n, (chunk, column) in enumerate(zip(gradients[1], columns, strict=True)):
                place = places_of_slot.at[slots[0], n]
                place[...] = chunk.astype(jnp.bfloat16)
                copies.append((place, chunk_of(dh_ref, part, column, 1)))
            slots.reverse()
            for n, (chunk, target) in enumerate(rounded):
                if n > 0 or not is_last:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if n < CHUNKS and not is_last:
                    load_h(part, columns[n] + GROUP, slots[n], references)
                values[...] = chunk
                leave(*copies, (values, target))
                copies = []

    epilogue = Epilogue(
        name="fp8_gated_matmul_backward",
        outputs=[
            *rows_shapes(num_rows, 2 * inter),
            jax.ShapeDtypeStruct((num_rows, 2 * inter), jnp.bfloat16),
            jax.ShapeDtypeStruct((num_rows, inter), jnp.bfloat16),
            jax.ShapeDtypeStruct((inter // CHUNK, num_rows), jnp.float32),
        ],
        store=store,
        inputs=Named(h=h, weight_of_row=weight_of_row.astype(jnp.float32)),
        scratch=Named(
            h=plgpu.SMEM((CONSUMERS, CHUNKS, 2, WGMMA_ROWS, CHUNK), h.dtype, transforms=operand_transforms(h.dtype)),
            # A chunk of gradients in 8 bits.
            values=plgpu.SMEM((CONSUMERS, WGMMA_ROWS, CHUNK), F8, transforms=operand_transforms(F8)),
            # The rows' weights.
            weights=plgpu.SMEM((CONSUMERS, WGMMA_ROWS), jnp.float32),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=(CONSUMERS, CHUNKS)),
            weights_loaded=plgpu.Barrier(num_arrivals=1, num_barriers=CONSUMERS),
        ),
        prepare=prepare,
        staged=0,
        registers=REGISTERS if tile.warpgroup_columns == GROUP else REGISTERS_OF_TWO_BLOCKS,
    )
    values, scales, dh, weighted_act, dv = launch_rows(dy, w_down_t, plan, tile, epilogue)
    return QuantisedRows(values, scales), dh, weighted_act, sum_in_order(dv, axis=0)
