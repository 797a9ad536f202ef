"""Merges the attention to parts of a sequence's keys, in order of position.

Kernel `merge_splits`: one warpgroup a block and (block of queries, key head, query row), a column a thread. The splits that
exist are added one after the other, with the larger of two logarithms as the common factor.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention.mosaic.forward import LOWEST
from moe_jax.kernels.hopper.launch import WARPGROUP_THREADS, launch

COLUMN_A_THREAD = plgpu.Layout.WG_STRIDED((WARPGROUP_THREADS,), vec_size=1)

BLOCKS_PER_CORE = 16


class _Sums(NamedTuple):
    """The sums over the splits so far, divided by 2^largest."""

    out: Any
    weight: Any
    largest: Any
    """Base 2, as the splits' lse."""


@partial(jax.jit, static_argnames=("split_pages", "dtype"))
def merge_splits(
    out: Float[Array, "blocks splits kv_heads rows 128"],
    lse: Float[Array, "blocks splits kv_heads _"],
    num_pages: Int[Array, "blocks"],
    *,
    split_pages: int,
    dtype: DTypeLike,
) -> Float[Array, "blocks kv_heads rows 128"]:
    """Returns the attention to all keys: sum_s 2^lse[s] out[s] / sum_s 2^lse[s] over the splits s that have pages.

    Args:
      lse: base 2; -inf for a split of which a query sees no key. The first split of a block always exists.
      num_pages: the number of each block's pages, of which a split has `split_pages`.
    """
    num_blocks, _, kv_heads, rows, columns = out.shape
    whole = pl.ds(0, columns)

    def body(out_ref, lse_ref, num_pages_ref, merged_ref):
        @plgpu.nd_loop((num_blocks, kv_heads, rows), collective_axes="block")
        def _row(info):
            block, head, row = info.index

            def load(split) -> tuple[Any, Any]:
                values = plgpu.load(out_ref.at[block, split, head, row, whole], layout=COLUMN_A_THREAD, optimized=False)
                return values, jnp.maximum(lse_ref[block, split, head, row], LOWEST)

            def add(split, sums: _Sums) -> _Sums:
                values, own = load(split)
                largest = jnp.maximum(sums.largest, own)
                before, now = jnp.exp2(sums.largest - largest), jnp.exp2(own - largest)
                return _Sums(sums.out * before + values * now, sums.weight * before + now, largest)

            values, own = load(0)
            splits = lax.div(num_pages_ref[block] + (split_pages - 1), jnp.int32(split_pages))
            sums = lax.fori_loop(1, splits, add, _Sums(values, jnp.float32(1), own))
            merged_ref[block, head, row, whole] = (sums.out / sums.weight).astype(dtype)

    outputs = [jax.ShapeDtypeStruct((num_blocks, kv_heads, rows, columns), dtype)]
    kernel = launch("merge_splits", body, outputs, [], warpgroups=1, blocks_per_core=BLOCKS_PER_CORE)
    return kernel(out, lse, num_pages)[0]
