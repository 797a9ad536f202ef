"""Quantizes bf16 matrices in blocks of 128 x 128, and writes their values in both orders in one pass.

Cost for B blocks: 32 KiB read and 32 KiB written per block, at the speed of a copy. XLA needs three passes and 7/4 of the
bytes: one pass for the scales, one for the values, and one that transposes them.

Kernel `fp8_round_matrices`:

    roles     one warpgroup, which issues every copy and rounds landed blocks. Two thread blocks share a core: while one rounds,
              the other copies
    smem      w 2 slots x 2 halves x 128 x 64 bf16 | values 2 x 128 x 64 and transposed 2 x 64 x 128, e4m3 | 2 barriers
                                                                                                       = 96 KiB of 227
    barriers  loaded[slot]  2 arrivals (TMA of both halves of w), waited for before the block is rounded
    invariant a slot of w is reloaded after a barrier: all threads have then read it in both orders
              values and transposed are overwritten after the previous block's stores have read them
    time      load     |L0 L1|   L2    L3
              round          |Q0    Q1    Q2
              store             |S0    S1    S2
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from moe_jax.kernels.experts.fp8.quantise import GROUP, InFp8, QuantisedMatrices, scales_of
from moe_jax.kernels.hopper.interpreter import interpret
from moe_jax.kernels.hopper.launch import SWIZZLED_COLUMNS, Named, call_varying, grid_size, operand_transforms, store

F8 = jnp.float8_e4m3fn

STAGES = 2
"""Blocks of w in shared memory: one being loaded, one being rounded."""

HALVES = GROUP // SWIZZLED_COLUMNS
"""A block of w has two halves of columns, whose rows of 128 bytes are the widest swizzle."""


@jax.jit
def round_matrices(w: BFloat16[Array, "*stack n k"]) -> InFp8:
    """Quantizes matrices like `quantise_matrices`, with transposes; n and k are multiples of 128."""
    *stack, n, k = w.shape
    rows, columns = n // GROUP, k // GROUP
    w = w.reshape(-1, n, k)

    def fp8_round_matrices(*references):
        half = (GROUP, SWIZZLED_COLUMNS)
        scratch = Named(
            w=plgpu.SMEM((STAGES, HALVES, *half), w.dtype, transforms=operand_transforms(w.dtype)),
            transposed=plgpu.SMEM((HALVES, *half[::-1]), F8, transforms=operand_transforms(F8, GROUP)),
            values=plgpu.SMEM((HALVES, *half), F8, transforms=operand_transforms(F8)),
            loaded=plgpu.Barrier(num_arrivals=HALVES, num_barriers=STAGES),
        )
        pl.run_scoped(lambda scratch: _round_blocks(*references, scratch), scratch)

    run = plgpu.kernel(
        fp8_round_matrices,
        out_type=[
            jax.ShapeDtypeStruct(w.shape, F8),
            jax.ShapeDtypeStruct((len(w), k, n), F8),
            jax.ShapeDtypeStruct((len(w), rows, columns), jnp.float32),
        ],
        grid=(grid_size(),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret(),
    )
    values, transposed, scales = (a.reshape(*stack, *a.shape[1:]) for a in call_varying(run)(w))
    return InFp8(QuantisedMatrices(values, scales), QuantisedMatrices(transposed, scales.mT))


def _round_blocks(w_ref, values_ref, transposed_ref, scales_ref, scratch: Named) -> None:
    """Rounds this thread block's share of the blocks, and stores their values, transposes and scales."""
    first, step = lax.axis_index("block"), lax.axis_size("block")
    matrices, rows, columns = scales_ref.shape
    own_blocks = lax.div(matrices * rows * columns - first + step - 1, jnp.int32(step))

    def place(i):
        """Returns the matrix, the row and the column of a block, in blocks."""
        row, column = lax.div(i * step + first, jnp.int32(columns)), lax.rem(i * step + first, jnp.int32(columns))
        return lax.div(row, jnp.int32(rows)), lax.rem(row, jnp.int32(rows)), column

    def half_of(row, column, half):
        columns = pl.ds(column * GROUP + half * SWIZZLED_COLUMNS, SWIZZLED_COLUMNS)
        return pl.ds(row * GROUP, GROUP), columns

    def load(i):
        @pl.when(i < own_blocks)
        def _():
            (matrix, row, column), slot = place(i), lax.rem(i, jnp.int32(STAGES))
            for half in range(HALVES):
                source = w_ref.at[matrix, *half_of(row, column, half)]
                plgpu.copy_gmem_to_smem(source, scratch.w.at[slot, half], scratch.loaded.at[slot])

    for i in range(STAGES - 1):
        load(jnp.int32(i))

    @pl.loop(0, own_blocks)
    def _block(i):
        load(i + STAGES - 1)
        (matrix, row, column), slot = place(i), lax.rem(i, jnp.int32(STAGES))
        plgpu.barrier_wait(scratch.loaded.at[slot])
        halves = [plgpu.load(scratch.w.at[slot, half], layout=plgpu.Layout.WGMMA) for half in range(HALVES)]
        # One maximum over both axes would leave JAX without layouts.
        scale = scales_of(jnp.maximum(*map(jnp.abs, halves)).astype(jnp.float32).max(axis=1).max())
        inverse = 1 / scale
        store(scales_ref.at[matrix, row, column], scale)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for half, values in enumerate(halves):
            scratch.values[half] = (values.astype(jnp.float32) * inverse).astype(F8)
            turned = plgpu.load(scratch.w.at[slot, half].transpose((1, 0)), layout=plgpu.Layout.WGMMA)
            scratch.transposed[half] = (turned.astype(jnp.float32) * inverse).astype(F8)
        # Now all threads have read the slot of w, and the values are visible to TMA.
        plgpu.commit_smem()
        for half in range(HALVES):
            of_rows, of_columns = half_of(row, column, half)
            plgpu.copy_smem_to_gmem(scratch.values.at[half], values_ref.at[matrix, of_rows, of_columns], commit_group=False)
            plgpu.copy_smem_to_gmem(
                scratch.transposed.at[half], transposed_ref.at[matrix, of_columns, of_rows], commit_group=False
            )
        plgpu.commit_smem_to_gmem_group()

    plgpu.wait_smem_to_gmem(0)
