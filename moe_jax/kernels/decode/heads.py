"""Queries, keys and values of new tokens: norm and rotation of each head, and keys and values into their pages.

Kernel `heads_to_pages`:

    roles     one warpgroup a block and (token, some heads): 128 columns, one a thread; heads one after the other
    smem      each head's row twice, 2 x 128 f32: read from its middle it is rotated by half
    rounding  as between the modules: the projection, its norm and the result are rounded to the model's dtype
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moe_jax.kernels.decode.rows import BLOCKS_PER_CORE, load_row, normalized, sum_of_splits
from moe_jax.kernels.hopper.launch import grid_size, launch

HEAD_DIM = 128

HEAD_BLOCKS = 2 * BLOCKS_PER_CORE
"""Thread blocks a core."""

MOST_HEADS_AT_ONCE = 8
"""Heads whose sums a block loads before it works on the first: no block then waits for memory twice."""


class NewTokens(NamedTuple):
    """The rotations and places of a step's tokens, the same for all layers.

    cos and sin are laid out so that y = x * cos + (x rotated by half a head) * sin: the first half of sin is negative.
    """

    cos: Float[Array, "tokens 128"]
    sin: Float[Array, "tokens 128"]
    page: Int[Array, "tokens"]
    offset: Int[Array, "tokens"]
    """The token's place inside the page."""


class HeadNorms(NamedTuple):
    """The norms' weights of query heads and of key heads."""

    q: Float[Array, "128"]
    k: Float[Array, "128"]


class HeadsAndPages(NamedTuple):
    """The new tokens' queries, and a layer's pages with their keys and values."""

    q: Float[Array, "tokens heads 128"]
    keys: Float[Array, "pages kv_heads page_size 128"]
    values: Float[Array, "pages kv_heads page_size 128"]


@partial(jax.jit, static_argnames="eps")
def heads_to_pages(
    splits: Float[Array, "splits tokens columns"],
    norms: HeadNorms,
    new: NewTokens,
    keys: Float[Array, "pages kv_heads page_size 128"],
    values: Float[Array, "pages kv_heads page_size 128"],
    *,
    eps: float,
) -> HeadsAndPages:
    """Returns rotated queries, and the pages with rotated keys and values written, in place.

    Args:
      splits: partial sums (`project.project`) of all heads' columns: queries, then keys, then values.
    """
    (_, tokens, columns), kv_heads, dtype = splits.shape, keys.shape[1], keys.dtype
    all_heads = columns // HEAD_DIM
    heads = all_heads - 2 * kv_heads

    at_once = _heads_at_once(tokens, all_heads)

    def body(splits_ref, norms: HeadNorms, new: NewTokens, keys_ref, values_ref, q_ref, scratch):
        @plgpu.nd_loop((tokens, all_heads // at_once), collective_axes="block")
        def _heads(info):
            token, first = info.index[0], info.index[1] * at_once
            whole = pl.ds(0, HEAD_DIM)
            # All loads at once, those that values do not need too: each would wait for what is before it.
            own = [first + i for i in range(at_once)]
            sums = [sum_of_splits(splits_ref, token, pl.ds(head * HEAD_DIM, HEAD_DIM)) for head in own]
            place = new.page[token], new.offset[token]
            cos, sin = load_row(new.cos.at[token, whole]), load_row(new.sin.at[token, whole])
            q_weight, k_weight = load_row(norms.q.at[whole]), load_row(norms.k.at[whole])

            def store(head, row, other_smem):
                @pl.when(head >= heads + kv_heads)
                def _value():
                    values_ref[place[0], head - heads - kv_heads, place[1]] = row

                @pl.when(head < heads + kv_heads)
                def _rotated():
                    weight = lax.cond(head < heads, lambda: q_weight, lambda: k_weight)
                    normed = normalized(row.astype(jnp.float32), weight, eps, dtype).astype(jnp.float32)
                    other_smem[pl.ds(0, HEAD_DIM)] = normed
                    other_smem[pl.ds(HEAD_DIM, HEAD_DIM)] = normed
                    plgpu.commit_smem()
                    other = load_row(other_smem.at[pl.ds(HEAD_DIM // 2, HEAD_DIM)])
                    rotated = (normed * cos + other * sin).astype(dtype)

                    @pl.when(head < heads)
                    def _query():
                        q_ref[token, head] = rotated

                    @pl.when(head >= heads)
                    def _key():
                        keys_ref[place[0], head - heads, place[1]] = rotated

            for i, head in enumerate(own):
                store(head, sums[i].astype(dtype), scratch.at[i])
            # The next heads overwrite rows that slower threads may still read.
            plgpu.commit_smem()

    outputs = [jax.ShapeDtypeStruct((tokens, heads, HEAD_DIM), dtype)]
    scratch = [plgpu.SMEM((at_once, 2 * HEAD_DIM), jnp.float32)]
    kernel = launch("heads_to_pages", body, outputs, scratch, warpgroups=1, in_place=2, blocks_per_core=HEAD_BLOCKS)
    weights = HeadNorms(*(weight.astype(dtype) for weight in norms))
    # XLA fuses a slice with the kernel that reads it, and forgets then that keys and values are two arrays.
    splits, weights, new = lax.optimization_barrier((splits, weights, new))
    return HeadsAndPages(*kernel(splits, weights, new, keys, values))


def _heads_at_once(tokens: int, all_heads: int) -> int:
    """Returns the smallest number of heads with which each block works once; the largest there is if none is large enough."""
    numbers = [n for n in range(1, MOST_HEADS_AT_ONCE + 1) if all_heads % n == 0]
    return next((n for n in numbers if tokens * all_heads <= n * grid_size(HEAD_BLOCKS)), numbers[-1])
