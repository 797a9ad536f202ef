"""Queries, keys and values of many new tokens, as `heads` has them of few: a block works on 64 tokens of some heads.

Kernel `chunk_heads_to_pages`:

    roles     one warpgroup a block; 64 rows of a head in the layout of a wgmma's result: a row lies in four threads
    smem      H heads, each 64 x 128, and a head's rows without swizzle, in 16 bits: (H + 1) * 16 KiB
    barriers  loaded[h]: 1 copy
    rounding  as between the modules: the projection, its norm and the result are rounded to the model's dtype
    cost      all heads are read and written once; cos and sin are read, from L2, for every H heads
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Shaped

from moe_jax.kernels.attention.mosaic.warpgroups import (
    COLUMNS,
    broadcast_columns,
    broadcast_rows,
    load_tile,
)
from moe_jax.kernels.decode.heads import HEAD_DIM, HeadNorms, HeadsAndPages, NewTokens
from moe_jax.kernels.decode.rows import load_row
from moe_jax.kernels.hopper.launch import launch, operand_transforms
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS

MOST_HEADS_AT_ONCE = 2
"""Heads of an item, at most."""

CHUNK_BLOCKS = 3
"""Thread blocks a core, as many as registers hold: a thread has 168 of them, at most."""

ROWS_AT_ONCE = 8
"""Rows that are loaded before the first of them is written to its page."""

HALF, PIECE = HEAD_DIM // 2, 32


@partial(jax.jit, static_argnames="eps")
def chunk_heads_to_pages(
    projections: Float[Array, "tokens columns"],
    norms: HeadNorms,
    new: NewTokens,
    keys: Float[Array, "pages kv_heads page_size 128"],
    values: Float[Array, "pages kv_heads page_size 128"],
    *,
    eps: float,
) -> HeadsAndPages:
    """Computes `heads.heads_to_pages` of at least 64 tokens, whose projections have the pages' dtype."""
    num_tokens = len(projections)
    # TMA copies begin at multiples of 8 rows. Rows behind the last token write what that one writes.
    projections, new = jax.tree.map(lambda rows: _filled_up(rows, 8), (projections, new))
    (tokens, columns), kv_heads, dtype = projections.shape, keys.shape[1], keys.dtype
    heads = columns // HEAD_DIM - 2 * kv_heads
    at_once = math.gcd(heads, kv_heads, MOST_HEADS_AT_ONCE)
    items = -(-tokens // WGMMA_ROWS), columns // (at_once * HEAD_DIM)

    def body(projections_ref, norms: HeadNorms, new: NewTokens, keys_ref, values_ref, q_ref, scratch: _Scratch):
        @plgpu.nd_loop(items, collective_axes="block")
        def _item(info):
            # The last block begins early enough to be whole. Tokens of two blocks are written twice, with the same values.
            first = pl.multiple_of(jnp.minimum(info.index[0] * WGMMA_ROWS, tokens - WGMMA_ROWS), 8)
            first_head = info.index[1] * at_once
            rows = pl.ds(first, WGMMA_ROWS)

            def load() -> None:
                for i in range(at_once):
                    of_head = pl.ds((first_head + i) * HEAD_DIM, HEAD_DIM)
                    copy = projections_ref.at[rows, of_head], scratch.heads.at[i], scratch.loaded.at[i]
                    plgpu.copy_gmem_to_smem(*copy)

            def rotate(own: range, targets: list, weight_ref) -> None:
                """Writes normed and rotated heads, pieces of both halves at a time, for want of registers. May be in place."""
                for i in own:
                    plgpu.barrier_wait(scratch.loaded.at[i])
                scales = [_scale(scratch.heads.at[i], eps) for i in own]
                for start in range(0, HALF, PIECE):
                    first_half, second_half = pl.ds(start, PIECE), pl.ds(HALF + start, PIECE)
                    cos, sin = load_tile(new.cos.at[rows, first_half]), load_tile(new.sin.at[rows, second_half])
                    for i, scale, target in zip(own, scales, targets, strict=True):
                        a = _normed(scratch.heads.at[i], scale, weight_ref, first_half)
                        b = _normed(scratch.heads.at[i], scale, weight_ref, second_half)
                        target[:, first_half] = (a * cos - b * sin).astype(dtype)
                        target[:, second_half] = (b * cos + a * sin).astype(dtype)
                plgpu.commit_smem()

            def write_rows(load, pages_ref, head) -> None:
                @pl.loop(0, WGMMA_ROWS // ROWS_AT_ONCE)
                def _rows(part):
                    own = [part * ROWS_AT_ONCE + i for i in range(ROWS_AT_ONCE)]
                    places = [(new.page[first + row], new.offset[first + row]) for row in own]
                    loaded = [load(row) for row in own]
                    for (page, offset), row in zip(places, loaded, strict=True):
                        pages_ref[page, head, offset] = row

            @pl.when(first_head < heads)
            def _queries():
                load()
                rotate(range(at_once), [scratch.heads.at[i] for i in range(at_once)], norms.q)
                for i in range(at_once):
                    plgpu.copy_smem_to_gmem(scratch.heads.at[i], q_ref.at[rows, first_head + i])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when((first_head >= heads) & (first_head < heads + kv_heads))
            def _keys():
                load()
                for i in range(at_once):
                    rotate(range(i, i + 1), [scratch.rows], norms.k)
                    write_rows(lambda row: load_row(scratch.rows.at[row]), keys_ref, first_head + i - heads)
                    # The next head overwrites rows that slower threads may still read.
                    plgpu.commit_smem()

            @pl.when(first_head >= heads + kv_heads)
            def _values():
                for i in range(at_once):
                    of_head = pl.ds((first_head + i) * HEAD_DIM, HEAD_DIM)
                    load = lambda row, of_head=of_head: load_row(projections_ref.at[first + row, of_head])  # noqa: E731
                    write_rows(load, values_ref, first_head + i - heads - kv_heads)

        plgpu.wait_smem_to_gmem(0)

    outputs = [jax.ShapeDtypeStruct((tokens, heads, HEAD_DIM), dtype)]
    scratch = _Scratch(
        heads=plgpu.SMEM((at_once, WGMMA_ROWS, HEAD_DIM), dtype, transforms=operand_transforms(dtype, PIECE)),
        rows=plgpu.SMEM((WGMMA_ROWS, HEAD_DIM), dtype),
        loaded=plgpu.Barrier(num_barriers=at_once),
    )
    kernel = launch("chunk_heads_to_pages", body, outputs, [scratch], warpgroups=1, in_place=2, blocks_per_core=CHUNK_BLOCKS)
    weights = HeadNorms(*(weight.astype(dtype) for weight in norms))
    # As in `heads_to_pages`: XLA must not fuse a slice with the kernel.
    projections, weights, new = lax.optimization_barrier((projections, weights, new))
    q, *pages = kernel(projections, weights, new, keys, values)
    return HeadsAndPages(q[:num_tokens], *pages)


def _filled_up(rows: Shaped[Array, "tokens ..."], multiple: int) -> Shaped[Array, "filled ..."]:
    """Returns the rows with copies of the last one behind them, up to a multiple of this number."""
    return jnp.pad(rows, ((0, -len(rows) % multiple), *((0, 0),) * (rows.ndim - 1)), mode="edge")


class _Scratch(NamedTuple):
    heads: Any
    rows: Any
    loaded: Any


def _scale(head_smem, eps: float):
    """Returns the factor of each row with which the mean of its squares is 1."""
    parts = [head_smem[:, pl.ds(start, PIECE)].astype(jnp.float32) for start in range(0, HEAD_DIM, PIECE)]
    squares = [(part * part).sum(axis=1) for part in parts]
    return lax.rsqrt(sum(squares[1:], start=squares[0]) / HEAD_DIM + eps)


def _normed(head_smem, scale, weight_ref, columns):
    row = head_smem[:, columns].astype(jnp.float32)
    row = (row * broadcast_columns(scale, row.shape)).astype(head_smem.dtype)
    weight = plgpu.load(weight_ref.at[columns], layout=COLUMNS, optimized=False)
    return (broadcast_rows(weight, row.shape) * row).astype(jnp.float32)
