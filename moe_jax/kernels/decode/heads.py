"""Queries, keys and values of new tokens: norm and rotation of each head, and keys and values into their pages.

Kernel `heads_to_pages`:

    roles     one warpgroup a block and (token, head): 128 columns, one a thread
    smem      the row twice, 2 x 128 f32: read from its middle it is rotated by half
    rounding  as between the modules: the projection, its norm and the result are rounded to the model's dtype
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moe_jax.kernels.decode.rows import BLOCKS_PER_CORE, load_row, normalized, sum_of_splits
from moe_jax.kernels.hopper.launch import launch

HEAD_DIM = 128


class RotationTables(NamedTuple):
    """cos and sin of each token's angles, f32, laid out so that y = x * cos + (x rotated by half a head) * sin."""

    cos: Float[Array, "tokens 128"]
    sin: Float[Array, "tokens 128"]
    """The first half is negative."""


class HeadsAndPages(NamedTuple):
    """The new tokens' queries, and a layer's pages with their keys and values."""

    q: Float[Array, "tokens heads 128"]
    keys: Float[Array, "pages kv_heads page_size 128"]
    values: Float[Array, "pages kv_heads page_size 128"]


@partial(jax.jit, static_argnames="eps")
def heads_to_pages(
    splits: Float[Array, "splits tokens columns"],
    q_norm: Float[Array, "128"],
    k_norm: Float[Array, "128"],
    tables: RotationTables,
    page: Int[Array, "tokens"],
    offset: Int[Array, "tokens"],
    keys: Float[Array, "pages kv_heads page_size 128"],
    values: Float[Array, "pages kv_heads page_size 128"],
    *,
    eps: float,
) -> HeadsAndPages:
    """Returns rotated queries, and the pages with rotated keys and values written at (page, offset), in place.

    Args:
      splits: partial sums (`rows.matmul_in_splits`) of all heads' columns: queries, then keys, then values.
      q_norm, k_norm: the norms' weights of queries' and of keys' heads.
    """
    (num_splits, tokens, columns), kv_heads, dtype = splits.shape, keys.shape[1], keys.dtype
    all_heads = columns // HEAD_DIM
    heads = all_heads - 2 * kv_heads

    def body(splits_ref, q_norm_ref, k_norm_ref, cos_ref, sin_ref, page_ref, offset_ref, keys_ref, values_ref, q_ref, scratch):
        @plgpu.nd_loop((tokens, all_heads), collective_axes="block")
        def _head(info):
            token, head = info.index
            row = sum_of_splits(splits_ref, token, pl.ds(head * HEAD_DIM, HEAD_DIM)).astype(dtype)
            place = page_ref[token], offset_ref[token]

            @pl.when(head >= heads + kv_heads)
            def _value():
                values_ref[place[0], head - heads - kv_heads, place[1]] = row

            @pl.when(head < heads + kv_heads)
            def _rotated():
                whole = pl.ds(0, HEAD_DIM)
                weight = lax.cond(head < heads, lambda: load_row(q_norm_ref.at[whole]), lambda: load_row(k_norm_ref.at[whole]))
                normed = normalized(row.astype(jnp.float32), weight, eps, dtype).astype(jnp.float32)
                scratch[pl.ds(0, HEAD_DIM)] = normed
                scratch[pl.ds(HEAD_DIM, HEAD_DIM)] = normed
                plgpu.commit_smem()
                other = load_row(scratch.at[pl.ds(HEAD_DIM // 2, HEAD_DIM)])
                cos, sin = load_row(cos_ref.at[token, whole]), load_row(sin_ref.at[token, whole])
                rotated = (normed * cos + other * sin).astype(dtype)

                @pl.when(head < heads)
                def _query():
                    q_ref[token, head] = rotated

                @pl.when(head >= heads)
                def _key():
                    keys_ref[place[0], head - heads, place[1]] = rotated

                # The next head overwrites the row that slower threads may still read.
                plgpu.commit_smem()

    outputs = [jax.ShapeDtypeStruct((tokens, heads, HEAD_DIM), dtype)]
    scratch = [plgpu.SMEM((2 * HEAD_DIM,), jnp.float32)]
    kernel = launch("heads_to_pages", body, outputs, scratch, warpgroups=1, in_place=2, blocks_per_core=BLOCKS_PER_CORE)
    return HeadsAndPages(*kernel(splits, q_norm.astype(dtype), k_norm.astype(dtype), *tables, page, offset, keys, values))
