"""The gradient through an expert's second matrix and its activation in FP8, in one kernel.

The formulas are those of `mosaic/by_rows_backward.py`. dh leaves twice: in bf16 for the weights' gradients, and rounded to e4m3
from the f32 values for the gradient of x.

Cost for R rows: 2*R*D*I FLOPs. Besides the matmul's operands it reads h [R, 2I], and writes dh [R, 2I] in 16 and in 8 bits and
weighted_act [R, I].

Kernel `fp8_gated_matmul_backward`, which is by_rows.py's with this epilogue:

    smem      besides a, w and scales: out 2 WG x 8 KiB | h 2 WG x (gate, up) x 64 x 128, bf16 | values 2 WG x (gate, up) x
              2 x 64 x 64, e4m3. 128 x 128 x 3 stages: a 48 KiB | w 48 KiB | out 16 KiB | h 64 KiB | values 32 KiB = 208 of 227
    barriers  besides full and empty: loaded[WG], 2 arrivals (TMA gate, TMA up), waited for by that consumer
    epilogue  per 64 rows and 128 columns, one group of dgate and one of dup
              prepare   loads h before the tile's first step, so that it arrives beside the matmul
              chunk c   of 64 columns: dv; weighted_act -> out; dgate and dup into h's place, and kept in registers
              at last   dh leaves from h's place; the groups' largest numbers are known: dgate and dup are rounded -> values
    invariant h is loaded again only after the TMA store of the gradients that took its place has read it
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

from moe_jax.kernels.experts.fp8.mosaic.by_rows import F8, Fp8Epilogue, launch_rows, rows_shapes
from moe_jax.kernels.experts.fp8.mosaic.promoted import BLOCK, Fp8TileShape
from moe_jax.kernels.experts.fp8.mosaic.round_groups import inverse_scales, scales_of
from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedMatrices, QuantisedRows
from moe_jax.kernels.experts.fp8.xla import Fp8Backward
from moe_jax.kernels.experts.mosaic.by_rows import CHUNK
from moe_jax.kernels.experts.mosaic.by_rows_backward import ActivationInputs
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.hopper.launch import operand_transforms
from moe_jax.kernels.hopper.pipeline import CONSUMERS, WGMMA_ROWS, Registers
from moe_jax.kernels.precision import sum_in_order


class Fp8BackwardScratch(NamedTuple):
    """A block of h, in whose place its gradients leave in 16 bits, and the gradients in 8 bits."""

    h: Any
    """[consumers, gate and up, 64, 128]."""
    values: Any
    """[consumers, gate and up, chunks, 64, 64]."""
    loaded: Any
    """Barriers [consumers]."""


@partial(jax.jit, static_argnames="tile")
def matmul_gated_silu_backward(
    dy: QuantisedRows,
    w_down_t: QuantisedMatrices,
    h: BFloat16[Array, "rows 2*inter"],
    weight_of_row: Float[Array, "rows"],
    plan: Plan,
    tile: Fp8TileShape,
) -> Fp8Backward:
    """Returns the gradients; w_down_t is [experts, inter, hidden]. Rows of no expert are left unwritten."""
    num_rows, inter = dy.values.shape[0], w_down_t.values.shape[1]
    assert (tile.warpgroup_rows, tile.warpgroup_columns) == BLOCK, "h of one block a warpgroup fits into shared memory"

    def halves_of(reference, part, column, columns):
        """The gate's and the up's columns of the block, from `column` on."""
        return [
            reference.at[pl.ds(part.row, WGMMA_ROWS), pl.ds(half * inter + part.column + column, columns)] for half in range(2)
        ]

    def prepare(part, references):
        # The gradients of the last tile have left their places.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        h_smem, _, loaded = references.scratch
        for half, source in enumerate(halves_of(references.inputs.h, part, 0, GROUP)):
            plgpu.copy_gmem_to_smem(source, h_smem.at[part.warpgroup, half], loaded.at[part.warpgroup])

    def store(sums, part, write, references):
        dh_values_ref, dh_scales_ref, dh_ref, act_ref, dv_ref = references.outputs
        h_smem, values, loaded = references.scratch
        (g_of_block,) = sums.values()
        layout = plgpu.Layout.WGMMA.reduce(1)
        v = plgpu.load(references.inputs.weight_of_row.at[pl.ds(part.row, WGMMA_ROWS)], layout=layout, optimized=False)
        v = lax.broadcast_in_dim(v, (WGMMA_ROWS, CHUNK), [0])
        plgpu.barrier_wait(loaded.at[part.warpgroup])
        gradients: list[list[Any]] = [[], []]
        for c in range(0, GROUP, CHUNK):
            own_h = [h_smem.at[part.warpgroup, half, :, pl.ds(c, CHUNK)] for half in range(2)]
            gate, up = (plgpu.layout_cast(chunk[...].astype(jnp.float32), plgpu.Layout.WGMMA) for chunk in own_h)
            g = g_of_block[:, c : c + CHUNK]
            sigmoid = 1 / (1 + jnp.exp(-gate))
            silu = gate * sigmoid
            act = silu * up
            dv_ref[(part.column + c) // CHUNK, pl.ds(part.row, WGMMA_ROWS)] = (g * act).sum(axis=1)
            write(act_ref, part.column + c, v * act)
            dact = v * g
            chunks = dact * up * (sigmoid + silu * (1 - sigmoid)), dact * silu
            for half, chunk in enumerate(chunks):
                # Each thread puts its gradients where it has read h.
                own_h[half][...] = chunk.astype(jnp.bfloat16)
                gradients[half].append(chunk)
        for half, chunks in enumerate(gradients):
            largest = jnp.maximum(*(jnp.abs(chunk).max(axis=1) for chunk in chunks))
            scales = scales_of(largest)
            dh_scales_ref[(half * inter + part.column) // GROUP, pl.ds(part.row, WGMMA_ROWS)] = scales
            factor = inverse_scales(scales, (WGMMA_ROWS, CHUNK))
            for n, chunk in enumerate(chunks):
                values[part.warpgroup, half, n] = (chunk * factor).astype(F8)
        plgpu.commit_smem()
        for half, target in enumerate(halves_of(dh_ref, part, 0, GROUP)):
            plgpu.copy_smem_to_gmem(h_smem.at[part.warpgroup, half], target, commit_group=False)
        for n in range(GROUP // CHUNK):
            for half, target in enumerate(halves_of(dh_values_ref, part, n * CHUNK, CHUNK)):
                plgpu.copy_smem_to_gmem(values.at[part.warpgroup, half, n], target, commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    epilogue = Fp8Epilogue(
        name="fp8_gated_matmul_backward",
        outputs=[
            *rows_shapes(num_rows, 2 * inter),
            jax.ShapeDtypeStruct((num_rows, 2 * inter), jnp.bfloat16),
            jax.ShapeDtypeStruct((num_rows, inter), jnp.bfloat16),
            jax.ShapeDtypeStruct((inter // CHUNK, num_rows), jnp.float32),
        ],
        store=store,
        inputs=ActivationInputs(h, weight_of_row.astype(jnp.float32)),
        scratch=Fp8BackwardScratch(
            h=plgpu.SMEM((CONSUMERS, 2, *BLOCK), h.dtype, transforms=operand_transforms(h.dtype)),
            values=plgpu.SMEM((CONSUMERS, 2, GROUP // CHUNK, WGMMA_ROWS, CHUNK), F8, transforms=operand_transforms(F8)),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=CONSUMERS),
        ),
        prepare=prepare,
        registers=Registers(producer=40, consumer=232),
    )
    values, scales, dh, weighted_act, dv = launch_rows(dy, w_down_t, plan, tile, epilogue)
    return Fp8Backward(QuantisedRows(values, scales), dh, weighted_act, sum_in_order(dv, axis=0))
