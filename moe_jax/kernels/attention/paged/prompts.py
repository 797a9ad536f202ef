"""Attention of prompts' chunks to pages of keys and values on Hopper, with the consumers of the training kernel.

Kernel `paged_attention_prompts`. A tile is a block of queries and a key head. It has 128 rows: 128 / G queries, each with the G
heads of a key head. Its loop runs over blocks of N keys, from the last visible one down to the first. N = 128 keys are two
pages.

roles      producer WG2 (24 registers)      TMA a query's G rows -> q; a page of k -> k[slot]; a page of v -> v[slot]
           consumers WG0, WG1 (240)         64 rows each (`mosaic.consumer`); TMA a query's rows of out -> memory
smem       as in `mosaic.forward`
barriers   as in `mosaic.forward`. q.full has a copy for each query, k.full[s] and v.full[s] one for each page.
invariant  The slot of a page after a block's last one holds the last page again. Its keys are after all queries, masked.
cost       A page crosses memory once for each block of 128 / G queries, from L2 if other blocks read it too.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moe_jax.kernels.attention.mosaic.consumer import BLOCK_M, Consumer, Scratch, n_blocks
from moe_jax.kernels.attention.mosaic.masks import BlockSteps, Mask
from moe_jax.kernels.attention.mosaic.warpgroups import LOG2_E, ROWS, TileScheduler, WorkTile, broadcast_columns, launch
from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.kernels.attention.paged.blocks import PagedQueries, RowPages, most_blocks, query_blocks, window_operand
from moe_jax.kernels.attention.paged.items import block_pages
from moe_jax.kernels.hopper.launch import Named
from moe_jax.kernels.hopper.pipeline import WGMMA_ROWS


@partial(jax.jit, static_argnames=("scale", "skip"))
def attend_prompts(
    q: Float[Array, "tokens kv_heads group key_dim"],
    keys: Float[Array, "pages kv_heads 64 key_dim"],
    values: Float[Array, "pages kv_heads 64 value_dim"],
    queries: PagedQueries,
    *,
    scale: float,
    window: Int[Array, ""] | int | None,
    skip: int,
) -> Float[Array, "tokens kv_heads group value_dim"]:
    """Computes paged attention of prompt chunks on Hopper; padding yields zeros. `takes_group` must allow the group size.

    Args:
      skip: the number of rows, the first ones, that have one query each. Their results are not written.
    """
    (tokens, kv_heads, group, key_dim), value_dim = q.shape, values.shape[3]
    block_tokens, row_pages = BLOCK_M // group, RowPages(queries.page_table, window_operand(window))
    blocks = query_blocks(queries, tokens, block_tokens, skip=skip)
    scheduler = TileScheduler(1, kv_heads, kv_heads, len(blocks.position), "last", bytes_per_kv_head=None)
    pages_of_block = n_blocks(key_dim, value_dim).block // PAGE_SIZE
    scratch = Scratch.of(q.dtype, key_dim, value_dim, q_copies=block_tokens, copies=pages_of_block)
    inputs = Named(of_blocks=block_pages(blocks, row_pages), tokens=blocks.tokens, q=q, k=keys, v=values)
    out = jax.ShapeDtypeStruct((tokens, kv_heads, group, value_dim), q.dtype)

    def kernel(inputs: Named, out_ref, scratch: Scratch) -> None:
        block = _Block(inputs, out_ref, scratch, scale * LOG2_E)
        scratch.run(scheduler, block.load_tile, block.consume_tile)

    return launch("paged_attention_prompts", kernel, inputs, out, scratch)


def takes_group(group: int) -> bool:
    """Returns True if queries of `group` heads can be copied one by one into a consumer's rows.

    A copy into shared memory moves at least 8 rows.
    """
    return group % 8 == 0 and WGMMA_ROWS % group == 0


def most_tiles(rows: int, tokens: int, kv_heads: int, group: int) -> int:
    """Returns an upper bound on the tiles of `rows` rows and `tokens` tokens, padding included."""
    return most_blocks(rows, tokens, BLOCK_M // group) * kv_heads


@dataclass(frozen=True)
class _Block:
    """A thread block's work on each of its tiles."""

    inputs: Named
    out: Any
    scratch: Scratch
    scale_log2: float
    """The factor of scores in base 2."""

    def load_tile(self, number, tile: WorkTile, first_step):
        """Producer: loads q once per tile and k, v pages per step; returns the next tile's first step."""
        inputs, scratch = self.inputs, self.scratch
        of_blocks, tokens, q, k, v = inputs.of_blocks, inputs.tokens, inputs.q, inputs.k, inputs.v
        steps = self._steps(tile)
        scratch.q_pipe.acquire(number)
        for i in range(tokens.shape[1]):
            token = jnp.minimum(tokens[tile.block, i], q.shape[0] - 1)
            plgpu.copy_gmem_to_smem(q.at[token, tile.head], scratch.q.at[self._rows_of(i)], scratch.q_pipe.full_barrier(0))
        row, last_page = of_blocks.row[tile.block], jnp.maximum(of_blocks.num_pages[tile.block] - 1, 0)
        pages_of_block = scratch.k.shape[1] // PAGE_SIZE

        @pl.loop(0, steps.total)
        def _load_step(step):
            first = (steps.start - step) * pages_of_block
            places = [jnp.minimum(first + i, last_page) for i in range(pages_of_block)]
            pages = [of_blocks.page_table[row, place] for place in places]
            slot = scratch.k_pipe.slot(first_step + step)
            for source, buffer, pipe in (k, scratch.k, scratch.k_pipe), (v, scratch.v, scratch.v_pipe):
                pipe.acquire(first_step + step)
                for i, page in enumerate(pages):
                    target = buffer.at[slot, pl.ds(i * PAGE_SIZE, PAGE_SIZE)]
                    plgpu.copy_gmem_to_smem(source.at[page, tile.head], target, pipe.full_barrier(slot))

        return first_step + steps.total

    def consume_tile(self, warpgroup, _, tile: WorkTile, first_step):
        """Consumer: computes out of its 64 rows of a tile; returns the next tile's first step."""
        steps = self._steps(tile)
        o, row_scale = Consumer(self.scratch, self.scale_log2, warpgroup, steps, first_step).run(self._mask(tile, warpgroup))
        self._store(warpgroup, tile, o, row_scale.scale)
        return first_step + steps.total

    def _steps(self, tile: WorkTile) -> BlockSteps:
        """Returns the tile's blocks of keys; one for a tile without visible keys."""
        of_blocks, block_n = self.inputs.of_blocks, jnp.int32(self.scratch.k.shape[1])
        position, num_pages, window = of_blocks.position[tile.block], of_blocks.num_pages[tile.block], of_blocks.read_window()
        end = lax.div(num_pages * PAGE_SIZE + block_n - 1, block_n)
        # The first keys of the first and of the last query.
        low, high = jnp.int32(0), jnp.int32(0)
        if window is not None:
            low = jnp.maximum(position - window + 1, 0)
            high = jnp.maximum(position + self.inputs.tokens.shape[1] - window, 0)
        total = jnp.maximum(end - lax.div(low, block_n), 1)
        masked = jnp.clip(end - lax.div(position + 1, block_n), 1, total)
        full = jnp.clip(end - lax.div(high + block_n - 1, block_n), masked, total)
        return BlockSteps(jnp.maximum(end - 1, 0), masked, full, total)

    def _mask(self, tile: WorkTile, warpgroup) -> Mask:
        """Returns the mask of a warpgroup's rows; the rows of a tile without pages see no key."""
        of_blocks, group = self.inputs.of_blocks, jnp.int32(self.inputs.q.shape[2])
        position = jnp.where(of_blocks.num_pages[tile.block] > 0, of_blocks.position[tile.block], -BLOCK_M)
        row = warpgroup * WGMMA_ROWS + plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=ROWS)
        last_key, window = position + lax.div(row, group), of_blocks.read_window()
        first_key = plgpu.layout_cast(jnp.zeros(WGMMA_ROWS, jnp.int32), ROWS) if window is None else last_key - window + 1
        return Mask.of_interval(first_key, last_key, 0)

    def _store(self, warpgroup, tile: WorkTile, o, scale) -> None:
        """Writes the rows of each of the warpgroup's queries, skipping unused places."""
        scratch, tokens = self.scratch, self.inputs.tokens
        own_tokens = WGMMA_ROWS // self.inputs.q.shape[2]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch.out[warpgroup] = (o * broadcast_columns(scale, o.shape)).astype(scratch.out.dtype)
        plgpu.commit_smem()
        for i in range(own_tokens):
            token = tokens[tile.block, warpgroup * own_tokens + i]
            copy = partial(plgpu.copy_smem_to_gmem, scratch.out.at[warpgroup, self._rows_of(i)])
            pl.when(token < self.out.shape[0])(partial(copy, self.out.at[token, tile.head]))

    def _rows_of(self, query: int) -> Any:
        """Returns the rows of one query of a warpgroup or a block."""
        group = self.inputs.q.shape[2]
        return pl.ds(query * group, group)
