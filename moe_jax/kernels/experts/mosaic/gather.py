"""Rows of tokens in expert order: out[row of pair (t, k)] = x[t], by TMA copies through shared memory.

Cost: T*D elements read and R*D written, at the speed of a copy. The kernel goes by tokens, so that each is read once: by rows
each would be read K times, long after it has left the L2 cache. Two blocks share a core: while one reads the numbers of its
next rows, the other copies.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.hopper.interpreter import interpret
from moe_jax.kernels.hopper.launch import call_varying, grid_size

STAGES = 4
"""Chunks of tokens in shared memory: some being loaded, others being stored."""

CHUNK_BYTES = 16 * 2**10
"""Of one stage, at most, unless one token is larger."""

STORES = 64
"""At most, of one chunk: each is written out in the kernel."""


def shared_bytes(hidden: int, itemsize: int) -> int:
    """What `gather_rows` needs of a core's shared memory, at the least."""
    return (STAGES + _zero_tokens(hidden)) * hidden * itemsize + 8 * STAGES


@jax.jit
def gather_rows(x: Float[Array, "tokens hidden"], plan: Plan) -> Float[Array, "rows hidden"]:
    """x in expert order. Rows that only fill an expert's last block are zero, those from offsets[-1] on left unwritten."""
    tokens, hidden = x.shape
    # A TMA copy takes at most 256 elements along an axis: a token is copied as [hidden / width, width].
    width = next(width for width in (256, 128, 64) if hidden % width == 0)
    token_shape = (hidden // width, width)
    fits = max(1, min(CHUNK_BYTES // (hidden * x.dtype.itemsize), STORES // plan.row_of_pair.shape[1]))
    height = next(height for height in (8, 4, 2, 1) if height <= fits and tokens % height == 0)

    def gather_rows_kernel(rows_ref, ends_ref, offsets_ref, x_ref, out_ref):
        def scope(buffer, zeros, loaded):
            _fill_blocks(ends_ref, offsets_ref, out_ref, zeros)
            _copy_tokens(rows_ref, offsets_ref, x_ref, out_ref, buffer, loaded, height=height)
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(
            scope,
            plgpu.SMEM((STAGES, height, *token_shape), x.dtype),
            plgpu.SMEM((_zero_tokens(hidden), *token_shape), x.dtype),
            plgpu.Barrier(num_barriers=STAGES),
        )

    run = plgpu.kernel(
        gather_rows_kernel,
        out_type=jax.ShapeDtypeStruct((plan.num_rows, *token_shape), x.dtype),
        grid=(grid_size(),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret(),
    )
    inputs = plan.row_of_pair, plan.ends, plan.offsets, x.reshape(tokens, *token_shape)
    return call_varying(run)(*inputs).reshape(plan.num_rows, hidden)


def _zero_tokens(hidden: int) -> int:
    """So many that the warpgroup's 128 threads fill them 4 elements, 8 bytes, at a time."""
    return 512 // math.gcd(hidden, 512)


def _fill_blocks(ends_ref, offsets_ref, out_ref, zeros) -> None:
    """Zeros for the rows of no pair, of this block's share of the experts."""
    zeros[...] = jnp.zeros(zeros.shape, zeros.dtype)
    plgpu.commit_smem()

    @plgpu.nd_loop((ends_ref.shape[0],), collective_axes="block")
    def _experts(info):
        (expert,) = info.index

        @pl.loop(ends_ref[expert], offsets_ref[expert + 1])
        def _rows(row):
            plgpu.copy_smem_to_gmem(zeros.at[0], out_ref.at[row])


def _copy_tokens(rows_ref, offsets_ref, x_ref, out_ref, buffer, loaded, *, height: int) -> None:
    """This block's share of the tokens, `height` at a time, each to the rows of its choices."""
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    tokens, k = rows_ref.shape
    computed_rows = offsets_ref[offsets_ref.shape[0] - 1]
    own_chunks = lax.div(tokens // height - block + blocks - 1, jnp.int32(blocks))

    def load(i):
        @pl.when(i < own_chunks)
        def _():
            slot = lax.rem(i, jnp.int32(STAGES))
            first = (i * blocks + block) * height
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(first, height)], buffer.at[slot], loaded.at[slot])

    for i in range(STAGES - 1):
        load(jnp.int32(i))

    @pl.loop(0, own_chunks)
    def _store(i):
        slot = lax.rem(i, jnp.int32(STAGES))
        first = (i * blocks + block) * height
        rows = [(j, rows_ref[first + j, choice]) for j in range(height) for choice in range(k)]
        plgpu.barrier_wait(loaded.at[slot])
        for j, row in rows:

            @pl.when(row < computed_rows)
            def _(j=j, row=row):
                plgpu.copy_smem_to_gmem(buffer.at[slot, j], out_ref.at[row], commit_group=False)

        plgpu.commit_smem_to_gmem_group()
        # The stores of the chunk before this one have left its slot.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        load(i + STAGES - 1)
