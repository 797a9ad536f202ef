"""The plan of a decoding step's tokens, as far as the experts' matmuls and the sum behind them read it.

Kernel `plan_rows`: one block, experts dealt out to the threads of each warpgroup.

    counts    each warpgroup counts an eighth of the tokens; the first one goes on alone
    smem      2 x E numbers: sums over experts are formed by adding the row to itself, shifted by 1, 2, 4, ...; zeros in front
    blocks    expert e has so many blocks of 64 rows as its tokens fill, or one if a block has a row for each token
              block b belongs to expert number (experts e with at most b blocks up to e)

Kernel `source_rows`, for more tokens than a block has rows: one warpgroup a block of threads, two blocks of rows at a time.
Each goes through all tokens, and keeps those that chose its expert.
"""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from moe_jax.kernels.experts.routing import ROWS_OF_A_BIT
from moe_jax.kernels.hopper.launch import WARPGROUP_THREADS, launch
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT

LOADS_AT_ONCE = 16
"""Numbers that are on their way from memory at one time, for each block of rows."""

WARPGROUPS = 8
"""Warpgroups of `plan_rows`: each holds the choices of an eighth of the tokens in registers."""


class RowsOfExperts(NamedTuple):
    """Each expert's rows, in blocks of `ROW_ALIGNMENT`."""

    offsets: Int[Array, "experts+1"]
    """`Plan.offsets`."""
    expert_of_block: Int[Array, "blocks"]
    """The place of each block's expert in the stack of all layers; blocks behind the last one have any expert."""
    place: Int[Array, "tokens experts"]
    """The number of earlier tokens that chose the expert: a token's row in the expert's blocks."""
    chosen_rows: Int[Array, "experts"]
    """`Plan.chosen_rows`."""


@partial(jax.jit, static_argnames=("num_blocks", "holds_all_tokens"))
def plan_rows(
    is_chosen: Int[Array, "tokens experts"], layer: Int[Array, ""], *, num_blocks: int, holds_all_tokens: bool
) -> RowsOfExperts:
    """Returns the rows of these choices in this layer of a stack.

    Args:
      is_chosen: 1 where the token chose the expert, else 0.
      num_blocks: a bound on the number of blocks.
      holds_all_tokens: an expert that was chosen has one block, in which token t's row is row t; `place` is then not written.
    """
    tokens, num_experts = is_chosen.shape
    blocks = -(-num_blocks // WARPGROUP_THREADS) * WARPGROUP_THREADS
    layout, of_blocks = (plgpu.Layout.WG_STRIDED((size,), vec_size=1) for size in (num_experts, blocks))

    per_warpgroup = -(-tokens // WARPGROUPS)

    def body(is_chosen_ref, layer_ref, offsets_ref, expert_of_block_ref, place_ref, chosen_rows_ref, scratch: _PlanScratch):
        warpgroup = lax.axis_index("warpgroup")

        def load(reference, first=0):
            return plgpu.load(reference.at[pl.ds(first, num_experts)], layout=layout, optimized=False)

        def count():
            """Returns the number of tokens that chose each expert, or the bits of their rows.

            Each warpgroup goes through its own tokens.
            """
            of_tokens = [warpgroup * per_warpgroup + i for i in range(per_warpgroup)]
            # Behind the last token there is nothing to load: the last one is loaded again, and does not count.
            loaded = [load(is_chosen_ref.at[jnp.minimum(token, tokens - 1)]) for token in of_tokens]
            chosen = [row * (token < tokens).astype(jnp.int32) for token, row in zip(of_tokens, loaded, strict=True)]
            # In a block that holds all tokens, bits of their rows take the place of numbers.
            counted = [row << token // ROWS_OF_A_BIT for token, row in zip(of_tokens, chosen, strict=True)]
            add = jnp.bitwise_or if holds_all_tokens else jnp.add
            scratch.counts[warpgroup] = reduce(add, counted if holds_all_tokens else chosen)
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.counted)
            plgpu.barrier_wait(scratch.counted)
            counts = [load(scratch.counts.at[i]) for i in range(WARPGROUPS)]
            if not holds_all_tokens:
                before = sum(
                    (counts[i] * (i < warpgroup).astype(jnp.int32) for i in range(WARPGROUPS - 1)), start=0 * counts[0]
                )
                for token, row in zip(of_tokens, chosen, strict=True):
                    pl.when(token < tokens)(partial(_store_row, place_ref, token, before))
                    before = before + row
            return reduce(add, counts)

        def plan(count):
            sums = scratch.sums
            sums[pl.ds(0, num_experts)] = plgpu.layout_cast(jnp.zeros(num_experts, jnp.int32), layout)
            chosen_rows_ref[pl.ds(0, num_experts)] = count if holds_all_tokens else _rows_of_last_block(count)
            own = jnp.minimum(count, 1) if holds_all_tokens else lax.shift_right_logical(count + ROW_ALIGNMENT - 1, BLOCK_BITS)
            up_to, shift = own, 1
            while shift < num_experts:
                sums[pl.ds(num_experts, num_experts)] = up_to
                plgpu.commit_smem()
                up_to = up_to + load(sums, num_experts - shift)
                plgpu.commit_smem()
                shift *= 2
            offsets_ref[pl.ds(0, num_experts)] = ROW_ALIGNMENT * (up_to - own)
            offsets_ref[pl.ds(1, num_experts)] = ROW_ALIGNMENT * up_to
            sums[pl.ds(num_experts, num_experts)] = up_to
            plgpu.commit_smem()
            block = plgpu.broadcasted_iota(jnp.int32, (blocks,), 0, layout=of_blocks)

            def add_experts(i, expert):
                first = num_experts + i * LOADS_AT_ONCE
                for e in range(LOADS_AT_ONCE):
                    expert = expert + (sums[first + e] <= block).astype(jnp.int32)
                return expert

            none = plgpu.layout_cast(jnp.zeros(blocks, jnp.int32), of_blocks)
            expert = lax.fori_loop(0, num_experts // LOADS_AT_ONCE, add_experts, none)
            expert_of_block_ref[pl.ds(0, blocks)] = jnp.minimum(expert, num_experts - 1) + layer_ref[0] * num_experts

        def count_and_plan():
            counts = count()
            pl.when(warpgroup == 0)(lambda: plan(counts))

        pl.when(lax.axis_index("block") == 0)(count_and_plan)

    of_tokens = (1, 1) if holds_all_tokens else is_chosen.shape
    shapes = (num_experts + 1,), (blocks,), of_tokens, (num_experts,)
    outputs = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    scratch = _PlanScratch(
        plgpu.SMEM((WARPGROUPS, num_experts), jnp.int32),
        plgpu.SMEM((2 * num_experts,), jnp.int32),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
    )
    kernel = launch("plan_rows", body, outputs, [scratch], warpgroups=WARPGROUPS, blocks_per_core=1)
    return RowsOfExperts(*kernel(is_chosen, layer[None]))


class _PlanScratch(NamedTuple):
    """Shared memory of `plan_rows`."""

    counts: Any
    """[warpgroups, experts]: the number of choices of each warpgroup's tokens, or the bits of their rows."""
    sums: Any
    """[2 * experts]: zeros, and a row whose sums are formed."""
    counted: Any
    """A barrier: the counts of all warpgroups are there."""


def _rows_of_last_block(count):
    """Returns `Plan.chosen_rows` of experts with `count` rows one behind the other."""
    in_last = count - lax.shift_right_logical(count - 1, BLOCK_BITS) * ROW_ALIGNMENT
    bits = [jnp.where(in_last > first, 1 << i, 0) for i, first in enumerate(range(0, ROW_ALIGNMENT, ROWS_OF_A_BIT))]
    return reduce(jnp.add, bits)


def _store_row(place_ref, token, row) -> None:
    place_ref[token, pl.ds(0, row.shape[0])] = row


BLOCK_BITS = ROW_ALIGNMENT.bit_length() - 1

NO_ROW = -(2**30)
"""The row of a lane that no token may take."""


@partial(jax.jit, static_argnames="num_blocks")
def source_rows(
    is_chosen: Int[Array, "tokens experts"], rows: RowsOfExperts, layer: Int[Array, ""], *, num_blocks: int
) -> Int[Array, "rows"]:
    """Returns the token of each row of the first `num_blocks` blocks; the number of tokens for a row without one."""
    tokens, num_experts = is_chosen.shape
    layout = plgpu.Layout.WG_STRIDED((WARPGROUP_THREADS,), vec_size=1)
    items = -(-num_blocks * ROW_ALIGNMENT // WARPGROUP_THREADS)
    of_item = WARPGROUP_THREADS // ROW_ALIGNMENT

    def body(is_chosen_ref, offsets_ref, expert_of_block_ref, layer_ref, sources_ref):
        lane = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_THREADS,), 0, layout=layout)

        @plgpu.nd_loop((items,), collective_axes="block")
        def _item(info):
            first_block = info.index[0] * of_item
            experts = [expert_of_block_ref[first_block + i] - layer_ref[0] * num_experts for i in range(of_item)]
            firsts = [(first_block + i) * ROW_ALIGNMENT - offsets_ref[expert] for i, expert in enumerate(experts)]
            lanes = [_rows_of_lanes(lane, i) for i in range(of_item)]
            blocks = list(map(_BlockRows, experts, firsts, lanes))

            def load_chunk(chunk):
                chunk_tokens = [chunk * LOADS_AT_ONCE + i for i in range(LOADS_AT_ONCE)]
                return [_choice_of(is_chosen_ref, token, block.expert) for block in blocks for token in chunk_tokens]

            def add_chunk(chunk, state: _Found):
                loading = load_chunk(chunk + 1)
                sources, counts = state.sources, list(state.counts)
                for number, block in enumerate(blocks):
                    for i in range(LOADS_AT_ONCE):
                        is_own = state.chosen[number * LOADS_AT_ONCE + i]
                        row = jnp.where(is_own > 0, counts[number] - block.first_place, ROW_ALIGNMENT)
                        sources = jnp.where(block.row_of_lane == row, chunk * LOADS_AT_ONCE + i, sources)
                        counts[number] = counts[number] + is_own
                return _Found(sources, tuple(counts), loading)

            nobody = plgpu.layout_cast(jnp.full(WARPGROUP_THREADS, tokens, jnp.int32), layout)
            start = _Found(nobody, (jnp.int32(0),) * of_item, load_chunk(jnp.int32(0)))
            found = lax.fori_loop(0, -(-tokens // LOADS_AT_ONCE), add_chunk, start)
            sources_ref[pl.ds(info.index[0] * WARPGROUP_THREADS, WARPGROUP_THREADS)] = found.sources

    outputs = [jax.ShapeDtypeStruct((items * WARPGROUP_THREADS,), jnp.int32)]
    kernel = launch("source_rows", body, outputs, [], warpgroups=1, blocks_per_core=1)
    return kernel(is_chosen, rows.offsets, rows.expert_of_block, layer[None])[0]


def _choice_of(is_chosen_ref, token, expert):
    """Returns 1 if the token chose the expert; 0 behind the last token, where there is nothing to load."""
    tokens = is_chosen_ref.shape[0]
    return is_chosen_ref[jnp.minimum(token, tokens - 1), expert] * (token < tokens).astype(jnp.int32)


class _BlockRows(NamedTuple):
    """A block of rows, and the lanes that hold them."""

    expert: Any
    first_place: Any
    """The place of the block's first row among its expert's rows."""
    row_of_lane: Any
    """NO_ROW in lanes of other blocks."""


def _rows_of_lanes(lane, block: int):
    """Returns the row of each lane that holds a row of the item's block number `block`; NO_ROW for other lanes."""
    row = lane - block * ROW_ALIGNMENT
    return jnp.where((row >= 0) & (row < ROW_ALIGNMENT), row, NO_ROW)


class _Found(NamedTuple):
    """The loop's state over chunks of tokens."""

    sources: Any
    counts: tuple
    """For each block the number of tokens so far that chose its expert."""
    chosen: list
    """The choices of the chunk's tokens, on their way from memory."""
