"""Packed sequences: the tokens of each document, their index in it, and their successors."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Integer, Num

SequenceSplit = Any
"""A `parallel.ContextParallel`: how sequences are split over the devices of a mesh axis. Layers only call its methods."""


def segment_positions(segment_ids: Integer[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Returns each token's index in its segment, a run of equal ids: [7 7 7 8 8 0] -> [0 1 2 0 1 0]."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts = jnp.concatenate([jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def runs(segment_ids: Integer[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Numbers each run of equal ids uniquely, and padding 0. `[7 7 0 8 7 7]` becomes `[1 1 0 4 5 5]`."""
    starts = jnp.arange(segment_ids.shape[1], dtype=jnp.int32) - segment_positions(segment_ids)
    return jnp.where(segment_ids == 0, 0, starts + 1)


def shift_left(
    x: Num[Array, "batch seq"], offset: int, context_parallel: SequenceSplit | None = None
) -> Num[Array, "batch seq"]:
    """Returns x shifted left by `offset` along the row: out[:, i] = x[:, i + offset], 0 past the end."""
    if context_parallel is not None:
        return context_parallel.shift_left(x, offset)
    return jnp.pad(x, ((0, 0), (0, offset)))[:, offset:]


def has_successor(
    segment_ids: Integer[Array, "batch seq"], offset: int, context_parallel: SequenceSplit | None = None
) -> Bool[Array, "batch seq"]:
    """Returns True if token i + offset is in token i's document: [7 7 7 8 8 0], 1 -> [1 1 0 1 0 0].

    Padding has no successor. With `context_parallel`, the result is for this device's tokens.
    """
    if context_parallel is None:
        starts = jnp.arange(segment_ids.shape[1], dtype=jnp.int32) - segment_positions(segment_ids)
    else:
        starts = context_parallel.starts_of_segments(segment_ids)
    # Starts are counted from 1, because `shift_left` fills with 0.
    return (segment_ids != 0) & (shift_left(starts + 1, offset, context_parallel) == starts + 1)
