"""The prefill of a decoding loop: all prompts pass the layers once, and their keys and values fill an empty cache."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.generation.devices import DecodeInputs
from moe_jax.layers.cache import KVCache, init_cache, join_rows
from moe_jax.layers.passes import run_together


class Prefilled(NamedTuple):
    """The result of the prefill."""

    hidden: Float[Array, "batch hidden"]
    """The hidden state of each prompt's last token."""
    cache: KVCache


def prefill(inputs: DecodeInputs, positions: Int[Array, "batch seq"], max_length: int, *, overlap: bool = False) -> Prefilled:
    """Computes the prompts of one device, into a cache with room for `max_length` tokens.

    Args:
      overlap: two halves of the prompts pass the layers in one loop. The tokens of one half travel to other devices' experts
        while the other half computes. The number of prompts is even, padding among them.
    """
    devices, model, tokens, segment_ids, _ = inputs
    batch = len(tokens)
    if not overlap:
        cache = init_cache(model.config, batch, max_length, model.dtype)
        states = model.hidden_states(tokens, positions, segment_ids, cache=cache, spread=devices.spread)
        assert states.cache is not None
        return Prefilled(states.hidden[:, -1], states.cache)
    passes = []
    for rows in (slice(batch // 2), slice(batch // 2, batch)):
        cache = init_cache(model.config, batch // 2, max_length, model.dtype)
        arrays = tokens[rows], positions[rows], segment_ids[rows]
        passes.append(model.forward_pass(*arrays, cache=cache, spread=devices.spread_of_halves))
    first, second = run_together(*passes)
    return Prefilled(jnp.concatenate([first.hidden[:, -1], second.hidden[:, -1]]), join_rows(first.cache, second.cache))
