"""The plan of a decoding step's tokens, with only the fields that the experts' matmuls and the following sum read.

Kernel `plan_rows`: two thread blocks, with experts distributed over the threads of each warpgroup.

    counts    each warpgroup counts an eighth of the tokens. The first one continues, the second one stores sums over eighths
    smem      counts: E numbers a warpgroup; a row of 2 x E numbers for each step of the sums, with zeros in front. Sums over
              experts are formed by adding the row to itself, shifted by 1 to 7, then by 8, 16, ..., 56, and so on
    blocks    expert e has the blocks of 64 rows that its tokens fill, or one if a block has a row for each token
              block b belongs to expert number (experts e with at most b blocks up to e): each block of threads finds half
              of them, the first one writes everything else

Kernel `place_rows`, for more tokens than a block has rows: one warpgroup per block and token. It counts the earlier tokens of
the token's eighth, and writes the token's number into the rows of its experts.
"""

from functools import partial, reduce
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from moe_jax.kernels.experts.routing import ROWS_OF_A_BIT
from moe_jax.kernels.hopper.launch import WARPGROUP_THREADS, Named, launch
from moe_jax.kernels.hopper.mainloop import ROW_ALIGNMENT

THREAD_BLOCKS = 2
"""Thread blocks of `plan_rows`. Both compute all sums; each compares its half of the blocks of rows with them."""

SHIFTS = 8
"""Numbers that a step of the sums adds. Each step waits for barriers and shared memory, so few steps are best."""

LOADS_AT_ONCE = 32
"""Sums in flight from shared memory at a time."""

COUNTERS = 4
"""Separate counters of a thread: each addition to a counter waits for the previous one."""

WARPGROUPS = 8
"""Warpgroups of `plan_rows`: each holds the choices of an eighth of the tokens, its part, in registers."""


class RowsOfExperts(NamedTuple):
    """The routing plan of a decoding step: each expert's rows, in blocks of `ROW_ALIGNMENT`."""

    offsets: Int[Array, "experts+1"]
    """`Plan.offsets`."""
    expert_of_block: Int[Array, "blocks"]
    """The index of each block's expert in the stack of all layers; arbitrary for blocks after the last one."""
    before_part: Int[Array, "warpgroups experts"]
    """For each part, the number of earlier tokens that chose the expert; not written if a block holds all tokens."""
    chosen_rows: Int[Array, "experts"]
    """`Plan.chosen_rows`."""


@partial(jax.jit, static_argnames=("num_held", "num_blocks", "holds_all_tokens"))
def plan_rows(
    is_chosen: Int[Array, "tokens experts"], layer: Int[Array, ""], *, num_held: int, num_blocks: int, holds_all_tokens: bool
) -> RowsOfExperts:
    """Builds the routing plan for one layer of stacked experts, from the mask of chosen experts.

    Args:
      is_chosen: 1 if the token chose the expert, else 0. There may be columns after the last expert.
      num_held: the number of experts of a layer in the stack, which are the first; no token chose another.
      num_blocks: a bound on the number of blocks.
      holds_all_tokens: an expert that was chosen has one block, in which token t's row is row t.
    """
    tokens, num_experts = is_chosen.shape
    of_part, whole = _tokens_of_part(tokens), pl.ds(0, num_experts)
    of_threads = -(-num_blocks // (THREAD_BLOCKS * WARPGROUP_THREADS)) * WARPGROUP_THREADS

    def body(is_chosen_ref, layer_ref, offsets_ref, expert_of_block_ref, before_part_ref, chosen_rows_ref, scratch: Named):
        warpgroup, thread_block = lax.axis_index("warpgroup"), lax.axis_index("block")
        # In a block that holds all tokens, bits of their rows replace counts.
        add = jnp.bitwise_or if holds_all_tokens else jnp.add

        def count():
            """Counts the choices of this warpgroup's tokens per expert, into shared memory."""
            of_tokens = [warpgroup * of_part + i for i in range(of_part)]
            counted = [_load_choices(is_chosen_ref, token) for token in of_tokens]
            # The sums' zeros are stored while the choices are in flight.
            scratch.sums[warpgroup, whole] = _zeros(num_experts)
            if tokens % WARPGROUPS:
                counted = [row * (token < tokens).astype(jnp.int32) for token, row in zip(of_tokens, counted, strict=True)]
            if holds_all_tokens:
                counted = [row << token // ROWS_OF_A_BIT for token, row in zip(of_tokens, counted, strict=True)]
            scratch.counts[warpgroup] = reduce(add, counted)
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.counted)

        def sums_up_to(own):
            """Returns each expert's inclusive prefix sum over experts, and the shared-memory row that holds the sums."""
            up_to, shift, step = own, 1, 0
            while True:
                row = scratch.sums.at[step]
                row[pl.ds(num_experts, num_experts)] = up_to
                plgpu.commit_smem()
                shifts = range(shift, min(SHIFTS * shift, num_experts), shift)
                if not shifts:
                    return up_to, row
                up_to = reduce(jnp.add, [_load(row.at[pl.ds(num_experts - i, num_experts)]) for i in shifts], up_to)
                shift, step = SHIFTS * shift, step + 1

        def counts_of_parts():
            plgpu.barrier_wait(scratch.counted)
            return [_load(scratch.counts.at[i, whole]) for i in range(WARPGROUPS)]

        def store_before_parts():
            for part, before in enumerate(accumulate([_zeros(num_experts), *counts_of_parts()[:-1]])):
                before_part_ref[part, whole] = before

        def plan():
            of_layer = layer_ref[0] * num_held
            counts = reduce(add, counts_of_parts())
            blocks = lax.shift_right_logical(counts + ROW_ALIGNMENT - 1, BLOCK_BITS)
            own = jnp.minimum(counts, 1) if holds_all_tokens else blocks
            up_to, sums = sums_up_to(own)

            @pl.when(thread_block == 0)
            def _experts():
                offsets_ref[whole] = ROW_ALIGNMENT * (up_to - own)
                offsets_ref[pl.ds(1, num_experts)] = ROW_ALIGNMENT * up_to
                chosen_rows_ref[whole] = counts if holds_all_tokens else _rows_of_last_block(counts)

            first = thread_block * of_threads
            next_block = first + 1 + plgpu.broadcasted_iota(jnp.int32, (of_threads,), 0, layout=_layout(of_threads))

            def add_experts(i, counters):
                for e in range(LOADS_AT_ONCE):
                    # 1 if the difference is negative: a comparison needs more instructions.
                    up_to_block = lax.shift_right_logical(sums[num_experts + i * LOADS_AT_ONCE + e] - next_block, 31)
                    counters = (*counters[1:], counters[0] + up_to_block)
                return counters

            counters = lax.fori_loop(0, num_experts // LOADS_AT_ONCE, add_experts, (_zeros(of_threads),) * COUNTERS)
            expert = jnp.minimum(reduce(jnp.add, counters), num_held - 1)
            expert_of_block_ref[pl.ds(first, of_threads)] = of_layer + expert

        @pl.when(thread_block < THREAD_BLOCKS)
        def _count_and_plan():
            count()
            pl.when(warpgroup == 0)(plan)
            if not holds_all_tokens:
                pl.when((warpgroup == 1) & (thread_block == 0))(store_before_parts)

    parts = (1, 1) if holds_all_tokens else (WARPGROUPS, num_experts)
    shapes = (num_experts + 1,), (THREAD_BLOCKS * of_threads,), parts, (num_experts,)
    outputs = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    scratch = Named(
        counts=plgpu.SMEM((WARPGROUPS, num_experts), jnp.int32),
        sums=plgpu.SMEM((WARPGROUPS, 2 * num_experts), jnp.int32),
        counted=plgpu.Barrier(num_arrivals=WARPGROUPS),
    )
    kernel = launch("plan_rows", body, outputs, [scratch], warpgroups=WARPGROUPS, blocks_per_core=1)
    return RowsOfExperts(*kernel(is_chosen, layer[None]))


BLOCK_BITS = ROW_ALIGNMENT.bit_length() - 1


def _rows_of_last_block(count):
    """Returns `Plan.chosen_rows`, the bits of each expert's last block, for experts with `count` consecutive rows."""
    in_last = count - lax.shift_right_logical(count - 1, BLOCK_BITS) * ROW_ALIGNMENT
    bits = [jnp.where(in_last > first, 1 << i, 0) for i, first in enumerate(range(0, ROW_ALIGNMENT, ROWS_OF_A_BIT))]
    return reduce(jnp.add, bits)


@partial(jax.jit, static_argnames=("k", "num_blocks"))
def place_rows(
    is_chosen: Int[Array, "tokens experts"],
    experts: Int[Array, "tokens experts"],
    rows: RowsOfExperts,
    *,
    k: int,
    num_blocks: int,
) -> tuple[Int[Array, "tokens experts"], Int[Array, "rows"]]:
    """Returns each token's row for each choice, and the inverse: the token of each row (arbitrary for rows without one).

    A token's row is the number of earlier tokens that chose the expert. The first k columns of `experts` are a token's choices,
    as in `TokenChoices`.
    """
    tokens, num_experts = is_chosen.shape
    of_part, whole = _tokens_of_part(tokens), pl.ds(0, num_experts)

    def body(is_chosen_ref, experts_ref, before_part_ref, offsets_ref, place_ref, sources_ref, before_smem):
        @plgpu.nd_loop((tokens,), collective_axes="block")
        def _token(info):
            token = info.index[0]
            part = lax.div(token, jnp.int32(of_part))
            # All loads at once: each would wait for the one before.
            others = [part * of_part + i for i in range(of_part - 1)]
            loaded = [_load_choices(is_chosen_ref, other) for other in others]
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

            # The next token overwrites data that slower threads may still read.
            plgpu.commit_smem()

    shapes = is_chosen.shape, (num_blocks * ROW_ALIGNMENT,)
    outputs = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    scratch = [plgpu.SMEM((num_experts,), jnp.int32)]
    kernel = launch("place_rows", body, outputs, scratch, warpgroups=1, blocks_per_core=2)
    place, source_of_row = kernel(is_chosen, experts, rows.before_part, rows.offsets)
    return place, source_of_row


def _tokens_of_part(tokens: int) -> int:
    """Returns the number of tokens that each warpgroup of `plan_rows` counts."""
    return -(-tokens // WARPGROUPS)


def _load_choices(is_chosen_ref, token):
    """Returns the choices of a part's token; past the last token, the last one's."""
    tokens, num_experts = is_chosen_ref.shape
    # Without bounds, one address serves all loads of a thread, and as many registers as loads are enough.
    place = jnp.minimum(token, tokens - 1) if tokens % WARPGROUPS else token
    return _load(is_chosen_ref.at[place, pl.ds(0, num_experts)])


def _layout(size: int):
    return plgpu.Layout.WG_STRIDED((size,), vec_size=1)


def _zeros(size: int):
    return plgpu.layout_cast(jnp.zeros(size, jnp.int32), _layout(size))


def _load(reference):
    return plgpu.load(reference, layout=_layout(reference.shape[0]), optimized=False)
