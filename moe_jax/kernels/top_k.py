"""The indices of the k largest numbers of each row, equal to `lax.top_k`'s: a router's choice of experts.

Cost: rows * columns f32 read, rows * k int32 written, and k rounds of about 6 instructions per number. XLA sorts whole rows.

Kernel `top_k`:

    roles     one warpgroup a block, with 64 rows in registers in wgmma's layout: 4 threads share a row
    smem      none
    round     the largest key of each row; the first column with this key; that key becomes GONE
    key       an int32 in the order of `lax.top_k`: by bits, so that 0.0 is above -0.0, NaN above infinity, -NaN below all
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe_jax.kernels.backends import compute_capability, is_mosaic_allowed, splitting_refusal

FEWEST_ROWS = 1024
"""Minimum rows for the kernel: XLA sorts few rows in a few microseconds."""

MOST_COLUMNS = 256
"""A thread holds a quarter of two rows: 128 keys in its 255 registers."""

COLUMN_BLOCK = 8
"""Columns of a matrix in wgmma's layout are a multiple of 8."""

BLOCKS_PER_CORE = 4
"""While a block waits for memory, others use the core. Registers hold 2 blocks of 256 columns, or 4 of 128."""

GONE = -(2**31)
"""The key of an already chosen number: below all others."""


def top_k_indices(x: Float[Array, "rows columns"], k: int) -> Int[Array, "rows k"]:
    """Returns the column indices of each row's k largest elements, like `lax.top_k`, without gradients.

    Among equal numbers the smaller column comes first. A kernel computes them on Hopper if it supports the sizes.
    """
    x = lax.stop_gradient(x)
    return _top_k(x, k=k) if _has_kernel(x) else lax.top_k(x, k)[1]


def _has_kernel(x: Array) -> bool:
    if compute_capability() != "9.0" or not is_mosaic_allowed():
        return False
    # Imported here and below: Pallas Mosaic GPU costs a second of CPU time, even on devices without its kernels.
    from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS

    rows, columns = x.shape
    fits = rows >= FEWEST_ROWS and rows % WGMMA_ROWS == 0 and columns <= MOST_COLUMNS and columns % COLUMN_BLOCK == 0
    return fits and x.dtype == jnp.float32 and splitting_refusal() is None


@partial(jax.jit, static_argnames="k")
def _top_k(x: Float[Array, "rows columns"], *, k: int) -> Int[Array, "rows k"]:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from moe_jax.kernels.hopper.launch import launch
    from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS

    rows, columns = x.shape
    if not 0 < k <= columns:
        raise ValueError(f"k is {k}; it must be 1 to {columns}, the number of columns")
    layout = plgpu.Layout.WGMMA
    tile = WGMMA_ROWS, columns
    found_tile = WGMMA_ROWS, -(-k // COLUMN_BLOCK) * COLUMN_BLOCK

    def body(x_ref, found_ref):
        @plgpu.nd_loop((rows // WGMMA_ROWS,), collective_axes="block")
        def _tile(info):
            own_rows = pl.ds(info.index[0] * WGMMA_ROWS, WGMMA_ROWS)
            bits = lax.bitcast_convert_type(plgpu.load(x_ref.at[own_rows], layout=layout, optimized=False), jnp.int32)
            # -NaN of all ones would be GONE.
            keys = jnp.maximum(jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), GONE + 1)
            column = plgpu.broadcasted_iota(jnp.int32, tile, 1, layout=layout)
            place = plgpu.broadcasted_iota(jnp.int32, found_tile, 1, layout=layout)

            def choose(i, state):
                keys, found = state
                is_largest = keys == lax.broadcast_in_dim(keys.max(axis=1), tile, [0])
                chosen = jnp.where(is_largest, column, columns).min(axis=1)
                keys = jnp.where(column == lax.broadcast_in_dim(chosen, tile, [0]), GONE, keys)
                return keys, jnp.where(place == i, lax.broadcast_in_dim(chosen, found_tile, [0]), found)

            nothing = plgpu.layout_cast(jnp.zeros(found_tile, jnp.int32), layout)
            found_ref[own_rows] = lax.fori_loop(0, k, choose, (keys, nothing))[1]

    output = jax.ShapeDtypeStruct((rows, found_tile[1]), jnp.int32)
    kernel = launch("top_k", body, [output], [], warpgroups=1, blocks_per_core=BLOCKS_PER_CORE)
    return kernel(x)[0][:, :k]
