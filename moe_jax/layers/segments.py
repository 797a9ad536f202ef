"""Packed sequences: which tokens belong together, and where in its document a token stands."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def segment_positions(segment_ids: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Each token's index in its segment: [7 7 7 8 8 0] -> [0 1 2 0 1 0]. A segment is a run of equal ids."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts = jnp.concatenate([jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
