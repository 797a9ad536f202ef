"""Queries, keys and values of new tokens: norm and rotation of each head, and keys and values into their pages.

The projection with its bias, its norm and the result are rounded to the model's dtype, as between the modules.

Kernel `heads_to_pages`:

    roles     one warpgroup per block and (token, some heads): 128 columns, one per thread; heads in turn
    smem      each head's row twice, 2 x 128 f32: read from a later column, it is shifted

Kernel `chunk_heads_to_pages`, for many tokens:

    roles     one warpgroup per block; 64 rows of a head in the layout of a wgmma's result: four threads hold a row
    smem      a head, 64 x 128, and a key head's rows without swizzle, in 16 bits: 32 KiB
    barriers  loaded: 1 copy
    cost      all heads are read and written once; cos and sin are read, from L2, for every head of queries and keys
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention.mosaic.warpgroups import COLUMNS, broadcast_columns, broadcast_rows, load_tile
from moe_jax.kernels.attention.paged.fp8 import F8, FP8Pages, Pages, bits_of_magnitudes, exponent_of, power_of_two, written
from moe_jax.kernels.decode.rows import BLOCKS_PER_CORE, load_row, normalized, row_layout, sum_of_splits
from moe_jax.kernels.hopper.launch import Named, grid_size, launch, operand_transforms, store
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS

HEAD_DIM = 128

HALF, PIECE = HEAD_DIM // 2, 32
"""Columns of half a head, and those that `chunk_heads_to_pages` rotates at a time."""

HEAD_BLOCKS = 2 * BLOCKS_PER_CORE
"""Thread blocks per core."""

MOST_HEADS_AT_ONCE = 8
"""Heads whose sums a block loads before it processes the first: no block then waits for memory twice."""


class NewTokens(NamedTuple):
    """Rotary tables and page positions of a step's tokens, the same for all layers.

    cos and sin are laid out so that y = x * cos + (the other number of each rotary pair) * sin. For the first number of a
    pair sin is negative. Columns that are not rotated have cos 1 and sin 0.
    """

    cos: Float[Array, "tokens 128"]
    sin: Float[Array, "tokens 128"]
    page: Int[Array, "tokens"]
    offset: Int[Array, "tokens"]
    """The token's place inside the page."""


class HeadNorms(NamedTuple):
    """RMSNorm weights of query heads and of key heads, and a bias of all columns; None where there are none."""

    q: Float[Array, "128"] | None = None
    k: Float[Array, "128"] | None = None
    bias: Float[Array, "columns"] | None = None


@partial(jax.jit, static_argnames=("dtype", "eps", "distance"))
def heads_to_pages(
    splits: Float[Array, "splits tokens columns"],
    norms: HeadNorms,
    new: NewTokens,
    keys: Pages,
    values: Pages,
    *,
    dtype: DTypeLike,
    eps: float,
    distance: int = HALF,
) -> tuple[Array, Pages, Pages]:
    """Returns rotated queries [tokens, heads, 128], and the pages with rotated keys and values written, in place.

    Args:
      splits: partial sums (`project.project`) of all heads' columns: queries, then keys, then values.
      dtype: the model's.
      distance: columns between the numbers of a rotary pair.
    """
    (_, tokens, columns), kv_heads = splits.shape, keys.shape[1]
    in_fp8 = isinstance(keys, FP8Pages)
    all_heads = columns // HEAD_DIM
    heads = all_heads - 2 * kv_heads

    at_once = _heads_at_once(tokens, all_heads)

    def body(splits_ref, norms: HeadNorms, new: NewTokens, keys_ref, values_ref, q_ref, scratch):
        @plgpu.nd_loop((tokens, all_heads // at_once), collective_axes="block")
        def _heads(info):
            token, first = info.index[0], info.index[1] * at_once
            whole = pl.ds(0, HEAD_DIM)
            # All loads at once, even those that values do not need: else each would wait for earlier work.
            own = [first + i for i in range(at_once)]
            sums = [sum_of_splits(splits_ref, token, pl.ds(head * HEAD_DIM, HEAD_DIM)) for head in own]
            if norms.bias is not None:
                biases = [load_row(norms.bias.at[pl.ds(head * HEAD_DIM, HEAD_DIM)]) for head in own]
                sums = [row + bias.astype(row.dtype) for row, bias in zip(sums, biases, strict=True)]
            place = new.page[token], new.offset[token]
            cos, sin = load_row(new.cos.at[token, whole]), load_row(new.sin.at[token, whole])
            if norms.q is not None:
                q_weight, k_weight = load_row(norms.q.at[whole]), load_row(norms.k.at[whole])

            def store(head, row, other_smem):
                @pl.when(head >= heads + kv_heads)
                def _value():
                    _write(values_ref, (place[0], head - heads - kv_heads, place[1]), row)

                @pl.when(head < heads + kv_heads)
                def _rotated():
                    if norms.q is None:
                        normed = row.astype(jnp.float32)
                    else:
                        weight = lax.cond(head < heads, lambda: q_weight, lambda: k_weight)
                        normed = normalized(row.astype(jnp.float32), weight, eps, dtype).astype(jnp.float32)
                    other_smem[pl.ds(0, HEAD_DIM)] = normed
                    other_smem[pl.ds(HEAD_DIM, HEAD_DIM)] = normed
                    plgpu.commit_smem()
                    other = _others_of_pairs(other_smem, distance)
                    rotated = (normed * cos + other * sin).astype(dtype)

                    @pl.when(head < heads)
                    def _query():
                        q_ref[token, head] = rotated

                    @pl.when(head >= heads)
                    def _key():
                        _write(keys_ref, (place[0], head - heads, place[1]), rotated)

            for i, head in enumerate(own):
                store(head, sums[i].astype(dtype), scratch.at[i])
            # The next heads overwrite rows that slower threads may still read.
            plgpu.commit_smem()

    outputs = [jax.ShapeDtypeStruct((tokens, heads, HEAD_DIM), dtype)]
    scratch = [plgpu.SMEM((at_once, 2 * HEAD_DIM), jnp.float32)]
    in_place = 4 if in_fp8 else 2
    kernel = launch("heads_to_pages", body, outputs, scratch, warpgroups=1, in_place=in_place, blocks_per_core=HEAD_BLOCKS)
    weights = jax.tree.map(lambda weight: weight.astype(dtype), norms)
    # XLA would fuse a slice with the kernel that reads it, and then lose the aliasing of keys and values.
    splits, weights, new = lax.optimization_barrier((splits, weights, new))
    q, *written = kernel(splits, weights, new, keys, values)
    return q, *((FP8Pages(*written[:2]), FP8Pages(*written[2:])) if in_fp8 else written)


def _others_of_pairs(twice_smem, distance: int) -> Float[Array, "128"]:
    """Returns for each column of a head, stored twice, the other number of its rotary pair."""
    after = load_row(twice_smem.at[pl.ds(distance, HEAD_DIM)])
    if distance == HALF:
        return after
    before = load_row(twice_smem.at[pl.ds(HEAD_DIM - distance, HEAD_DIM)])
    column = plgpu.broadcasted_iota(jnp.int32, (HEAD_DIM,), 0, layout=row_layout(HEAD_DIM))
    return jnp.where(lax.rem(lax.div(column, jnp.int32(distance)), jnp.int32(2)) == 0, after, before)


def _write(pages, place: tuple, row: Float[Array, "128"]) -> None:
    """Writes a token's key or value of a head, in the dtype of the pages."""
    if not isinstance(pages, FP8Pages):
        pages[*place] = row
        return
    # Rounds as `fp8.quantised` does. The exponent is one number of the whole warpgroup.
    exponent = exponent_of(jnp.max(bits_of_magnitudes(row)))
    inverse = power_of_two(jnp.broadcast_to(254 - exponent, row.shape))
    pages.codes[*place] = (row.astype(jnp.float32) * inverse).astype(F8)
    pages.exponents[*place] = exponent.astype(jnp.uint8)


def _heads_at_once(tokens: int, all_heads: int) -> int:
    """Returns the smallest number of heads with which each block runs once; the largest possible if none is large enough."""
    numbers = [n for n in range(1, MOST_HEADS_AT_ONCE + 1) if all_heads % n == 0]
    return next((n for n in numbers if tokens * all_heads <= n * grid_size(HEAD_BLOCKS)), numbers[-1])


CHUNK_BLOCKS = 4
"""Thread blocks per core, limited by registers: a thread has at most 120."""

ROWS_AT_ONCE = 8
"""Rows that are loaded before the first of them is written to its page."""


@partial(jax.jit, static_argnames=("eps", "distance"))
def chunk_heads_to_pages(
    projections: Float[Array, "tokens columns"],
    norms: HeadNorms,
    new: NewTokens,
    keys: Pages,
    values: Pages,
    *,
    eps: float,
    distance: int = HALF,
) -> tuple[Array, Pages, Pages]:
    """Computes `heads_to_pages` for 64 tokens or more, whose projections have the model's dtype and include the bias.

    `distance` is a multiple of PIECE. Keys and values for pages in FP8 are written in the model's dtype first, and then rounded
    by XLA.
    """
    num_tokens = len(projections)
    if isinstance(keys, FP8Pages):
        page_size, index = keys.shape[2], jnp.arange(num_tokens, dtype=jnp.int32)
        buffer = jnp.zeros((-(-num_tokens // page_size), *keys.shape[1:]), projections.dtype)
        in_order = new._replace(page=index // page_size, offset=index % page_size)
        q, *buffers = chunk_heads_to_pages(projections, norms, in_order, buffer, buffer, eps=eps, distance=distance)
        by_token = [rows.swapaxes(1, 2).reshape(-1, rows.shape[1], HEAD_DIM)[:num_tokens] for rows in buffers]
        return q, *(written(pages, new.page, new.offset, rows) for pages, rows in zip((keys, values), by_token, strict=True))
    # TMA copies begin at multiples of 8 rows. Rows after the last token write the same as the last token.
    fill = -num_tokens % 8
    projections, new = jax.tree.map(
        lambda rows: jnp.pad(rows, ((0, fill), *((0, 0),) * (rows.ndim - 1)), mode="edge"), (projections, new)
    )
    (tokens, columns), kv_heads, dtype = projections.shape, keys.shape[1], keys.dtype
    heads = columns // HEAD_DIM - 2 * kv_heads
    items = -(-tokens // WGMMA_ROWS), heads + 2 * kv_heads

    def body(projections_ref, norms: HeadNorms, new: NewTokens, keys_ref, values_ref, q_ref, scratch: Named):
        @plgpu.nd_loop(items, collective_axes="block")
        def _item(info):
            # The last block begins early enough to be whole. Tokens of two blocks are written twice, with the same values.
            first = pl.multiple_of(jnp.minimum(info.index[0] * WGMMA_ROWS, tokens - WGMMA_ROWS), 8)
            rows, head = pl.ds(first, WGMMA_ROWS), info.index[1]
            of_head = pl.ds(head * HEAD_DIM, HEAD_DIM)

            def rotate(target, weight_ref) -> None:
                """Loads the head. Writes it normed and rotated, in pieces of both halves because registers are few."""
                plgpu.copy_gmem_to_smem(projections_ref.at[rows, of_head], scratch.head, scratch.loaded)
                plgpu.barrier_wait(scratch.loaded)
                scale = None if weight_ref is None else _scale(scratch.head, eps)
                # The rows of keys are read one by one, so they have no swizzle, and their store has bank conflicts.
                swizzled = target is scratch.head
                for start in range(0, distance, PIECE):
                    first_half, second_half = pl.ds(start, PIECE), pl.ds(distance + start, PIECE)
                    cos, sin = load_tile(new.cos.at[rows, first_half]), load_tile(new.sin.at[rows, second_half])
                    a, b = (_normed(scratch.head, scale, weight_ref, half) for half in (first_half, second_half))
                    store(target.at[:, first_half], (a * cos - b * sin).astype(dtype), optimized=swizzled)
                    store(target.at[:, second_half], (b * cos + a * sin).astype(dtype), optimized=swizzled)
                for start in range(2 * distance, HEAD_DIM, PIECE):
                    rest = pl.ds(start, PIECE)
                    store(target.at[:, rest], _normed(scratch.head, scale, weight_ref, rest).astype(dtype), optimized=swizzled)
                plgpu.commit_smem()

            def write_rows(load, pages_ref, kv_head) -> None:
                @pl.loop(0, WGMMA_ROWS // ROWS_AT_ONCE)
                def _rows(part):
                    own = [part * ROWS_AT_ONCE + i for i in range(ROWS_AT_ONCE)]
                    places = [(new.page[first + row], new.offset[first + row]) for row in own]
                    loaded = [load(row) for row in own]
                    for (page, offset), row in zip(places, loaded, strict=True):
                        pages_ref[page, kv_head, offset] = row

            @pl.when(head < heads)
            def _query():
                rotate(scratch.head, norms.q)
                plgpu.copy_smem_to_gmem(scratch.head, q_ref.at[rows, head])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when((head >= heads) & (head < heads + kv_heads))
            def _key():
                rotate(scratch.rows, norms.k)
                write_rows(lambda row: load_row(scratch.rows.at[row]), keys_ref, head - heads)
                # The next key overwrites rows that slower threads may still read.
                plgpu.commit_smem()

            @pl.when(head >= heads + kv_heads)
            def _value():
                load = lambda row: load_row(projections_ref.at[first + row, of_head])  # noqa: E731
                write_rows(load, values_ref, head - heads - kv_heads)

        plgpu.wait_smem_to_gmem(0)

    outputs = [jax.ShapeDtypeStruct((tokens, heads, HEAD_DIM), dtype)]
    scratch = Named(
        head=plgpu.SMEM((WGMMA_ROWS, HEAD_DIM), dtype, transforms=operand_transforms(dtype, PIECE)),
        rows=plgpu.SMEM((WGMMA_ROWS, HEAD_DIM), dtype),
        loaded=plgpu.Barrier(),
    )
    kernel = launch("chunk_heads_to_pages", body, outputs, [scratch], warpgroups=1, in_place=2, blocks_per_core=CHUNK_BLOCKS)
    weights = jax.tree.map(lambda weight: weight.astype(dtype), norms)
    # The barrier keeps XLA from fusing a slice with the kernel, as in `heads_to_pages`.
    projections, weights, new = lax.optimization_barrier((projections, weights, new))
    q, keys, values = kernel(projections, weights, new, keys, values)
    return q[:num_tokens], keys, values


def _scale(head_smem, eps: float):
    """Returns the factor of each row that makes the mean of its squares 1."""
    parts = [head_smem[:, pl.ds(start, PIECE)].astype(jnp.float32) for start in range(0, HEAD_DIM, PIECE)]
    squares = [(part * part).sum(axis=1) for part in parts]
    return lax.rsqrt(sum(squares[1:], start=squares[0]) / HEAD_DIM + eps)


def _normed(head_smem, scale, weight_ref, columns):
    """Returns these columns of a head in f32; without a scale they are not normed."""
    row = head_smem[:, columns].astype(jnp.float32)
    if scale is None:
        return row
    row = (row * broadcast_columns(scale, row.shape)).astype(head_smem.dtype)
    weight = plgpu.load(weight_ref.at[columns], layout=COLUMNS, optimized=False)
    return (broadcast_rows(weight, row.shape) * row).astype(jnp.float32)
