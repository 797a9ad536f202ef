"""The gradient through an expert's second matrix and its activation, in one kernel.

With g = dy[r] @ w_down[e], act = activation(gate, up) and the row's top-k weight v:

    dgate, dup = the gradients of act for v * g      weighted_act = v * act      dv = <g, act>

Cost for R rows: 2*R*D*I FLOPs. Besides the matmul's operands it reads h [R, 2I] and writes dh [R, 2I] and weighted_act [R, I].

Kernel `gated_matmul_backward`, which is by_rows.py's with this epilogue:

    smem      besides a and w: out 2 WG x 1 x 8 KiB | h 2 WG x 2 slots x (gate, up) x 8 KiB | Pallas' scratch for the row sum
    barriers  besides full and empty: loaded[WG, slot], 2 arrivals (TMA gate, TMA up), waited for by that consumer
    epilogue  per 64 rows, for chunks c = 0, 1, ... of 64 columns: the slot of chunk c is c mod 2
              prepare   loads h of chunks 0 and 1 (before the tile's first step, so that they arrive during the matmul)
              chunk c   wait until the gradients of chunk c - 1 have left their slot, load h of chunk c + 1 there
                        wait for loaded; dv of the chunk; weighted_act -> out; dgate and dup into h's slot -> dh
    invariant a slot of h is reloaded only after the TMA store of the gradients that replaced h has read it
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.experts.activation import SILU, Activation
from moe_jax.kernels.experts.mosaic.by_rows import CHUNK, Epilogue, RowsOperands, launch_rows
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.hopper.launch import Named, operand_transforms
from moe_jax.kernels.hopper.mainloop import TileShape
from moe_jax.kernels.hopper.pipeline import CONSUMERS, WGMMA_ROWS
from moe_jax.kernels.low_rank import RowsChange
from moe_jax.kernels.precision import sum_in_order


@functools.partial(jax.jit, static_argnames=("tile", "activation"))
def matmul_gated_backward(
    dy: Float[Array, "rows hidden"],
    w_down: Float[Array, "experts hidden inter"],
    h: Float[Array, "rows 2*inter"],
    weight_of_row: Float[Array, "rows"],
    plan: Plan,
    tile: TileShape,
    change: RowsChange | None = None,
    activation: Activation = SILU,
) -> tuple[Float[Array, "rows 2*inter"], Float[Array, "rows inter"], Float[Array, "rows"]]:
    """Returns dh and weighted_act in dy's dtype and dv in f32. Rows of no expert are left unwritten."""
    num_rows, inter = dy.shape[0], w_down.shape[2]
    chunks = tile.warpgroup_columns // CHUNK

    def halves_of(reference, part, chunk):
        """Returns references to the gate and the up columns of one 64-column chunk."""
        column = part.column_block * tile.warpgroup_columns + chunk * CHUNK
        return [reference.at[pl.ds(part.row, WGMMA_ROWS), pl.ds(half * inter + column, CHUNK)] for half in range(2)]

    def load_chunk(part, chunk, references):
        slot = (part.warpgroup, chunk % 2)
        h_smem, loaded = references.scratch.h, references.scratch.loaded
        for half, source in enumerate(halves_of(references.inputs.h, part, chunk)):
            plgpu.copy_gmem_to_smem(source, h_smem.at[*slot, half], loaded.at[*slot])

    def prepare(part, references):
        # Wait until the gradients of the last tile have left the slots.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for chunk in range(min(chunks, 2)):
            load_chunk(part, chunk, references)

    def store(sums, part, write, references):
        dh_ref, act_ref, dv_ref = references.outputs
        h_smem, loaded = references.scratch.h, references.scratch.loaded
        layout = plgpu.Layout.WGMMA.reduce(1)
        v = plgpu.load(references.inputs.weight_of_row.at[pl.ds(part.row, WGMMA_ROWS)], layout=layout, optimized=False)
        v = lax.broadcast_in_dim(v, (WGMMA_ROWS, CHUNK), [0])
        for chunk in range(chunks):
            if chunk >= 1:
                # Wait until the previous chunk's gradients have left its slot, which the next chunk uses.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if chunk + 1 < chunks:
                    load_chunk(part, chunk + 1, references)
            slot = (part.warpgroup, chunk % 2)
            plgpu.barrier_wait(loaded.at[*slot])
            gate, up = (plgpu.layout_cast(h_smem[*slot, half].astype(jnp.float32), plgpu.Layout.WGMMA) for half in range(2))
            g = sums[:, chunk * CHUNK : (chunk + 1) * CHUNK]
            act, pullback = activation.vjp(gate, up)
            dv_ref[part.column_block * chunks + chunk, pl.ds(part.row, WGMMA_ROWS)] = (g * act).sum(axis=1)
            write(act_ref, part.column_block * tile.warpgroup_columns + chunk * CHUNK, v * act)
            # Each thread overwrites the h that it has read.
            for half, gradient in enumerate(pullback(v * g)):
                h_smem[*slot, half] = gradient.astype(h.dtype)
            plgpu.commit_smem()
            for half, target in enumerate(halves_of(dh_ref, part, chunk)):
                plgpu.copy_smem_to_gmem(h_smem.at[*slot, half], target)

    epilogue = Epilogue(
        name="gated_matmul_backward",
        outputs=[
            jax.ShapeDtypeStruct((num_rows, 2 * inter), dy.dtype),
            jax.ShapeDtypeStruct((num_rows, inter), dy.dtype),
            jax.ShapeDtypeStruct((inter // CHUNK, num_rows), jnp.float32),
        ],
        store=store,
        inputs=Named(h=h, weight_of_row=weight_of_row.astype(jnp.float32)),
        scratch=Named(
            h=plgpu.SMEM((CONSUMERS, 2, 2, WGMMA_ROWS, CHUNK), h.dtype, transforms=operand_transforms(h.dtype)),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=(CONSUMERS, 2)),
        ),
        prepare=prepare,
        staged=1,
    )
    dh, weighted_act, dv = launch_rows(RowsOperands(dy, w_down, change=change), plan, tile, epilogue, transpose=True)
    return dh, weighted_act, sum_in_order(dv, axis=0)
