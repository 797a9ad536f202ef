"""Which token goes where: (token, expert) pairs sorted by expert, so that each expert owns one contiguous run of rows."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """Where each (token, expert) pair computes. Pair p = t*K + k is token t's k-th choice; rows are pairs sorted by expert.

    Pairs whose expert lies outside [0, num_experts) come last, after offsets[-1]: no expert computes them.
    """

    expert_of_row: Int[Array, "rows"]
    """Expert of each row, ascending; num_experts for a row that no expert computes."""
    token_of_row: Int[Array, "rows"]
    pair_of_row: Int[Array, "rows"]
    row_of_pair: Int[Array, "tokens k"]
    """The inverse of pair_of_row: sums over a token's choices gather through it, so nothing is scattered or atomic."""
    offsets: Int[Array, "experts+1"]
    """Expert e owns rows offsets[e] <= row < offsets[e + 1]."""

    @property
    def num_rows(self) -> int:
        """Pairs in all: tokens * k."""
        return self.token_of_row.shape[0]

    @property
    def num_experts(self) -> int:
        """Experts, those without rows included."""
        return self.offsets.shape[0] - 1


def plan(topk_experts: Int[Array, "tokens k"], num_experts: int) -> Plan:
    """Sorts the pairs of `topk_experts` by expert, stably: an expert's rows stand in the order of their tokens.

    The same choices give the same plan on every backend. A token may choose one expert twice. Ids outside
    [0, num_experts) are legal and mean "nobody": such a pair adds nothing to its token and receives no gradient.

    Raises:
        ValueError: topk_experts is not a 2-D integer array, or num_experts is below 1.
    """
    if topk_experts.ndim != 2 or not jnp.issubdtype(topk_experts.dtype, jnp.integer):
        raise ValueError(
            f"topk_experts must be an integer array of shape [tokens, k]; got {topk_experts.dtype}{list(topk_experts.shape)}"
        )
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1; got {num_experts}")
    tokens, k = topk_experts.shape
    in_range = (topk_experts >= 0) & (topk_experts < num_experts)
    experts = jnp.where(in_range, topk_experts, num_experts).astype(jnp.int32).reshape(-1)
    pairs = jnp.arange(tokens * k, dtype=jnp.int32)
    expert_of_row, pair_of_row = jax.lax.sort((experts, pairs), num_keys=1, is_stable=True)
    # compare_all is one fused reduction; the unrolled binary search takes XLA minutes to compile at 262144 rows.
    offsets = jnp.searchsorted(expert_of_row, jnp.arange(num_experts + 1), method="compare_all").astype(jnp.int32)
    row_of_pair = jnp.zeros_like(pairs).at[pair_of_row].set(pairs, unique_indices=True, mode="promise_in_bounds")
    return Plan(
        expert_of_row=expert_of_row,
        token_of_row=pair_of_row // max(k, 1),
        pair_of_row=pair_of_row,
        row_of_pair=row_of_pair.reshape(tokens, k),
        offsets=offsets,
    )
