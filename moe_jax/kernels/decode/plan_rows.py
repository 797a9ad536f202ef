"""The plan of a decoding step's tokens, as far as the experts' matmuls and the sum behind them read it.

Kernel `plan_rows`: one block, experts dealt out to the threads of each warpgroup.

    counts    each warpgroup counts an eighth of the tokens
    sums      over experts are formed by adding the row to itself, shifted by 1, 2, 4, ..., in two buffers by turns. All
              warpgroups form the same sums, so that none waits for another
    smem      counts: E numbers a warpgroup; two rows of a warpgroup: 2 x E numbers each, with zeros in front
    blocks    expert e has so many blocks of 64 rows as its tokens fill, or one if a block has a row for each token. Each
              warpgroup writes the blocks of an eighth of the experts

Kernel `place_rows`, for more tokens than a block has rows: one warpgroup a block and token. It counts the earlier tokens of the
token's eighth, and writes the token's number into the rows of its experts.
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
from moe_jax.kernels.hopper.launch import launch
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT

WARPGROUPS = 8
"""Warpgroups of `plan_rows`: each holds the choices of an eighth of the tokens, its part, in registers."""


class RowsOfExperts(NamedTuple):
    """Each expert's rows, in blocks of `ROW_ALIGNMENT`."""

    offsets: Int[Array, "experts+1"]
    """`Plan.offsets`."""
    expert_of_block: Int[Array, "blocks"]
    """The place of each block's expert in the stack of all layers; blocks behind the last one are not written."""
    before_part: Int[Array, "warpgroups experts"]
    """The number of tokens before each part of the tokens that chose the expert; not written if a block holds all tokens."""
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
      holds_all_tokens: an expert that was chosen has one block, in which token t's row is row t.
    """
    tokens, num_experts = is_chosen.shape
    layout = _layout(num_experts)
    of_part, own_experts = _tokens_of_part(tokens), num_experts // WARPGROUPS
    whole = pl.ds(0, num_experts)

    def body(
        is_chosen_ref, layer_ref, offsets_ref, expert_of_block_ref, before_part_ref, chosen_rows_ref, scratch: _PlanScratch
    ):
        warpgroup = lax.axis_index("warpgroup")

        def count():
            """Returns the number of tokens that chose each expert, or the bits of their rows.

            Each warpgroup goes through its own tokens.
            """
            of_tokens = [warpgroup * of_part + i for i in range(of_part)]
            # Behind the last token there is nothing to load: the last one is loaded again, and does not count.
            loaded = [_load(is_chosen_ref.at[jnp.minimum(token, tokens - 1), whole]) for token in of_tokens]
            chosen = [row * (token < tokens).astype(jnp.int32) for token, row in zip(of_tokens, loaded, strict=True)]
            # In a block that holds all tokens, bits of their rows take the place of numbers.
            counted = [row << token // ROWS_OF_A_BIT for token, row in zip(of_tokens, chosen, strict=True)]
            add = jnp.bitwise_or if holds_all_tokens else jnp.add
            scratch.counts[warpgroup] = reduce(add, counted if holds_all_tokens else chosen)
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.counted)
            plgpu.barrier_wait(scratch.counted)
            counts = [_load(scratch.counts.at[i, whole]) for i in range(WARPGROUPS)]
            if not holds_all_tokens:
                earlier = [counts[i] * (i < warpgroup).astype(jnp.int32) for i in range(WARPGROUPS - 1)]
                before_part_ref[warpgroup, whole] = reduce(jnp.add, earlier)
            return reduce(add, counts)

        def sums_up_to(own):
            """Returns each expert's number added to those of the experts before it."""
            zeros = plgpu.layout_cast(jnp.zeros(num_experts, jnp.int32), layout)
            for buffer in range(2):
                scratch.sums[warpgroup, buffer, whole] = zeros
            up_to, shift, buffer = own, 1, 0
            while shift < num_experts:
                row = scratch.sums.at[warpgroup, buffer]
                row[pl.ds(num_experts, num_experts)] = up_to
                plgpu.commit_smem()
                up_to = up_to + _load(row.at[pl.ds(num_experts - shift, num_experts)])
                # Threads that still read this row are waited for before it is written again: by the other row's commit.
                shift, buffer = 2 * shift, 1 - buffer
            return up_to

        def plan():
            counts = count()
            if holds_all_tokens:
                own = jnp.minimum(counts, 1)
            else:
                own = lax.shift_right_logical(counts + ROW_ALIGNMENT - 1, BLOCK_BITS)
            up_to = sums_up_to(own)

            @pl.when(warpgroup == 0)
            def _offsets():
                offsets_ref[whole] = ROW_ALIGNMENT * (up_to - own)
                offsets_ref[pl.ds(1, num_experts)] = ROW_ALIGNMENT * up_to
                chosen_rows_ref[whole] = counts if holds_all_tokens else _rows_of_last_block(counts)

            # The buffers' zeros in front of the first row are the number of blocks before expert 0.
            row = scratch.sums.at[warpgroup, 0]
            plgpu.commit_smem()
            row[pl.ds(num_experts, num_experts)] = up_to
            plgpu.commit_smem()
            first = warpgroup * own_experts

            @pl.loop(0, own_experts)
            def _blocks(i):
                expert = first + i

                @pl.loop(row[num_experts + expert - 1], row[num_experts + expert])
                def _block(block):
                    expert_of_block_ref[block] = expert + layer_ref[0] * num_experts

        pl.when(lax.axis_index("block") == 0)(plan)

    parts = (1, 1) if holds_all_tokens else (WARPGROUPS, num_experts)
    shapes = (num_experts + 1,), (num_blocks,), parts, (num_experts,)
    outputs = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    scratch = _PlanScratch(
        plgpu.SMEM((WARPGROUPS, num_experts), jnp.int32),
        plgpu.SMEM((WARPGROUPS, 2, 2 * num_experts), jnp.int32),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
    )
    kernel = launch("plan_rows", body, outputs, [scratch], warpgroups=WARPGROUPS, blocks_per_core=1)
    return RowsOfExperts(*kernel(is_chosen, layer[None]))


class _PlanScratch(NamedTuple):
    """Shared memory of `plan_rows`."""

    counts: Any
    """[warpgroups, experts]: the number of choices of each warpgroup's tokens, or the bits of their rows."""
    sums: Any
    """[warpgroups, 2, 2 * experts]: zeros, and a row whose sums are formed."""
    counted: Any
    """A barrier: the counts of all warpgroups are there."""


BLOCK_BITS = ROW_ALIGNMENT.bit_length() - 1


def _rows_of_last_block(count):
    """Returns `Plan.chosen_rows` of experts with `count` rows one behind the other."""
    in_last = count - lax.shift_right_logical(count - 1, BLOCK_BITS) * ROW_ALIGNMENT
    bits = [jnp.where(in_last > first, 1 << i, 0) for i, first in enumerate(range(0, ROW_ALIGNMENT, ROWS_OF_A_BIT))]
    return reduce(jnp.add, bits)


class RowPlaces(NamedTuple):
    """The rows of tokens, and the tokens of rows."""

    place: Int[Array, "tokens experts"]
    """The number of earlier tokens that chose the expert: a token's row in the expert's blocks."""
    source_of_row: Int[Array, "rows"]
    """The token of each row; any number for a row without one."""


@partial(jax.jit, static_argnames=("k", "num_blocks"))
def place_rows(
    is_chosen: Int[Array, "tokens experts"],
    experts: Int[Array, "tokens experts"],
    rows: RowsOfExperts,
    *,
    k: int,
    num_blocks: int,
) -> RowPlaces:
    """Returns where the tokens' rows are. The first k columns of `experts` are a token's choices, as in `TokenChoices`."""
    tokens, num_experts = is_chosen.shape
    of_part, whole = _tokens_of_part(tokens), pl.ds(0, num_experts)

    def body(is_chosen_ref, experts_ref, before_part_ref, offsets_ref, place_ref, sources_ref, before_smem):
        @plgpu.nd_loop((tokens,), collective_axes="block")
        def _token(info):
            token = info.index[0]
            part = lax.div(token, jnp.int32(of_part))
            # All loads at once: each would wait for the one before.
            others = [part * of_part + i for i in range(of_part - 1)]
            loaded = [_load(is_chosen_ref.at[jnp.minimum(other, tokens - 1), whole]) for other in others]
            chosen = [experts_ref[token, i] for i in range(k)]
            earlier = [row * (other < token).astype(jnp.int32) for other, row in zip(others, loaded, strict=True)]
            before = reduce(jnp.add, earlier, _load(before_part_ref.at[part, whole]))
            place_ref[token, whole] = before
            before_smem[...] = before
            plgpu.commit_smem()

            @pl.when(chosen[0] < num_experts)
            def _sources():
                for row in [offsets_ref[expert] + before_smem[expert] for expert in chosen]:
                    sources_ref[row] = token

            # The next token overwrites what slower threads may still read.
            plgpu.commit_smem()

    shapes = is_chosen.shape, (num_blocks * ROW_ALIGNMENT,)
    outputs = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    scratch = [plgpu.SMEM((num_experts,), jnp.int32)]
    kernel = launch("place_rows", body, outputs, scratch, warpgroups=1, blocks_per_core=2)
    return RowPlaces(*kernel(is_chosen, experts, rows.before_part, rows.offsets))


def _tokens_of_part(tokens: int) -> int:
    """Returns the number of tokens that each warpgroup of `plan_rows` counts."""
    return -(-tokens // WARPGROUPS)


def _layout(num_experts: int):
    return plgpu.Layout.WG_STRIDED((num_experts,), vec_size=1)


def _load(reference):
    return plgpu.load(reference, layout=_layout(reference.shape[0]), optimized=False)
