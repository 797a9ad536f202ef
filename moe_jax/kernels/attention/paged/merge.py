"""Merges the attention to parts of a sequence's keys, in order of position.

Kernel `merge_splits`: one warpgroup a block and (block of queries, key head, query row), columns over the threads. The splits
that exist are added one after the other, with the larger of two logarithms as the common factor.
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

from moe_jax.kernels.attention.mosaic.consumer import LOWEST
from moe_jax.kernels.attention.paged.blocks import QueryBlocks, Splits, count_splits
from moe_jax.kernels.hopper.launch import WARPGROUP_THREADS, launch

BLOCKS_PER_CORE = 16

LOADS = 4
"""Splits that are loaded at a time."""


class _Sums(NamedTuple):
    """The sums over the splits so far, divided by 2^largest."""

    out: Any
    weight: Any
    largest: Any
    """Base 2, as the splits' lse."""


@partial(jax.jit, static_argnames=("rows", "splits", "dtype"))
def merge_splits(
    out: Float[Array, "blocks splits kv_heads _ value_dim"],
    lse: Float[Array, "blocks splits kv_heads _"],
    blocks: QueryBlocks,
    window: Int[Array, "1"] | None,
    *,
    rows: int,
    splits: Splits,
    dtype: DTypeLike,
) -> Float[Array, "blocks kv_heads rows value_dim"]:
    """Returns the attention to all keys: sum_s 2^lse[s] out[s] / sum_s 2^lse[s] over the splits s that have pages.

    Widths that are no multiple of 128 are merged in XLA.

    Args:
      rows: the rows that are of use, the first ones.
      lse: base 2; -inf for a split of which a query sees no key. The first split of a block always exists.
    """
    if out.shape[4] % WARPGROUP_THREADS:
        return _merged_in_xla(out[..., :rows, :], lse[..., :rows], blocks, window, splits).astype(dtype)
    num_blocks, _, kv_heads, _, columns = out.shape
    whole = pl.ds(0, columns)
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=columns // WARPGROUP_THREADS)

    def body(out_ref, lse_ref, position_ref, num_pages_ref, window_ref, merged_ref):
        window = None if window_ref is None else window_ref[0]

        @plgpu.nd_loop((num_blocks, kv_heads, rows), collective_axes="block")
        def _row(info):
            block, head, row = info.index

            def load(split) -> tuple[Any, Any]:
                values = plgpu.load(out_ref.at[block, split, head, row, whole], layout=layout, optimized=False)
                return values, jnp.maximum(lse_ref[block, split, head, row], LOWEST)

            def add(sums: _Sums, values, own, exists) -> _Sums:
                largest = jnp.where(exists, jnp.maximum(sums.largest, own), sums.largest)
                before, now = jnp.exp2(sums.largest - largest), jnp.where(exists, jnp.exp2(own - largest), 0.0)
                return _Sums(sums.out * before + values * now, sums.weight * before + now, largest)

            count = count_splits(position_ref[block], num_pages_ref[block], window, splits)

            def add_some(number, sums: _Sums) -> _Sums:
                some = [1 + number * LOADS + i for i in range(LOADS)]
                # A load takes longer than all the rest, so the loads come first.
                loaded = [load(jnp.minimum(split, count - 1)) for split in some]
                for split, part in zip(some, loaded, strict=True):
                    sums = add(sums, *part, split < count)
                return sums

            values, own = load(0)
            rounds = lax.div(jnp.maximum(count - 1, 0) + (LOADS - 1), jnp.int32(LOADS))
            sums = lax.fori_loop(0, rounds, add_some, _Sums(values, jnp.float32(1), own))
            merged_ref[block, head, row, whole] = (sums.out / sums.weight).astype(dtype)

    outputs = [jax.ShapeDtypeStruct((num_blocks, kv_heads, rows, columns), dtype)]
    kernel = launch("merge_splits", body, outputs, [], warpgroups=1, blocks_per_core=BLOCKS_PER_CORE)
    return kernel(out, lse, blocks.position, blocks.num_pages, window)[0]


def _merged_in_xla(
    out: Float[Array, "blocks splits kv_heads rows value_dim"],
    lse: Float[Array, "blocks splits kv_heads rows"],
    blocks: QueryBlocks,
    window: Int[Array, "1"] | None,
    splits: Splits,
) -> Float[Array, "blocks kv_heads rows value_dim"]:
    counts = count_splits(blocks.position, blocks.num_pages, window, splits)
    exists = jnp.arange(splits.number) < counts[:, None]
    lse = jnp.where(exists[:, :, None, None], lse, -jnp.inf)
    largest = jnp.maximum(lse.max(axis=1, keepdims=True), LOWEST)
    weights = jnp.exp2(lse - largest)
    total = weights.sum(axis=1)
    # Splits without pages were not written.
    summed = (jnp.where(exists[:, :, None, None, None], out, 0) * weights[..., None]).sum(axis=1)
    return summed / jnp.where(total > 0, total, 1)[..., None]
