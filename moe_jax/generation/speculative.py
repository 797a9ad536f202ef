"""Generation with drafts: the model's own multi-token prediction module drafts a token, and the model checks it.

Speculative decoding: Leviathan et al., 2023, https://arxiv.org/abs/2211.17192. Multi-token prediction as the draft:
DeepSeek-V3, 2024, https://arxiv.org/abs/2412.19437, section 5.4.3. A pass over two tokens reads the weights once. It yields two
tokens if the draft is accepted, else one.

Let p be the distribution from which `sampling.sample` draws for the model, and q the distribution for the module. A draft x
drawn from q is accepted with probability min(1, p(x) / q(x)). Otherwise its replacement is drawn from max(p - q, 0),
normalised. Together the two cases draw from p. A share of sum_x min(p(x), q(x)) of the drafts is accepted, the most for any
rule with drafts from q. If q is p, all drafts are accepted. Drafting q's most likely token would need no q in the rule. But it
is accepted with probability p(x), at most the largest probability of p, no matter how good the module is. At temperature 0, p
and q are 1 for one token each, and a draft is accepted if it is the model's choice.

A cache has the same length for all sequences. So each pass uses two rows of it, and a wrong draft stays there as padding, which
no token sees. The caches have room for two tokens for each new one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import ModelConfig
from moe_jax.generation.devices import DecodeInputs, decode_on_devices
from moe_jax.generation.request import DecodeOptions, checked_request, new_tokens, padding_ids
from moe_jax.generation.sampling import distribution, draw, folded
from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.cache import KVCache, init_cache
from moe_jax.models.decoder import Decoder


@dataclass(frozen=True)
class Drafts:
    """Counts of drafted tokens and of drafts that the model accepted."""

    drafted: int
    accepted: int

    @property
    def acceptance_rate(self) -> float:
        """The accepted share of the drafts; 0 if nothing was drafted."""
        return self.accepted / max(self.drafted, 1)


def generate_with_drafts(
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
) -> tuple[list[list[int]] | list[int], Drafts]:
    """Generates tokens as `generate` does, with drafts, and counts the drafts and the accepted drafts.

    At temperature 0 the tokens are the same. Above 0 they have the same distribution but are another draw than `generate`'s
    from this seed. Both hold up to rounding: a pass over two tokens may sum in another order, which decides between logits that
    are equal up to rounding.

    Args:
      model: a model with at least one multi-token prediction module; the first one drafts.
      prompt_tokens, max_new_tokens, temperature, top_k, top_p, eos_token_id, attention_mask: as in `generate`. The drafts are
        drawn at the same temperature and restricted in the same way.
      seed: as in `generate`; the drafts are drawn from it too.

    Raises:
      ValueError: the model has no such module, or `generate` refuses the arguments.
    """
    check_drafts(model.config)
    options: Any = dict(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    padding = attention_mask, padding_ids(model)
    prompts, single, chosen = checked_request(model.config, prompt_tokens, padding, eos_token_id=eos_token_id, **options)
    tokens, lengths, drafted, accepted = decode_on_devices(_decode, chosen, model, prompts, seed)
    return new_tokens(tokens, lengths, single), Drafts(int(drafted.sum()), int(accepted.sum()))


def check_drafts(config: ModelConfig) -> None:
    """Checks that a model supports speculative decoding with its own MTP module.

    Raises:
      ValueError: the model has no multi-token prediction module, or has recurrent layers, which cannot undo a draft.
    """
    if (reason := config.mixer_refusal("taking back a draft")) is not None:
        raise ValueError(reason)
    if not config.mtp_stages:
        raise ValueError("drafts need a model loaded with its MTP modules (num_nextn_predict_layers)")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _DraftState:
    """The state between two passes. `token` is the newest token, which no cache holds yet, at `position`; `draft` follows it.

    The draft is drawn from `draft_distribution`. `cache` belongs to the model, `module_cache` to the drafting module.
    """

    passes: Int[Array, ""]
    token: Int[Array, "batch"]
    draft: Int[Array, "batch"]
    draft_distribution: Float[Array, "batch vocab"]
    position: Int[Array, "batch"]
    cache: KVCache
    module_cache: KVCache
    produced: Int[Array, "batch max_new_tokens"]
    lengths: Int[Array, "batch"]
    done: Bool[Array, "batch"]
    drafted: Int[Array, "batch"]
    accepted: Int[Array, "batch"]


def _decode(options: DecodeOptions, inputs: DecodeInputs) -> tuple:
    """Returns new tokens, and for each row the numbers of valid, drafted and accepted tokens."""
    max_new_tokens, temperature, top_k, top_p, ends, _ = options
    devices, model, tokens, segment_ids, keys = inputs
    batch, prompt_length = tokens.shape
    positions = jnp.maximum(jnp.cumsum(segment_ids, axis=1) - 1, 0)
    rows = jnp.arange(batch)
    execution = replace(model.execution, spread=devices.spread)

    def next_distribution(hidden: Float[Array, "batch ... hidden"]) -> Float[Array, "batch ... vocab"]:
        logits = jnp.einsum("...d,vd->...v", hidden, model.head_weight.astype(model.dtype))
        return distribution(logits, temperature=temperature, top_k=top_k, top_p=top_p)

    def draw_from(probabilities, number):
        """Samples with the rows' PRNG keys, folded with even numbers for tokens and odd ones for drafts."""
        return draw(jnp.log(probabilities), folded(keys, number))

    def ends_with(token, lengths):
        is_end = jnp.isin(token, jnp.array(ends, jnp.int32)) if ends else jnp.zeros(batch, bool)
        return is_end | (lengths >= max_new_tokens)

    def start() -> _DraftState:
        room = batch, prompt_length + 2 * max_new_tokens, model.dtype
        cache = init_cache(model.config, *room)
        states = model.hidden_states(tokens, positions, segment_ids, cache=cache, spread=devices.spread)
        assert states.cache is not None
        first = draw_from(next_distribution(states.hidden[:, -1]), 0)
        following = jnp.concatenate([tokens[:, 1:], first[:, None]], axis=1)
        module_cache = init_cache(replace(model.config, num_hidden_layers=1), *room)
        module = model.predict(1, states.hidden, following, positions, segment_ids, cache=module_cache, execution=execution)
        assert module.cache is not None
        draft_distribution = next_distribution(module.hidden[:, -1])
        lengths = vary_as(jnp.ones(batch, jnp.int32), tokens)
        return _DraftState(
            passes=jnp.int32(0),
            token=first,
            draft=draw_from(draft_distribution, 1),
            draft_distribution=draft_distribution,
            position=positions[:, -1] + 1,
            cache=states.cache,
            module_cache=module.cache,
            produced=jnp.zeros((batch, max_new_tokens), jnp.int32).at[:, 0].set(first),
            lengths=lengths,
            done=ends_with(first, lengths) | ~segment_ids.any(axis=1),
            drafted=jnp.zeros_like(lengths),
            accepted=jnp.zeros_like(lengths),
        )

    def one_pass(state: _DraftState) -> _DraftState:
        passes = state.passes + 1
        goes_on = ~state.done
        positions = state.position[:, None] + jnp.arange(2)
        pair = jnp.stack([state.token, state.draft], axis=1)
        segments = jnp.broadcast_to(goes_on[:, None], pair.shape).astype(jnp.int32)
        states = model.hidden_states(pair, positions, segments, cache=state.cache, spread=devices.spread)
        assert states.cache is not None
        after_token, after_draft = jnp.unstack(next_distribution(states.hidden), axis=1)
        in_place = given_draft(after_token, state.draft_distribution, state.draft)
        answers = draw_from(jnp.stack([in_place, after_draft], axis=1), 2 * passes)
        right = answers[:, 0] == state.draft
        # The row of a wrong draft becomes padding, which no later token sees.
        segments = segments.at[:, 1].mul(right)
        cached = jax.lax.dynamic_update_slice(states.cache.segment_ids, segments, (0, states.cache.length - 2))
        module = model.predict(1, states.hidden, answers, positions, segments, cache=state.module_cache, execution=execution)
        assert module.cache is not None
        last = right.astype(jnp.int32)
        draft_distribution = next_distribution(module.hidden[rows, last])

        lengths, done, produced = state.lengths, state.done, state.produced
        for answer, counts in zip(answers.T, (goes_on, goes_on & right), strict=True):
            counts &= ~done
            produced = produced.at[rows, jnp.where(counts, lengths, max_new_tokens)].set(answer, mode="drop")
            lengths += counts
            done |= counts & ends_with(answer, lengths)
        return _DraftState(
            passes=passes,
            token=answers[rows, last],
            draft=draw_from(draft_distribution, 2 * passes + 1),
            draft_distribution=draft_distribution,
            position=state.position + 1 + last,
            cache=replace(states.cache, segment_ids=cached),
            module_cache=module.cache,
            produced=produced,
            lengths=lengths,
            done=done,
            drafted=state.drafted + goes_on,
            accepted=state.accepted + (goes_on & right),
        )

    state = jax.lax.while_loop(lambda state: devices.any(~state.done), one_pass, start())
    return state.produced, state.lengths, state.drafted, state.accepted


def given_draft(
    p: Float[Array, "batch vocab"], q: Float[Array, "batch vocab"], draft: Int[Array, "batch"]
) -> Float[Array, "batch vocab"]:
    """Returns the distribution of the token that replaces or confirms a draft.

        c(y | x) = a(x) [y = x] + (1 - a(x)) max(p(y) - q(y), 0) / Z

    a(x) = min(1, p(x) / q(x)) is the probability of accepting the draft x, Z = sum_y max(p(y) - q(y), 0). Over drafts from q,
    sum_x q(x) c(y | x) = p(y). A draft that is not accepted has p(x) < q(x), so that it is not drawn again.
    """
    rows = jnp.arange(draft.shape[0])
    accepted = jnp.minimum(1, p[rows, draft] / q[rows, draft])
    left = jnp.maximum(p - q, 0)
    # If p is q up to rounding, p - q may be zero everywhere although the draft is not accepted; then draw from p.
    left = jnp.where(left.any(axis=-1, keepdims=True), left, p)
    left = left / left.sum(axis=-1, keepdims=True)
    return ((1 - accepted)[:, None] * left).at[rows, draft].add(accepted)
