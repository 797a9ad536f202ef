"""Greedy generation in which the model's own module for further tokens drafts one, and the model checks it beside the next.

Speculative decoding (Leviathan et al., 2023, https://arxiv.org/abs/2211.17192) with multi-token prediction as the draft
(DeepSeek-V3, 2024, https://arxiv.org/abs/2412.19437, section 5.4.3): a pass over two tokens, which reads the weights once,
gives two tokens where the draft was right and one where it was not.

A cache counts the same number of tokens for all sequences. So each pass takes two rows of it, and a draft that was wrong
stays there as padding, which no token sees: the caches have room for two tokens for each new one.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from moe_jax.generation.prompts import as_ends, as_prompts, check_lengths, left_padded, new_tokens
from moe_jax.layers.cache import KVCache, init_cache
from moe_jax.models.decoder import Decoder


@dataclass(frozen=True)
class Drafts:
    """How many tokens were drafted, and how many of them were the model's own choice."""

    drafted: int
    accepted: int

    @property
    def acceptance_rate(self) -> float:
        """0 where nothing was drafted."""
        return self.accepted / max(self.drafted, 1)


def generate_with_drafts(
    model: Decoder,
    prompt_tokens: Sequence[Sequence[int]] | Sequence[int] | Int[Array, "batch seq"],
    *,
    max_new_tokens: int = 64,
    eos_token_id: int | Sequence[int] | None = None,
) -> tuple[list[list[int]] | list[int], Drafts]:
    """The tokens of `generate` at temperature 0, and how good the drafts were.

    The tokens are the same but for rounding: a pass over two tokens may sum in another order than one over one, which decides
    between logits that are equal up to that. Drawing at a temperature is not offered.

    Args:
      model: with a module that predicts further tokens; the first one drafts.
      prompt_tokens, max_new_tokens, eos_token_id: as in `generate`.

    Raises:
      ValueError: a model without such a module, or what `generate` refuses.
    """
    if not model.config.mtp_stages:
        raise ValueError(
            "drafts need a model with a module that predicts further tokens (num_nextn_predict_layers), loaded too"
        )
    prompts, single = as_prompts(prompt_tokens, model.config.vocab_size)
    ends = as_ends(eos_token_id)
    if problems := check_lengths(max_new_tokens, ends, model.config.vocab_size):
        raise ValueError("; ".join(problems))
    graph, parameters = nnx.split(model)
    decode = _compiled(max_new_tokens, tuple(ends))
    produced, lengths, drafted, accepted = decode(graph, parameters, *left_padded(prompts))
    return new_tokens(produced, lengths, single), Drafts(int(drafted), int(accepted))


@functools.cache
def _compiled(*options) -> Callable:
    """As in `generate`."""
    return jax.jit(partial(_decode, *options), static_argnums=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """Between two passes: `token` is the last new one, which no cache has, and `position` is its; `draft` is for the next.

    `cache` is the model's, `module_cache` that of the module that drafts.
    """

    token: Int[Array, "batch"]
    draft: Int[Array, "batch"]
    position: Int[Array, "batch"]
    cache: KVCache
    module_cache: KVCache
    produced: Int[Array, "batch max_new_tokens"]
    lengths: Int[Array, "batch"]
    done: Int[Array, "batch"]
    drafted: Int[Array, ""]
    accepted: Int[Array, ""]


def _decode(max_new_tokens, ends, graph, parameters, tokens, segment_ids):
    """Returns the new tokens [batch, max_new_tokens], how many of each row are valid, and how many were drafted, accepted."""
    model = nnx.merge(graph, parameters)
    batch, prompt_length = tokens.shape
    positions = jnp.maximum(jnp.cumsum(segment_ids, axis=1) - 1, 0)
    rows = jnp.arange(batch)

    def best(hidden):
        logits = jnp.einsum("bsd,vd->bsv", hidden, model.head_weight.astype(model.dtype))
        return jnp.argmax(logits.astype(jnp.float32), axis=-1).astype(jnp.int32)

    def ends_with(token, lengths):
        is_end = jnp.isin(token, jnp.array(ends, jnp.int32)) if ends else jnp.zeros(batch, bool)
        return is_end | (lengths >= max_new_tokens)

    def start() -> _State:
        room = batch, prompt_length + 2 * max_new_tokens, model.dtype
        states = model.hidden_states(tokens, positions, segment_ids, cache=init_cache(model.config, *room))
        first = best(states.hidden[:, -1:])
        following = jnp.concatenate([tokens[:, 1:], first], axis=1)
        module_cache = init_cache(replace(model.config, num_hidden_layers=1), *room)
        module = model.predict(1, states.hidden, following, positions, segment_ids, cache=module_cache)
        lengths = jnp.ones(batch, jnp.int32)
        return _State(
            token=first[:, 0],
            draft=best(module.hidden[:, -1:])[:, 0],
            position=positions[:, -1] + 1,
            cache=states.cache,
            module_cache=module.cache,
            produced=jnp.zeros((batch, max_new_tokens), jnp.int32).at[:, 0].set(first[:, 0]),
            lengths=lengths,
            done=ends_with(first[:, 0], lengths),
            drafted=jnp.int32(0),
            accepted=jnp.int32(0),
        )

    def one_pass(state: _State) -> _State:
        goes_on = ~state.done
        positions = state.position[:, None] + jnp.arange(2)
        pair = jnp.stack([state.token, state.draft], axis=1)
        segments = jnp.broadcast_to(goes_on[:, None], pair.shape).astype(jnp.int32)
        states = model.hidden_states(pair, positions, segments, cache=state.cache)
        answers = best(states.hidden)
        right = answers[:, 0] == state.draft
        # What follows a wrong draft is nobody's.
        segments = segments.at[:, 1].mul(right)
        cached = jax.lax.dynamic_update_slice(states.cache.segment_ids, segments, (0, states.cache.length - 2))
        module = model.predict(1, states.hidden, answers, positions, segments, cache=state.module_cache)

        lengths, done, produced = state.lengths, state.done, state.produced
        for answer, counts in zip(answers.T, (goes_on, goes_on & right), strict=True):
            counts &= ~done
            produced = produced.at[rows, jnp.where(counts, lengths, max_new_tokens)].set(answer, mode="drop")
            lengths += counts
            done |= counts & ends_with(answer, lengths)
        last = right.astype(jnp.int32)
        return _State(
            token=answers[rows, last],
            draft=best(module.hidden)[rows, last],
            position=state.position + 1 + last,
            cache=replace(states.cache, segment_ids=cached),
            module_cache=module.cache,
            produced=produced,
            lengths=lengths,
            done=done,
            drafted=state.drafted + goes_on.sum(),
            accepted=state.accepted + (goes_on & right).sum(),
        )

    state = jax.lax.while_loop(lambda state: ~state.done.all(), one_pass, start())
    return state.produced, state.lengths, state.drafted, state.accepted
