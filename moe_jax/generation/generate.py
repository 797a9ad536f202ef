"""Autoregressive generation: one prefill of all prompts, then one token at a time with a KV cache, in one compiled function."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moe_jax.generation.devices import Devices, decode_on_devices
from moe_jax.generation.prompts import new_tokens
from moe_jax.generation.request import checked_request, padding_ids
from moe_jax.generation.sampling import folded, sample
from moe_jax.kernels.varying import vary_as
from moe_jax.layers.cache import init_cache
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
) -> list[list[int]] | list[int]:
    """Continues each prompt, and returns the new tokens alone.

    Args:
      model: any model of this library. All devices that hold its parameters take part (`generation.devices`); several processes
        call this alike, and each gets all results.
      prompt_tokens: token ids of one prompt, or of several of any lengths; `complete` takes text.
      max_new_tokens: how many tokens to add at most.
      temperature: 0 takes the most likely token; above it, tokens are drawn (see `generation.sampling.sample`).
      top_k, top_p: restrict the draw; None: no restriction.
      eos_token_id: the token, or tokens, that end a sequence; it is the last one returned. None: none does.
      seed: of the draw. A prompt's result does not depend on the prompts beside it, but on its place among them. Only with
        rotary embeddings of rope_type "dynamic" the longest prompt decides for all, as in transformers.
      attention_mask: for prompts that a tokenizer has padded, on either side, its mask: 1 for tokens, 0 for padding. Default:
        no prompt is padded.

    Returns:
      One list of new tokens per prompt, or one list where `prompt_tokens` was one flat prompt.

    Raises:
      ValueError: text in place of token ids, an empty prompt, an id outside the vocabulary, an option outside its range, or
        prompts of one length without a mask of which some begin, or end, with the model's padding token.
    """
    prompts, single, options = checked_request(
        model.config,
        prompt_tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_token_id=eos_token_id,
        attention_mask=attention_mask,
        padding_ids=padding_ids(model),
    )
    produced, lengths = decode_on_devices(_decode, options, model, prompts, seed)
    return new_tokens(produced, lengths, single)


def _decode(max_new_tokens, temperature, top_k, top_p, ends, devices: Devices, model, tokens, segment_ids, keys):
    """Returns the new tokens [batch, max_new_tokens] and how many of each row are valid."""
    batch, prompt_length = tokens.shape
    positions = jnp.maximum(jnp.cumsum(segment_ids, axis=1) - 1, 0)
    draw = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p)

    def ends_with(token):
        return jnp.isin(token, jnp.array(ends, jnp.int32)) if ends else jnp.zeros(batch, bool)

    def next_logits(tokens, positions, segment_ids, cache):
        """Logits of the last position alone: a long prompt's others are never made."""
        states = model.hidden_states(tokens, positions, segment_ids, cache=cache, spread=devices.spread)
        logits = jnp.einsum("bd,vd->bv", states.hidden[:, -1], model.head_weight.astype(model.dtype))
        return logits, states.cache

    cache = init_cache(model.config, batch, prompt_length + max_new_tokens, model.dtype)
    logits, cache = next_logits(tokens, positions, segment_ids, cache)
    first = draw(logits, folded(keys, 0))
    produced = jnp.zeros((batch, max_new_tokens), jnp.int32).at[:, 0].set(first)

    def unfinished(state):
        step, *_, done = state
        return (step < max_new_tokens) & devices.any(~done)

    def step_once(state):
        step, token, cache, produced, lengths, done = state
        position = positions[:, -1:] + step
        logits, cache = next_logits(token[:, None], position, jnp.ones((batch, 1), jnp.int32), cache)
        token = draw(logits, folded(keys, step))
        produced = produced.at[:, step].set(token)
        return step + 1, token, cache, produced, lengths + ~done, done | ends_with(token)

    lengths = vary_as(jnp.ones(batch, jnp.int32), tokens)
    state = jnp.int32(1), first, cache, produced, lengths, ends_with(first) | ~segment_ids.any(axis=1)
    _, _, _, produced, lengths, _ = jax.lax.while_loop(unfinished, step_once, state)
    return produced, lengths
