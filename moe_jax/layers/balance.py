"""DeepSeek-V3's two ways to keep experts evenly loaded: a bias that reacts to the load, and a small loss per sequence.

Section 2.1.2 of its report (https://arxiv.org/abs/2412.19437). The bias is added to the scores only for the choice of experts.
So it adds no gradient (Wang et al., 2024, https://arxiv.org/abs/2408.15664). The loss prevents a single sequence from using few
experts, which the load of a whole batch hides. docs/balancing.md lists which loss is for which recipe.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from moe_jax.kernels.top_k import top_k_indices
from moe_jax.layers.segments import SequenceSplit, segment_positions


def move_bias(
    bias: Float32[Array, "*layers experts"], expert_load: Int[Array, "*layers experts"], rate: float
) -> Float32[Array, "*layers experts"]:
    """Returns bias + rate * sign(mean load - load), in f32: lowers overloaded experts' biases, raises the others.

    Call it once per optimizer step, with the load of the step's whole batch: all micro-batches, all devices. An expert whose
    load is the mean keeps its bias.
    """
    load = expert_load.astype(jnp.float32)
    return bias + rate * jnp.sign(load.mean(axis=-1, keepdims=True) - load)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sequences:
    """The documents of packed rows: for each token, its document's first token and length.

    Attributes:
      first_token: index of the document's first token among all tokens of these rows on all devices.
      length: number of tokens of the document; 0 for padding.
      axis_name: the mesh axis that splits each row; None if there is none.
    """

    first_token: Int[Array, "tokens"]
    length: Int[Array, "tokens"]
    axis_name: str | None = field(default=None, metadata=dict(static=True))

    @classmethod
    def of(cls, segment_ids: Int[Array, "batch seq"], context_parallel: SequenceSplit | None = None) -> "Sequences":
        """Finds the documents in `segment_ids` (0 is padding); with `context_parallel`, for this device's tokens.

        With `context_parallel` call it inside `jax.shard_map`.
        """
        batch, seq = segment_ids.shape
        if context_parallel is None:
            axis_name, row_length = None, seq
            starts = jnp.arange(seq, dtype=jnp.int32) - segment_positions(segment_ids)
        else:
            axis_name, row_length = context_parallel.axis_name, seq * lax.axis_size(context_parallel.axis_name)
            starts = context_parallel.starts_of_segments(segment_ids)
        first_token = (jnp.arange(batch, dtype=jnp.int32)[:, None] * row_length + starts).reshape(-1)
        valid = (segment_ids != 0).reshape(-1).astype(jnp.int32)
        sums = _over_devices(jnp.zeros(batch * row_length, jnp.int32).at[first_token].add(valid), axis_name)
        return cls(first_token, sums[first_token] * valid, axis_name)

    @property
    def valid(self) -> Bool[Array, "tokens"]:
        """False for padding."""
        return self.length > 0

    def expert_load(self, experts: Int[Array, "tokens k"], num_experts: int) -> Int[Array, "tokens experts"]:
        """Counts, for each token, how many choices of its whole document went to each expert."""
        slots = len(self.first_token) * (1 if self.axis_name is None else lax.axis_size(self.axis_name))
        counted = jnp.broadcast_to(self.valid[:, None], experts.shape).astype(jnp.int32)
        sums = jnp.zeros((slots, num_experts), jnp.int32).at[self.first_token[:, None], experts].add(counted)
        return _over_devices(sums, self.axis_name)[self.first_token]

    def share(self, dtype: DTypeLike) -> Float[Array, "tokens"]:
        """Returns 1 / length for each token (0 for padding), whose sum is the number of documents."""
        return jnp.where(self.valid, 1 / jnp.maximum(self.length, 1).astype(dtype), 0)


def sequence_balance(
    scores: Float[Array, "tokens experts"], num_experts_per_tok: int, sequences: Sequences
) -> Float[Array, ""]:
    """Computes equations 17 to 20 without alpha: sum_i f_i P_i, summed over the sequences.

        f_i = experts / (k length) * number of tokens of the sequence with expert i among their k best scores
        P_i = mean over the sequence of scores[t, i]

    An even load yields 1 per sequence. The choice has no gradient: the gradient flows only through P. The paper counts the best
    scores, not the experts chosen by bias or groups. A token's share of the sum is sum_i f_i scores[t, i] / length: no float is
    summed over a sequence. On several devices the result sums over this device's tokens.

    Args:
      scores: the router's scores, divided by their sum over the experts.
    """
    num_experts = scores.shape[1]
    best = top_k_indices(scores, num_experts_per_tok)
    share = sequences.share(scores.dtype)[:, None]
    f = num_experts / num_experts_per_tok * share * sequences.expert_load(best, num_experts).astype(scores.dtype)
    return jnp.sum(share * f * scores)


def _over_devices(sums: Array, axis_name: str | None) -> Array:
    return sums if axis_name is None else lax.psum(sums, axis_name)
