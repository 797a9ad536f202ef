"""Quantizes groups of 128 elements of a row in registers, by `quantise.py`'s rule; and kernels for few tokens, and for h.

Cost of `round_tokens`: T*D bf16 read, T*D bytes written; for 64 tokens or fewer, negligible compared with a launch.
Cost of `keep_rows`: R*2I bf16 read, R*2I bytes written. XLA reads h twice, first for the scales.

Kernels `fp8_round_tokens` and `fp8_keep_rows`:

    roles     one warpgroup per block: it rounds one group of 128 columns of 8 tokens at a time, or 64 groups of h, in registers
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float8e4m3fn

from moe_jax.kernels.experts.fp8.quantise import GROUP, KeptRows, QuantisedRows, e3m4_codes, kept_scales_of, scales_of
from moe_jax.kernels.hopper.interpreter import interpret
from moe_jax.kernels.hopper.launch import call_varying, grid_size, store


def _layout():
    tiling = plgpu.Tiling(((8, GROUP), (2, GROUP), (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


GROUPS_LAYOUT = _layout()
"""The layout of groups in a warpgroup's registers, a multiple of 8: 16 lanes hold one group, each 8 adjacent numbers."""


def rounded_group(
    group: Float[Array, "rows 128"],
) -> tuple[Float8e4m3fn[Array, "rows 128"], Float[Array, "rows"]]:
    """Quantizes rows of 128 elements in registers; returns values and scales."""
    scales = scales_of(jnp.abs(group).max(axis=1))
    return (group * inverse_scales(scales, group.shape)).astype(jnp.float8_e4m3fn), scales


def inverse_scales(scales: Float[Array, "rows"], shape: tuple[int, ...]) -> Float[Array, "rows columns"]:
    """Returns 1 / scales, broadcast to `shape`."""
    return lax.broadcast_in_dim(1 / scales, shape, [0])


TOKENS = 8
"""Tokens with one group each in a warpgroup: the minimum of GROUPS_LAYOUT."""

BLOCKS_PER_CORE = 4


@jax.jit
def round_tokens(x: BFloat16[Array, "tokens hidden"]) -> QuantisedRows:
    """Quantizes x like `quantise_rows`, zero-padded to a multiple of 8 tokens."""
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


GROUPS = 64
"""Groups that a warpgroup of `keep_rows` rounds at a time."""


@jax.jit
def keep_rows(h: BFloat16[Array, "rows k"]) -> KeptRows:
    """Converts h to 8 bits like `keep_h`, reading it once."""
    groups = h.size // GROUP

    def fp8_keep_rows(h_ref, codes_ref, scales_ref):
        @plgpu.nd_loop((groups // GROUPS,), collective_axes="block")
        def _piece(info):
            own = pl.ds(info.index[0] * GROUPS, GROUPS)
            piece = plgpu.load(h_ref.at[own], layout=GROUPS_LAYOUT, optimized=False).astype(jnp.float32)
            scales = kept_scales_of(jnp.abs(piece).max(axis=1))
            store(codes_ref.at[own], e3m4_codes(piece * inverse_scales(scales, piece.shape)))
            store(scales_ref.at[own], scales)

    run = plgpu.kernel(
        fp8_keep_rows,
        out_type=[jax.ShapeDtypeStruct((groups, GROUP), jnp.uint8), jax.ShapeDtypeStruct((groups,), jnp.float32)],
        grid=(grid_size(BLOCKS_PER_CORE),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret(),
    )
    codes, scales = call_varying(run)(h.reshape(groups, GROUP))
    return KeptRows(codes.reshape(h.shape), scales.reshape(len(h), -1))
