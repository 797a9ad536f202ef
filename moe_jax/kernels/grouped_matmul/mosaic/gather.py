"""Rows of tokens in expert order: out[r] = x[token_of_row[r]], each row one TMA copy into shared memory and out again.

Cost: T*D elements read, R*D written: R*D*2 bytes at the speed of a copy, since a row crosses shared memory as it is.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moe_jax.kernels.grouped_matmul.mosaic.device import interpret, num_cores
from moe_jax.kernels.routing import Plan

STAGES = 4
"""Chunks of rows in shared memory: some being loaded, one being stored."""

CHUNK_BYTES = 48 * 2**10
"""Of one stage: with four of them enough bytes are in flight to hide the memory's latency."""


def gather_rows(x: Float[Array, "tokens hidden"], plan: Plan) -> Float[Array, "rows hidden"]:
    """x in expert order. Rows of no pair are zero up to offsets[-1], unwritten beyond."""
    tokens, hidden = x.shape
    # A TMA copy takes at most 256 elements along an axis: a row is copied as [hidden / width, width].
    width = next(width for width in (256, 128, 64) if hidden % width == 0)
    row_shape = (hidden // width, width)
    height = next(height for height in (32, 16, 8, 4, 2, 1) if height * hidden * x.dtype.itemsize <= CHUNK_BYTES or height == 1)

    def gather_rows_kernel(tokens_ref, offsets_ref, x_ref, out_ref):
        pl.run_scoped(
            lambda *scratch: _copy_chunks(tokens_ref, offsets_ref, x_ref, out_ref, *scratch, height=height),
            plgpu.SMEM((STAGES, height, *row_shape), x.dtype),
            plgpu.Barrier(num_arrivals=height, num_barriers=STAGES),
        )

    out = plgpu.kernel(
        gather_rows_kernel,
        out_type=jax.ShapeDtypeStruct((plan.num_rows, *row_shape), x.dtype),
        grid=(num_cores(),),
        grid_names=("core",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret(),
    )(plan.token_of_row, plan.offsets, x.reshape(tokens, *row_shape))
    return out.reshape(plan.num_rows, hidden)


def _copy_chunks(tokens_ref, offsets_ref, x_ref, out_ref, buffer, loaded, *, height: int) -> None:
    """This block's share of the chunks, each `height` rows."""
    core, cores = lax.axis_index("core"), lax.axis_size("core")
    chunks = lax.div(offsets_ref[offsets_ref.shape[0] - 1], jnp.int32(height))
    own_chunks = lax.div(chunks - core + cores - 1, jnp.int32(cores))

    def load(i):
        @pl.when(i < own_chunks)
        def _():
            first = (i * cores + core) * height
            slot = lax.rem(i, jnp.int32(STAGES))
            for j in range(height):
                plgpu.copy_gmem_to_smem(
                    x_ref.at[tokens_ref[first + j]],
                    buffer.at[slot, j],
                    loaded.at[slot],
                    # The token of a row of no pair is one past the last: it reads as zeros.
                    oob_mode=plgpu.OOBFillMode.ZEROS,
                )

    for i in range(STAGES - 1):
        load(jnp.int32(i))

    @pl.loop(0, own_chunks)
    def _store(i):
        slot = lax.rem(i, jnp.int32(STAGES))
        plgpu.barrier_wait(loaded.at[slot])
        plgpu.copy_smem_to_gmem(buffer.at[slot], out_ref.at[pl.ds((i * cores + core) * height, height)])
        # The store before this one has left its slot.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        load(i + STAGES - 1)

    plgpu.wait_smem_to_gmem(0)
