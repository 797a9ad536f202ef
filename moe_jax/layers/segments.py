"""Packed sequences: which tokens belong together, where in its document a token stands, and which stand behind it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from moe_jax.parallel.sequence.attention import ContextParallel


def segment_positions(segment_ids: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Each token's index in its segment: [7 7 7 8 8 0] -> [0 1 2 0 1 0]. A segment is a run of equal ids."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts = jnp.concatenate([jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def runs(segment_ids: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Each run of equal ids under a number of its own, padding 0: [7 7 0 8 7 7] -> [1 1 0 4 5 5]."""
    starts = jnp.arange(segment_ids.shape[1], dtype=jnp.int32) - segment_positions(segment_ids)
    return jnp.where(segment_ids == 0, 0, starts + 1)


def later(x: Int[Array, "batch seq"], offset: int, context_parallel: ContextParallel | None = None) -> Int[Array, "batch seq"]:
    """What stands `offset` tokens later in the row, 0 behind its end; with `context_parallel` of this device's tokens."""
    if context_parallel is not None:
        return context_parallel.later(x, offset)
    return jnp.pad(x, ((0, 0), (0, offset)))[:, offset:]


def reaches(
    segment_ids: Int[Array, "batch seq"], offset: int, context_parallel: ContextParallel | None = None
) -> Bool[Array, "batch seq"]:
    """Whether a token's document goes on for `offset` tokens behind it: [7 7 7 8 8 0], 1 -> [1 1 0 1 0 0]."""
    if context_parallel is None:
        starts = jnp.arange(segment_ids.shape[1], dtype=jnp.int32) - segment_positions(segment_ids)
    else:
        starts = context_parallel.starts_of_segments(segment_ids)
    # Counted from 1: 0 is what stands behind the end.
    return (segment_ids != 0) & (later(starts + 1, offset, context_parallel) == starts + 1)
