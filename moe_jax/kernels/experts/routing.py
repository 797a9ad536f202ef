"""Sorts (token, expert) pairs by expert, so that each expert owns one contiguous run of rows."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, Num

from moe_jax.kernels.precision import sum_in_order, widened
from moe_jax.kernels.shapes import refuse_explicit_axes

PAIRS_TO_COMPARE = 2048
"""Largest number of pairs that are compared all to all: one kernel, while a sort and its scatters are several."""

PAIRS_TO_COUNT = 16384
"""The largest number of pairs whose rows are counted in blocks. A GPU does so in two thirds of a sort's time.

For 65,536 pairs it gains little, and XLA hides less of a joined pass's exchange under it (tests/layers/slow/test_passes.py).
"""

PAIRS_OF_A_BLOCK = 256
"""Pairs of a counting block. Pairs are compared within their block, and blocks with blocks: at most 256 of each."""

ROWS_OF_A_BIT = 8
"""Rows per bit of `Plan.chosen_rows`: the minimum that a copy between memories moves."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """Assigns a row to each (token, expert) pair. Pair p = t*K + k is token t's k-th choice; rows are pairs sorted by expert.

    Each expert's rows start at a multiple of `row_alignment`, so that a kernel's tiles never mix experts. Padding rows up to
    the next multiple belong to no pair. Pairs whose expert is outside [0, num_experts) come after offsets[-1]: no expert
    computes them.

    A plan that `holds_all_tokens` (`plan_of_few`) has one block for each expert that was chosen. Row t of a block is reserved
    for token t, even if token t did not choose the expert. Rows without a pair are then among the others, and pairs of one
    token and one expert share a row.
    """

    expert_of_row: Int[Array, "rows"]
    """Expert of each row; num_experts for a row without a pair and for a row that no expert computes."""
    token_of_row: Int[Array, "rows"]
    """Token of each row; `tokens` for a row without a pair."""
    pair_of_row: Int[Array, "rows"]
    """Pair of each row; `tokens * k` for a row without a pair."""
    row_of_pair: Int[Array, "tokens k"]
    """The inverse of pair_of_row: sums over a token's choices gather through it, so nothing is scattered or atomic. A pair
    that no expert computes has a row from offsets[-1] on, which several such pairs may share."""
    offsets: Int[Array, "experts+1"]
    """Expert e owns rows offsets[e] <= row < offsets[e + 1], including the padding of its last block. A plan by kernels may
    have further offsets, which no matmul reads."""
    ends: Int[Array, "experts"]
    """Rows ends[e] <= row < offsets[e + 1] are the padding of expert e's last block."""
    row_alignment: int = field(metadata={"static": True}, default=1)
    holds_all_tokens: bool = field(metadata={"static": True}, default=False)
    """True: a matmul may read the tokens in place, instead of a block's rows."""
    expert_of_block: Int[Array, "_"] | None = None
    """The matrix of each block of rows, `in_stack`, if a kernel computed it with the plan; None: it follows from `offsets`."""
    chosen_rows: Int[Array, "experts"] | None = None
    """Bits of the rows with pairs in each expert's last block, for few tokens. Bit i is set if one of rows 8 i to 8 i + 7 has
    one. A kernel that reads this field writes no rows without a set bit. None: matmuls write all rows of all blocks."""
    layer: Int[Array, ""] | None = None
    """The experts belong to this layer of a stack: weights, and sums of their gradients, are [layers, experts, ...]. None: they
    are [experts, ...]."""

    @property
    def num_rows(self) -> int:
        """Number of rows of arrays in expert order: pairs, plus padding for the worst routing."""
        return self.token_of_row.shape[0]

    @property
    def max_pairs(self) -> int:
        """The number of pairs that have rows; below tokens * k if the plan was limited to fewer."""
        return min(self.row_of_pair.size, self.num_rows)

    @property
    def num_experts(self) -> int:
        """The number of experts of the layer, including those without rows."""
        return self.ends.shape[0]

    def in_stack(self, experts: Int[Array, "..."]) -> Int[Array, "..."]:
        """Converts experts' indices within the layer to indices into stacked weights [layers * experts, ...]."""
        return experts if self.layer is None else experts + self.layer * self.num_experts


def plan(
    topk_experts: Integer[Array, "tokens k"], num_experts: int, row_alignment: int = 1, max_pairs: int | None = None
) -> Plan:
    """Sorts the pairs of `topk_experts` by expert, stably: an expert's rows are in token order.

    The same choices yield the same plan on every backend of one `row_alignment`. A token may choose one expert twice. Ids
    outside [0, num_experts) are legal and mean "no expert": such a pair adds nothing to its token and gets no gradient.

    Args:
        max_pairs: the number of pairs that get rows, the first in expert order; later pairs count as "no expert". In expert
            parallelism most of the tokens' experts are elsewhere: memory scales with max_pairs instead of tokens*k.

    Raises:
        ValueError: topk_experts is not a 2-D integer array, or is split over mesh axes of type Explicit; or num_experts,
            row_alignment or max_pairs is below 1.
    """
    _check(topk_experts, num_experts=num_experts, row_alignment=row_alignment, max_pairs=max_pairs)
    refuse_explicit_axes(topk_experts=topk_experts)
    tokens, k = topk_experts.shape
    experts = _experts_of_pairs(wide_ids(topk_experts), num_experts)
    pairs = jnp.arange(tokens * k, dtype=jnp.int32)
    num_pairs = tokens * k if max_pairs is None else min(tokens * k, max_pairs)
    expert = jnp.arange(num_experts + 1, dtype=jnp.int32)
    counts, earlier = _count(experts, num_experts)
    is_earlier = expert[:, None] > expert[:-1]
    begins = masked_sum(is_earlier, counts)
    if num_pairs < tokens * k:
        counts = jnp.clip(num_pairs - begins[:-1], 0, counts)
    offsets = masked_sum(is_earlier, -(-counts // row_alignment) * row_alignment)
    row = _sorted_rows(experts, offsets - begins) if earlier is None else offsets[experts] + earlier

    num_rows = _aligned_rows(num_pairs, num_experts, row_alignment)
    if row_alignment == 1 and num_pairs < tokens * k:
        num_rows += 1  # A row that no expert computes, shared by the pairs without a row of their own.
    ends = offsets[:-1] + counts
    place = row
    if num_pairs < tokens * k:
        has_row = row < jnp.pad(ends, (0, 1))[experts]
        row = jnp.where(has_row, row, num_rows - 1)
        # The last row belongs to no pair: pairs that share it are not written.
        place = jnp.where(has_row & (row < num_rows - 1), place, num_rows)
    all_have_rows = num_pairs == tokens * k

    def by_row(values: Int[Array, "pairs"], nobody: int) -> Int[Array, "rows"]:
        empty = jnp.full(num_rows, nobody, jnp.int32)
        mode = "promise_in_bounds" if all_have_rows else "drop"
        return empty.at[place].set(values, unique_indices=all_have_rows, mode=mode)

    pair_of_row = by_row(pairs, tokens * k)
    return Plan(
        expert_of_row=by_row(experts, num_experts),
        token_of_row=pair_of_row // max(k, 1),
        pair_of_row=pair_of_row,
        row_of_pair=row.reshape(tokens, k),
        offsets=offsets,
        ends=ends,
        row_alignment=row_alignment,
    )


def plan_of_few(topk_experts: Integer[Array, "tokens k"], num_experts: int, row_alignment: int) -> Plan:
    """Builds a plan for at most `row_alignment` tokens: each chosen expert has one block, with token t in row t.

    For forward passes only: `Plan` describes the differences. A tile of `row_alignment` rows takes the same time for one token
    as for all. So nothing needs to be sorted or gathered.

    Raises:
        ValueError: as `plan`; or there are no tokens, more than row_alignment tokens, or no choices.
    """
    _check(topk_experts, num_experts=num_experts, row_alignment=row_alignment)
    tokens, k = topk_experts.shape
    if not 0 < tokens <= row_alignment or k == 0:
        raise ValueError(
            f"plan_of_few takes 1 to row_alignment = {row_alignment} tokens with choices; got {tokens} tokens with {k} choices "
            "each"
        )
    topk_experts = wide_ids(topk_experts)
    expert = jnp.arange(num_experts + 1, dtype=jnp.int32)
    bit_of_token = 1 << jnp.arange(tokens, dtype=jnp.int32) // ROWS_OF_A_BIT
    bits = jnp.where(expert[:-1, None] == topk_experts.reshape(tokens * k), jnp.repeat(bit_of_token, k), 0)
    chosen_rows = jax.lax.reduce_or(bits, axes=(1,))
    is_chosen = chosen_rows != 0
    offsets = masked_sum(expert[:, None] > expert[:-1], is_chosen * jnp.int32(row_alignment))
    first_row = jnp.where(is_an_expert(topk_experts, num_experts), offsets.at[topk_experts].get(mode="clip"), offsets[-1])
    row_of_pair = first_row + jnp.arange(tokens, dtype=jnp.int32)[:, None]
    # As in `plan`, and for pairs that no expert computes, one block more than the worst routing fills.
    num_rows = (min(num_experts, tokens * k) + 1) * row_alignment
    pairs = jnp.arange(tokens * k, dtype=jnp.int32)
    pair_of_row = jnp.full(num_rows, tokens * k, jnp.int32).at[row_of_pair.reshape(-1)].set(pairs, mode="promise_in_bounds")
    experts = _experts_of_pairs(topk_experts, num_experts)
    return Plan(
        expert_of_row=experts.at[pair_of_row].get(mode="fill", fill_value=num_experts),
        token_of_row=pair_of_row // k,
        pair_of_row=pair_of_row,
        row_of_pair=row_of_pair,
        offsets=offsets,
        ends=offsets[:-1] + is_chosen * jnp.int32(tokens),
        row_alignment=row_alignment,
        holds_all_tokens=True,
        chosen_rows=chosen_rows,
    )


def plan_of_one(tokens: int, row_alignment: int) -> Plan:
    """Builds the plan of a single expert that processes all tokens in order (a dense matrix).

    The rows end with the last tile of two blocks: none starts at the last block.
    """
    blocks = -(-tokens // row_alignment)
    num_rows = -(-blocks // 2) * 2 * row_alignment
    row = jnp.arange(num_rows, dtype=jnp.int32)
    is_filling = row >= tokens
    pair_of_row = jnp.where(is_filling, tokens, row)
    return Plan(
        expert_of_row=is_filling.astype(jnp.int32),
        token_of_row=pair_of_row,
        pair_of_row=pair_of_row,
        row_of_pair=row[:tokens, None],
        offsets=jnp.array([0, blocks * row_alignment], jnp.int32),
        ends=jnp.array([tokens], jnp.int32),
        row_alignment=row_alignment,
    )


def plan_of_groups(group_sizes: Integer[Array, " experts"], tokens: int, row_alignment: int) -> Plan:
    """Builds the plan of tokens that are already in expert order: the next group_sizes[e] tokens chose expert e, and no other.

    Tokens beyond the sum of the sizes chose no expert. Sizes beyond the number of tokens are cut off.
    """
    num_experts = len(group_sizes)
    expert, token = (jnp.arange(size, dtype=jnp.int32) for size in (num_experts + 1, tokens))
    is_earlier = expert[:, None] > expert[:-1]
    begins = jnp.minimum(masked_sum(is_earlier, jnp.maximum(group_sizes.astype(jnp.int32), 0)), tokens)
    counts = jnp.diff(begins)
    offsets = masked_sum(is_earlier, -(-counts // row_alignment) * row_alignment)
    ends, shift = offsets[:-1] + counts, offsets - begins
    num_rows = _aligned_rows(tokens, num_experts, row_alignment)
    row = jnp.arange(num_rows, dtype=jnp.int32)

    def owner(starts: Int[Array, "experts+1"], places: Int[Array, "_"]) -> Int[Array, "_"]:
        return masked_sum(starts[1:] <= places[:, None], jnp.ones_like(counts))

    row_of_token = jnp.minimum(token + shift[owner(begins, token)], num_rows - 1)
    expert_of_row = owner(offsets, row)
    expert_of_row = jnp.where(row < jnp.pad(ends, (0, 1))[expert_of_row], expert_of_row, num_experts)
    token_of_row = jnp.where(expert_of_row < num_experts, row - shift[expert_of_row], tokens)
    return Plan(
        expert_of_row=expert_of_row,
        token_of_row=token_of_row,
        pair_of_row=token_of_row,
        row_of_pair=row_of_token[:, None],
        offsets=offsets,
        ends=ends,
        row_alignment=row_alignment,
    )


def rows_of_pairs(rows: Num[Array, "rows ..."], plan: Plan, tokens: slice = slice(None)) -> Num[Array, "tokens k ..."]:
    """Gathers the expert row of each (token, choice), [tokens, k, ...]; zero where no expert computes the choice."""
    row_of_pair = plan.row_of_pair[tokens]
    is_computed = row_of_pair < plan.offsets[-1]
    # All choices without a computed row read row 0. In expert parallelism they are the majority: their experts are elsewhere.
    pairs = rows.at[jnp.where(is_computed, row_of_pair, 0)].get(mode="promise_in_bounds")
    return jnp.where(is_computed.reshape(is_computed.shape + (1,) * (rows.ndim - 1)), pairs, 0)


def sum_of_choices(
    pairs: Float[Array, "tokens k features"], weights: Float[Array, "tokens k"] | None
) -> Float[Array, "tokens features"]:
    """Computes sum_k weights[t, k] * pairs[t, k] in pairs' dtype, first choice first; default weights are 1."""
    return sum_in_order(pairs if weights is None else widened(weights)[:, :, None] * pairs, axis=1)


def _aligned_rows(pairs: int, num_experts: int, row_alignment: int) -> int:
    """Returns the number of rows that hold any routing of the pairs."""
    if row_alignment == 1 or not pairs:
        return pairs
    fill = min(num_experts, pairs) * (row_alignment - 1)
    # One block more than the worst routing fills, because a tile of two blocks may start at the last block.
    return (-(-(pairs + fill) // row_alignment) + 1) * row_alignment


def _check(topk_experts: Integer[Array, "tokens k"], **counts: int | None) -> None:
    if topk_experts.ndim != 2 or not jnp.issubdtype(topk_experts.dtype, jnp.integer):
        raise ValueError(
            f"topk_experts must be an integer array of shape [tokens, k]; got {topk_experts.dtype}{list(topk_experts.shape)}"
        )
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")


def wide_ids(topk_experts: Integer[Array, "tokens k"]) -> Integer[Array, "tokens k"]:
    """Casts narrow ids to int32 before comparisons with num_experts: 8 bits hold ids 0..255 but not 256."""
    return topk_experts.astype(jnp.int32) if topk_experts.dtype.itemsize < 4 else topk_experts


def int32_ids(topk_experts: Integer[Array, "tokens k"], num_experts: int) -> Int[Array, "tokens k"]:
    """Returns the ids as int32; ids outside [0, num_experts) stay outside."""
    if topk_experts.dtype.itemsize < 8:
        return topk_experts.astype(jnp.int32)
    return jnp.where(is_an_expert(topk_experts, num_experts), topk_experts, -1).astype(jnp.int32)


def is_an_expert(topk_experts: Integer[Array, "tokens k"], num_experts: int) -> Bool[Array, "tokens k"]:
    """Returns True if the id is in [0, num_experts)."""
    topk_experts = wide_ids(topk_experts)
    return (topk_experts >= 0) & (topk_experts < num_experts)


def _experts_of_pairs(topk_experts: Integer[Array, "tokens k"], num_experts: int) -> Int[Array, "pairs"]:
    """Returns the expert of each pair; num_experts for ids outside [0, num_experts)."""
    return jnp.where(is_an_expert(topk_experts, num_experts), topk_experts, num_experts).astype(jnp.int32).reshape(-1)


def _count(experts: Int[Array, "pairs"], num_experts: int) -> tuple[Array, Array | None]:
    """Returns the number of each expert's pairs, and for each pair the number of earlier pairs of its expert.

    The latter is None for more than PAIRS_TO_COUNT pairs.
    """
    if PAIRS_TO_COMPARE < experts.size <= PAIRS_TO_COUNT:
        return _count_in_blocks(experts, num_experts)
    pair, expert = (jnp.arange(size, dtype=jnp.int32) for size in (experts.size, num_experts))
    of_experts = jnp.sum(expert[:, None] == experts, axis=1, dtype=jnp.int32)
    if experts.size > PAIRS_TO_COUNT:
        return of_experts, None
    is_before = (experts[:, None] == experts) & (pair[:, None] > pair)
    return of_experts, masked_sum(is_before, jnp.ones_like(pair))


def _count_in_blocks(experts: Int[Array, "pairs"], num_experts: int) -> tuple[Array, Array]:
    filling = -experts.size % PAIRS_OF_A_BLOCK
    blocks = jnp.pad(experts, (0, filling), constant_values=num_experts).reshape(-1, PAIRS_OF_A_BLOCK)
    expert, block, place = (jnp.arange(size, dtype=jnp.int32) for size in (num_experts + 1, *blocks.shape))
    counts = jnp.sum(blocks[:, :, None] == expert, axis=1, dtype=jnp.int32)
    before_block = jnp.sum(jnp.where((block[:, None] > block)[:, :, None], counts, 0), axis=1, dtype=jnp.int32)
    is_before = (blocks[:, :, None] == blocks[:, None]) & (place[:, None] > place)
    earlier = before_block[block[:, None], blocks] + jnp.sum(is_before, axis=2, dtype=jnp.int32)
    return jnp.sum(counts[:, :-1], axis=0, dtype=jnp.int32), earlier.reshape(-1)[: experts.size]


def _sorted_rows(experts: Int[Array, "pairs"], shift: Int[Array, "experts+1"]) -> Int[Array, "pairs"]:
    """Returns each pair's place in the stable order by expert, plus the `shift` of its expert."""
    # A radix sort makes one pass for each byte of the keys.
    narrow = next(dtype for dtype in (jnp.uint8, jnp.uint16, jnp.uint32) if shift.size - 1 <= jnp.iinfo(dtype).max)
    place = jnp.arange(experts.size, dtype=jnp.int32)
    sorted_experts, sorted_pairs = jax.lax.sort((experts.astype(narrow), place), num_keys=1, is_stable=True)
    sorted_row = place + shift[sorted_experts.astype(jnp.int32)]
    return jnp.zeros_like(place).at[sorted_pairs].set(sorted_row, unique_indices=True, mode="promise_in_bounds")


def masked_sum(mask: Bool[Array, "n m"], values: Int[Array, "m"] | Int[Array, "1 m"]) -> Int[Array, "n"]:
    """Computes sum_j values[.., j] where mask[i, j], in one kernel: faster than a cumulative sum for few values."""
    return jnp.sum(jnp.where(mask, values, 0), axis=-1, dtype=jnp.int32)
