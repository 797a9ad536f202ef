"""Autoregressive generation: one prefill of all prompts, then one token at a time with a KV cache, in one compiled function."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.generation.devices import DecodeInputs, decode_on_devices
from moe_jax.generation.request import DecodeOptions, checked_request, new_tokens, padding_ids
from moe_jax.generation.sampling import folded, sample
from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.cache import KVCache, init_cache, join_rows
from moe_jax.layers.loops import run_together
from moe_jax.models.decoder import Decoder


def generate(
    model: Decoder,
    prompt_tokens: Sequence[Sequence[int]] | Sequence[int] | Int[Array, "batch seq"],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    seed: int = 0,
    attention_mask: Int[Array, "batch seq"] | None = None,
    overlap_prefill: bool = False,
) -> list[list[int]] | list[int]:
    """Continues each prompt, and returns only the new tokens.

    Args:
      model: any model of this library. All devices that hold its parameters take part (`generation.devices`); several processes
        call this with the same arguments, and each gets all results.
      prompt_tokens: token ids of one prompt, or of several of any lengths; `complete` takes text.
      max_new_tokens: the maximum number of tokens to add.
      temperature: 0 chooses the most likely token; above 0, tokens are drawn (see `generation.sampling.sample`).
      top_k, top_p: restrict the draw; None: no restriction.
      eos_token_id: the token, or tokens, that end a sequence; the end token is returned as the last one. None: no token does.
      seed: the seed of the draw. A prompt's result depends on its index, not on the other prompts. The one exception is
        rope_type "dynamic": the longest prompt decides for all, as in transformers.
      attention_mask: the tokenizer's mask for prompts that it padded on either side: 1 for tokens, 0 for padding. Default: no
        prompt is padded.
      overlap_prefill: if devices share the experts, compute the prompts of each device as two halves in one loop. Tokens of one
        half travel to the experts while the other half computes. Results are the same up to rounding. Two copies of the cache
        exist briefly.

    Returns:
      One list of new tokens per prompt, or one list if `prompt_tokens` was one flat prompt.

    Raises:
      ValueError: text instead of token ids; an empty prompt; an id outside the vocabulary; or an option outside its range. Also
        prompts of one length without a mask, if one of them begins, or ends, with the model's padding token. Or
        `overlap_prefill` if experts are not spread over several devices, or a device has an odd number of prompts.
    """
    if not isinstance(overlap_prefill, bool | np.bool_):
        raise ValueError(f"overlap_prefill must be True or False; got {overlap_prefill!r}")
    options: Any = dict(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    padding = attention_mask, padding_ids(model)
    prompts, single, chosen = checked_request(model.config, prompt_tokens, padding, eos_token_id=eos_token_id, **options)
    chosen = chosen._replace(overlap_prefill=bool(overlap_prefill))
    return new_tokens(*decode_on_devices(_decode, chosen, model, prompts, seed), single)


def _decode(options: DecodeOptions, inputs: DecodeInputs) -> tuple[Int[Array, "batch max_new_tokens"], Int[Array, "batch"]]:
    """Returns new tokens, and the number of valid tokens in each row."""
    max_new_tokens, temperature, top_k, top_p, ends, overlap = options
    devices, model, tokens, segment_ids, keys = inputs
    batch, prompt_length = tokens.shape
    positions = jnp.maximum(jnp.cumsum(segment_ids, axis=1) - 1, 0)
    draw = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p)

    def ends_with(token):
        return jnp.isin(token, jnp.array(ends, jnp.int32)) if ends else jnp.zeros(batch, bool)

    def logits_of(hidden: Float[Array, "batch hidden"]) -> Float[Array, "batch vocab"]:
        """Computes the logits of one position per row, so that prefill never materializes logits for all positions."""
        return jnp.einsum("bd,vd->bv", hidden, model.head_weight.astype(model.dtype))

    hidden, cache = prefill(inputs, positions, prompt_length + max_new_tokens, overlap=overlap)
    first = draw(logits_of(hidden), folded(keys, 0))
    produced = jnp.zeros((batch, max_new_tokens), jnp.int32).at[:, 0].set(first)

    # The state between two steps. `token` is the newest one, which the cache does not hold yet.
    def unfinished(state):
        step, *_, done = state
        return (step < max_new_tokens) & devices.any(~done)

    def step_once(state):
        step, token, cache, produced, lengths, done = state
        position = positions[:, -1:] + step
        ones = jnp.ones((batch, 1), jnp.int32)
        states = model.hidden_states(token[:, None], position, ones, cache=cache, spread=devices.spread)
        assert states.cache is not None
        token = draw(logits_of(states.hidden[:, -1]), folded(keys, step))
        produced = produced.at[:, step].set(token)
        return step + 1, token, states.cache, produced, lengths + ~done, done | ends_with(token)

    lengths = vary_as(jnp.ones(batch, jnp.int32), tokens)
    start = jnp.int32(1), first, cache, produced, lengths, ends_with(first) | ~segment_ids.any(axis=1)
    *_, produced, lengths, _ = jax.lax.while_loop(unfinished, step_once, start)
    return produced, lengths


def prefill(
    inputs: DecodeInputs, positions: Int[Array, "batch seq"], max_length: int, *, overlap: bool = False
) -> tuple[Float[Array, "batch hidden"], KVCache]:
    """Computes the prompts of one device; returns each one's last hidden state, and a cache with room for `max_length` tokens.

    Args:
      overlap: compute two halves of the prompts in one loop. The tokens of one half travel to other devices' experts while the
        other half computes. The number of prompts, including padding, must be even.
    """
    devices, model, tokens, segment_ids, _ = inputs
    batch = len(tokens)
    if not overlap:
        cache = init_cache(model.config, batch, max_length, model.dtype)
        states = model.hidden_states(tokens, positions, segment_ids, cache=cache, spread=devices.spread)
        assert states.cache is not None
        return states.hidden[:, -1], states.cache
    passes = []
    for rows in (slice(batch // 2), slice(batch // 2, batch)):
        cache = init_cache(model.config, batch // 2, max_length, model.dtype)
        arrays = tokens[rows], positions[rows], segment_ids[rows]
        passes.append(model.forward_pass(*arrays, cache=cache, spread=devices.spread_of_halves))
    first, second = run_together(*passes)
    return jnp.concatenate([first.hidden[:, -1], second.hidden[:, -1]]), join_rows(first.cache, second.cache)
