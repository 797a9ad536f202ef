"""Rows of tokens in expert order, in FP8: each token is read and rounded once, and stored to the rows of its choices.

Cost: T*D bf16 read, R*D bytes written, at the speed of a copy. The T*D/128 scales are written by token. XLA copies them to the
rows.

Kernel `fp8_gather_rows`:

    roles     one warpgroup, which issues every copy and rounds landed data. Three thread blocks share a core: while one rounds,
              the others copy
    chunk     64 groups of 128 numbers, contiguous in memory: parts of tokens, or several tokens. A piece of a chunk
              belongs to one token: gcd(D / 128, 64) groups
    smem      x 3 slots x 64 x 128 bf16 | values 2 slots x 64 x 128 e4m3 | zeros | 3 barriers              = 66 KiB of 227
    barriers  loaded[slot]  1 arrival (TMA of a chunk of x), waited for before it is rounded
    invariant a slot of x is reloaded after all threads have read it, after a barrier of the warpgroup; a slot of values is
              overwritten after all but the last group of stores have read theirs
    time      load     |L0 L1|   L2    L3
              round          |Q0    Q1    Q2
              store             |S0    S1    S2
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from moe_jax.kernels.experts.fp8.mosaic.round_groups import GROUPS_LAYOUT, rounded_group
from moe_jax.kernels.experts.fp8.quantise import GROUP, INVERSE_LARGEST, LEAST_MAXIMUM, QuantisedRows
from moe_jax.kernels.experts.mosaic import gather
from moe_jax.kernels.experts.routing import Plan
from moe_jax.kernels.hopper.interpreter import interpret
from moe_jax.kernels.hopper.launch import Named, call_varying, grid_size, store

GROUPS = 64
"""Groups of a chunk."""

STAGES = 3
"""Chunks of x in shared memory: some being loaded, one being rounded."""

STORED = 2
"""Chunks of values in shared memory: one being written, one being stored."""

BLOCKS_PER_CORE = 3

F8 = jnp.float8_e4m3fn

SCALE_OF_ZEROS = LEAST_MAXIMUM * INVERSE_LARGEST
"""The scale of a row without a token."""


@jax.jit
def gather_rows(x: BFloat16[Array, "tokens hidden"], plan: Plan) -> QuantisedRows:
    """Quantizes x and gathers it in expert order. Padding rows of an expert's last block are zero; later rows are unwritten."""
    tokens, hidden = x.shape
    groups = hidden // GROUP
    chunks = -(-tokens * groups // GROUPS)

    def fp8_gather_rows(rows_ref, ends_ref, offsets_ref, x_ref, out_ref, scales_ref):
        def scope(scratch):
            gather.fill_blocks(ends_ref, offsets_ref, out_ref, scratch.zeros)
            _round_tokens(rows_ref, offsets_ref, x_ref, out_ref, scales_ref, scratch)
            plgpu.wait_smem_to_gmem(0)

        zero_tokens = 2048 // math.gcd(hidden, 2048)
        scratch = Named(
            x=plgpu.SMEM((STAGES, GROUPS, GROUP), x.dtype),
            values=plgpu.SMEM((STORED, GROUPS, GROUP), F8),
            zeros=plgpu.SMEM((zero_tokens, groups, GROUP), F8),
            loaded=plgpu.Barrier(num_barriers=STAGES),
        )
        pl.run_scoped(scope, scratch)

    run = plgpu.kernel(
        fp8_gather_rows,
        out_type=[
            jax.ShapeDtypeStruct((plan.num_rows, groups, GROUP), F8),
            jax.ShapeDtypeStruct((chunks * GROUPS,), jnp.float32),
        ],
        grid=(grid_size(BLOCKS_PER_CORE),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret(),
    )
    # TMA copies eight rows at a time, and refuses an array whose rows are not a multiple of eight.
    x = jnp.pad(x.reshape(tokens * groups, GROUP), ((0, -tokens * groups % 8), (0, 0)))
    inputs = plan.row_of_pair, plan.ends, plan.offsets, x
    values, scales = call_varying(run)(*inputs)
    by_token = scales[: tokens * groups].reshape(tokens, groups)
    # With this layout XLA reads a token's scales together, and transposes them in shared memory, instead of one by one.
    of_rows = by_token.at[plan.token_of_row].get(mode="fill", fill_value=SCALE_OF_ZEROS)
    return QuantisedRows(values.reshape(plan.num_rows, hidden), with_layout_constraint(of_rows, Layout((0, 1))).T)


def gather_rounded(tokens: QuantisedRows, plan: Plan) -> QuantisedRows:
    """Gathers already quantized tokens in expert order, with rows as in `gather_rows`."""
    scales = tokens.scales.at[:, plan.token_of_row].get(mode="fill", fill_value=SCALE_OF_ZEROS)
    return QuantisedRows(gather.gather_rows(tokens.values, plan), scales)


def _round_tokens(rows_ref, offsets_ref, x_ref, out_ref, scales_ref, scratch: Named) -> None:
    """Rounds this block's share of the chunks and stores each piece to the rows of its token's choices."""
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    tokens, k = rows_ref.shape
    groups = out_ref.shape[1]
    piece = math.gcd(groups, GROUPS)
    computed_rows = offsets_ref[offsets_ref.shape[0] - 1]
    chunks = scales_ref.shape[0] // GROUPS
    own_chunks = lax.div(chunks - block + blocks - 1, jnp.int32(blocks))

    def load(i):
        @pl.when(i < own_chunks)
        def _():
            slot = lax.rem(i, jnp.int32(STAGES))
            first = (i * blocks + block) * GROUPS
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(first, GROUPS)], scratch.x.at[slot], scratch.loaded.at[slot])

    for i in range(STAGES - 1):
        load(jnp.int32(i))

    @pl.loop(0, own_chunks)
    def _chunk(i):
        first = (i * blocks + block) * GROUPS
        pieces = [first + start for start in range(0, GROUPS, piece)]
        places = [(lax.div(group, jnp.int32(groups)), lax.rem(group, jnp.int32(groups))) for group in pieces]
        # Chunks may reach beyond the last token.
        rows = [[rows_ref[jnp.minimum(token, tokens - 1), choice] for choice in range(k)] for token, _ in places]
        slot, stored = lax.rem(i, jnp.int32(STAGES)), lax.rem(i, jnp.int32(STORED))
        plgpu.barrier_wait(scratch.loaded.at[slot])
        x = plgpu.load(scratch.x.at[slot], layout=GROUPS_LAYOUT).astype(jnp.float32)
        values, scales = rounded_group(x)
        # Wait until the stores of the chunk before the last have left their slot.
        plgpu.wait_smem_to_gmem(STORED - 1, wait_read_only=True)
        scratch.values[stored] = values
        store(scales_ref.at[pl.ds(first, GROUPS)], scales)
        # Now all threads have read the slot of x, and the values are visible to TMA.
        plgpu.commit_smem()
        load(i + STAGES - 1)
        for n, (token, group) in enumerate(places):
            for row in rows[n]:

                @pl.when((token < tokens) & (row < computed_rows))
                def _(n=n, group=group, row=row):
                    source = scratch.values.at[stored, pl.ds(n * piece, piece)]
                    plgpu.copy_smem_to_gmem(source, out_ref.at[row, pl.ds(group, piece)], commit_group=False)

        plgpu.commit_smem_to_gmem_group()
