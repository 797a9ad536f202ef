"""The gradient through an expert's second matrix and its activation, in one kernel.

With g = dy[r] @ w_down[e], s = sigmoid(gate), act = gate * s * up and the row's top-k weight v:

    dgate = v * g * up * s * (1 + gate * (1 - s))      dup = v * g * gate * s
    weighted_act = v * act                             dv = <g, act>

Cost for R rows: 2*R*D*I FLOPs; besides the matmul's operands h [R, 2I] is read, dh [R, 2I] and weighted_act [R, I] written.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.grouped_matmul.mosaic.by_rows import CHUNK, Epilogue, launch_rows
from moe_jax.kernels.grouped_matmul.mosaic.ring import CONSUMERS, Tile, operand_transforms
from moe_jax.kernels.routing import Plan


def matmul_gated_silu_backward(
    dy: Float[Array, "rows hidden"],
    w_down: Float[Array, "experts hidden inter"],
    h: Float[Array, "rows 2*inter"],
    weight_of_row: Float[Array, "rows"],
    plan: Plan,
    tile: Tile,
) -> tuple[Float[Array, "rows 2*inter"], Float[Array, "rows inter"], Float[Array, "rows"]]:
    """Returns dh and weighted_act in dy's dtype and dv in f32. Rows of no expert are left unwritten."""
    num_rows, inter = dy.shape[0], w_down.shape[2]
    rows = tile.own_rows

    def load_chunk(h_ref, h_smem, loaded, place, warpgroup, column):
        for half in range(2):
            source = h_ref.at[pl.ds(place.row, rows), pl.ds(half * inter + column, CHUNK)]
            plgpu.copy_gmem_to_smem(source, h_smem.at[warpgroup, half], loaded.at[warpgroup])

    def prepare(place, warpgroup, references):
        *_, h_ref, _, h_smem, _, loaded = references
        load_chunk(h_ref, h_smem, loaded, place, warpgroup, place.part * tile.own_columns)

    def store(g, place, warpgroup, write, references):
        dh_ref, act_ref, dv_ref, h_ref, v_ref, h_smem, dv_smem, loaded = references
        layout = plgpu.Layout.WGMMA.reduce(1)
        v = plgpu.load(v_ref.at[pl.ds(place.row, rows)], layout=layout, optimized=False)
        v = lax.broadcast_in_dim(v, (rows, CHUNK), [0])
        dv = plgpu.layout_cast(jnp.zeros(rows, jnp.float32), layout)
        for c in range(0, tile.own_columns, CHUNK):
            column = place.part * tile.own_columns + c
            plgpu.barrier_wait(loaded.at[warpgroup])
            gate, up = (h_smem[warpgroup, half].astype(jnp.float32) for half in range(2))
            gate, up = (plgpu.layout_cast(values, plgpu.Layout.WGMMA) for values in (gate, up))
            own_g = g[:, c : c + CHUNK]
            sigmoid = 1 / (1 + jnp.exp(-gate))
            silu = gate * sigmoid
            dv += (own_g * silu * up).sum(axis=1)
            dact = v * own_g
            write(dh_ref, inter + column, dact * silu)
            # That write has synchronised the warpgroup, so that every thread has read the chunk which this load replaces.
            if c + CHUNK < tile.own_columns:
                load_chunk(h_ref, h_smem, loaded, place, warpgroup, column + CHUNK)
            write(dh_ref, column, dact * up * (sigmoid + silu * (1 - sigmoid)))
            write(act_ref, column, v * silu * up)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        dv_smem[warpgroup] = dv
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(dv_smem.at[warpgroup], dv_ref.at[place.part, pl.ds(place.row, rows)])

    epilogue = Epilogue(
        name="gated_matmul_backward",
        outputs=[
            jax.ShapeDtypeStruct((num_rows, 2 * inter), dy.dtype),
            jax.ShapeDtypeStruct((num_rows, inter), dy.dtype),
            jax.ShapeDtypeStruct((inter // tile.own_columns, num_rows), jnp.float32),
        ],
        store=store,
        inputs=(h, weight_of_row.astype(jnp.float32)),
        scratch=(
            plgpu.SMEM((CONSUMERS, 2, rows, CHUNK), h.dtype, transforms=operand_transforms(h.dtype)),
            plgpu.SMEM((CONSUMERS, rows), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=CONSUMERS),
        ),
        prepare=prepare,
    )
    dh, weighted_act, dv = launch_rows(dy, w_down, plan, tile, epilogue, transpose=True)
    return dh, weighted_act, dv.sum(axis=0)
