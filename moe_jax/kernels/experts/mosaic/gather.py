"""Rows of tokens in expert order: out[row of pair (t, k)] = x[t], by TMA copies through shared memory.

Cost: T*D elements read and R*D written, at the speed of a copy. The kernel loops over tokens, so each is read once. A loop over
rows would read each K times, long after it has left the L2 cache.

Kernel `gather_rows_kernel`:

    roles     one warpgroup, which issues every copy. Nothing is computed, so there is no second role and no `Pipeline`: the
              warpgroup knows when its own stores have read a slot. Two thread blocks share a core: while one reads the numbers
              of its next rows, the other copies
    smem      tokens 4 slots x height x D | zeros (512 / gcd(D, 512)) x D | 4 barriers
              D 2048, 16-bit: 4 x 4 x 4 KiB + 4 KiB                                                          = 68 KiB of 227
    barriers  loaded[slot]  1 arrival (TMA of `height` tokens), waited for before they are stored
    invariant a slot is reloaded after all but the last group of stores have read theirs (wait_smem_to_gmem(1)): only the
              current chunk's group may still be reading, from another slot
    time      load     |L0 L1 L2|   L3    L4
              store             |S0    S1    S2
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
from moe_jax.kernels.hopper.launch import Named, call_varying, grid_size

STAGES = 4
"""Chunks of tokens in shared memory: some being loaded, others being stored."""

CHUNK_BYTES = 16 * 2**10
"""Upper bound on one stage, unless one token is larger."""

STORES = 64
"""Upper bound on the stores of one chunk, which are unrolled in the kernel."""


def shared_bytes(hidden: int, itemsize: int) -> int:
    """Returns the minimum bytes of shared memory that `gather_rows` needs."""
    return (STAGES + _zero_tokens(hidden, itemsize)) * hidden * itemsize + 8 * STAGES


@jax.jit
def gather_rows(x: Float[Array, "tokens hidden"], plan: Plan) -> Float[Array, "rows hidden"]:
    """Gathers x in expert order. Padding rows of an expert's last block are zero; rows from offsets[-1] on are unwritten."""
    tokens, hidden = x.shape
    # A TMA copy moves at most 256 elements along an axis: a token is copied as [hidden / width, width].
    width = next(width for width in (256, 128, 64) if hidden % width == 0)
    token_shape = (hidden // width, width)
    fits = max(1, min(CHUNK_BYTES // (hidden * x.dtype.itemsize), STORES // plan.row_of_pair.shape[1]))
    height = next(height for height in (8, 4, 2, 1) if height <= fits and tokens % height == 0)

    def gather_rows_kernel(rows_ref, ends_ref, offsets_ref, x_ref, out_ref):
        def scope(scratch):
            fill_blocks(ends_ref, offsets_ref, out_ref, scratch.zeros)
            _copy_tokens(rows_ref, offsets_ref, x_ref, out_ref, scratch)
            plgpu.wait_smem_to_gmem(0)

        scratch = Named(
            tokens=plgpu.SMEM((STAGES, height, *token_shape), x.dtype),
            zeros=plgpu.SMEM((_zero_tokens(hidden, x.dtype.itemsize), *token_shape), x.dtype),
            loaded=plgpu.Barrier(num_barriers=STAGES),
        )
        pl.run_scoped(scope, scratch)

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


def _zero_tokens(hidden: int, itemsize: int) -> int:
    """Returns the number of tokens of zeros that the warpgroup's 128 threads fill 8 bytes at a time, or 16 elements of FP8."""
    elements = 2048 if itemsize == 1 else 512
    return elements // math.gcd(hidden, elements)


def fill_blocks(ends_ref, offsets_ref, out_ref, zeros) -> None:
    """Stores zeros in padding rows, for this thread block's share of the experts."""
    zeros[...] = jnp.zeros(zeros.shape, zeros.dtype)
    plgpu.commit_smem()

    @plgpu.nd_loop((ends_ref.shape[0],), collective_axes="block")
    def _experts(info):
        (expert,) = info.index

        @pl.loop(ends_ref[expert], offsets_ref[expert + 1])
        def _rows(row):
            plgpu.copy_smem_to_gmem(zeros.at[0], out_ref.at[row])


def _copy_tokens(rows_ref, offsets_ref, x_ref, out_ref, scratch: Named) -> None:
    """Copies this block's share of the tokens, `height` at a time, each to the rows of its choices."""
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    tokens, k = rows_ref.shape
    height = scratch.tokens.shape[1]
    computed_rows = offsets_ref[offsets_ref.shape[0] - 1]
    own_chunks = lax.div(tokens // height - block + blocks - 1, jnp.int32(blocks))

    def load(i):
        @pl.when(i < own_chunks)
        def _():
            slot = lax.rem(i, jnp.int32(STAGES))
            first = (i * blocks + block) * height
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(first, height)], scratch.tokens.at[slot], scratch.loaded.at[slot])

    for i in range(STAGES - 1):
        load(jnp.int32(i))

    @pl.loop(0, own_chunks)
    def _store(i):
        slot = lax.rem(i, jnp.int32(STAGES))
        first = (i * blocks + block) * height
        rows = [(j, rows_ref[first + j, choice]) for j in range(height) for choice in range(k)]
        plgpu.barrier_wait(scratch.loaded.at[slot])
        for j, row in rows:

            @pl.when(row < computed_rows)
            def _(j=j, row=row):
                plgpu.copy_smem_to_gmem(scratch.tokens.at[slot, j], out_ref.at[row], commit_group=False)

        plgpu.commit_smem_to_gmem_group()
        # The stores of the chunk before this one have left its slot.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        load(i + STAGES - 1)
