"""Few tokens in FP8 where they are, in one kernel: neither sorted nor gathered.

Cost: T*D bf16 read, T*D bytes written; of 64 tokens and fewer that is nothing beside the start of a kernel.

Kernel `fp8_round_tokens`:

    roles     one warpgroup a block, all alike: it rounds one group of 128 columns of 8 tokens at a time, in registers
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from moe_jax.kernels.experts.fp8.mosaic.round_groups import GROUPS_LAYOUT, rounded_group
from moe_jax.kernels.experts.fp8.quantise import GROUP, QuantisedRows
from moe_jax.kernels.hopper.interpreter import interpret
from moe_jax.kernels.hopper.launch import call_varying, grid_size, store

TOKENS = 8
"""Tokens of which a warpgroup holds a group each: the least that GROUPS_LAYOUT takes."""

BLOCKS_PER_CORE = 4


@jax.jit
def round_tokens(x: BFloat16[Array, "tokens hidden"]) -> QuantisedRows:
    """Computes `quantise_rows` of x and of zeros behind it, up to a multiple of 8 tokens."""
    x = jnp.pad(x, ((0, -x.shape[0] % TOKENS), (0, 0)))
    tokens, hidden = x.shape

    def fp8_round_tokens(x_ref, values_ref, scales_ref):
        @plgpu.nd_loop((tokens // TOKENS, hidden // GROUP), collective_axes="block")
        def _piece(info):
            rows, columns = pl.ds(info.index[0] * TOKENS, TOKENS), pl.ds(info.index[1] * GROUP, GROUP)
            piece = plgpu.load(x_ref.at[rows, columns], layout=GROUPS_LAYOUT, optimized=False)
            values_ref[rows, columns], scales = rounded_group(piece.astype(jnp.float32))
            store(scales_ref.at[info.index[1], rows], scales)

    run = plgpu.kernel(
        fp8_round_tokens,
        out_type=[
            jax.ShapeDtypeStruct((tokens, hidden), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((hidden // GROUP, tokens), jnp.float32),
        ],
        grid=(grid_size(BLOCKS_PER_CORE),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret(),
    )
    return QuantisedRows(*call_varying(run)(x))
