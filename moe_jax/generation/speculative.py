"""Generation with drafts: the model's own multi-token prediction module, or the text, drafts tokens, and the model checks them.

Speculative decoding: Leviathan et al., 2023, https://arxiv.org/abs/2211.17192. Multi-token prediction as the draft:
DeepSeek-V3, 2024, https://arxiv.org/abs/2412.19437, section 5.4.3. A pass over two tokens reads the weights once. It yields two
tokens if the draft is accepted, else one.

Let p be the distribution from which `sampling.sample` draws for the model, and q the distribution for the module. A draft x
drawn from q is accepted with probability min(1, p(x) / q(x)). Otherwise its replacement is drawn from max(p - q, 0),
normalised. Together the two cases draw from p. A share of sum_x min(p(x), q(x)) of the drafts is accepted, the most for any
rule with drafts from q. If q is p, all drafts are accepted. Drafting q's most likely token would need no q in the rule. But it
is accepted with probability p(x), at most the largest probability of p, no matter how good the module is. At temperature 0, p
and q are 1 for one token each, and a draft is accepted if it is the model's choice.

Drafts from the text need no module: they are the tokens that followed an earlier occurrence of the newest ones (prompt lookup:
Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding). Each token is drawn as without drafts, and a draft is
accepted if it equals the draw. So tokens equal `generate`'s, up to rounding, and a draft x is accepted with probability
p(x). A pass without drafts computes one token of each row.

A cache has the same length for all sequences. So each pass uses a row of it for each token and draft, and a wrong draft stays
there as padding, which no token sees. The caches have room for a token and its drafts for each new token.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.config import ModelConfig
from moe_jax.generation.devices import DecodeInputs, decode_on_devices
from moe_jax.generation.request import DecodeOptions, checked_request, new_tokens, padding_ids
from moe_jax.generation.sampling import distribution, draw, folded, sample
from moe_jax.kernels.shapes import vary_as
from moe_jax.layers.cache import KVCache, init_cache
from moe_jax.models.decoder import Decoder


class DraftSource(NamedTuple):
    """The source of drafts, and their largest number after each newest token."""

    name: Literal["module", "lookup"]
    num: int


NO_DRAFTS = DraftSource("lookup", 0)

MAX_LOOKUP = 8
"""Largest number of drafts from the text. A step's program has a draw for each."""


def draft_source(drafts: int | str) -> DraftSource:
    """Returns the source that a `drafts` option names.

    Raises:
      ValueError: it names none.
    """
    if lookup := re.fullmatch(f"lookup:([1-{MAX_LOOKUP}])", str(drafts)):
        return DraftSource("lookup", int(lookup[1]))
    if drafts not in (0, 1, "module"):
        raise ValueError(f"drafts must be 0 or 1, 'module', or 'lookup:N' with N from 1 to {MAX_LOOKUP}; got {drafts!r}")
    return DraftSource("module", 1) if drafts else NO_DRAFTS


LONGEST_MATCH, SHORTEST_MATCH = 3, 2
"""Numbers of newest tokens that `looked_up` searches for. One token alone occurs too often by chance."""


def looked_up(tokens: Int[Array, "rows length"], newest: Int[Array, "rows"], count: int) -> Int[Array, "rows count"]:
    """Returns the `count` tokens that followed the latest earlier occurrence of each row's newest tokens; -1: there is none.

    It searches for the newest three tokens, then for the newest two. If fewer tokens than `count` followed, they repeat.

    Args:
      newest: the place of each row's newest token. Later places may hold any tokens.
    """
    place, newest = jnp.arange(tokens.shape[1]), newest[:, None]
    same, found = jnp.broadcast_to(place < newest, tokens.shape), jnp.full_like(newest, -1)
    for distance in range(LONGEST_MATCH):
        wanted = jnp.take_along_axis(tokens, jnp.maximum(newest - distance, 0), axis=1)
        same &= (jnp.roll(tokens, distance, axis=1) == wanted) & (place >= distance)
        if distance + 1 >= SHORTEST_MATCH:
            latest = jnp.where(same, place, -1).max(axis=1, keepdims=True)
            found = jnp.where(latest >= 0, latest, found)
    following = found + 1 + jnp.arange(count) % jnp.maximum(newest - found, 1)
    return jnp.where(found >= 0, jnp.take_along_axis(tokens, following, axis=1), -1)


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
    drafts: int | str = 1,
) -> tuple[list[list[int]] | list[int], Drafts]:
    """Generates tokens as `generate` does, with drafts, and counts the drafts and the accepted drafts.

    At temperature 0, and with drafts from the text, the tokens are the same. Above 0 the module keeps the distribution,
    but the seed has another draw. All holds up to rounding: a pass over several tokens may sum in another order, which decides
    between logits that are equal up to rounding.

    Args:
      model: for drafts of a module, a model with at least one multi-token prediction module; the first one drafts.
      prompt_tokens, max_new_tokens, temperature, top_k, top_p, eos_token_id, attention_mask: as in `generate`. The drafts are
        drawn at the same temperature and restricted in the same way.
      seed: as in `generate`; the module's drafts are drawn from it too.
      drafts: 1 drafts a token with the module; "lookup:3" drafts up to three tokens from the text itself.

    Raises:
      ValueError: `drafts` names no source, the model has no such module, or `generate` refuses the arguments.
    """
    source = draft_source(drafts)
    check_drafts(model.config, source)
    options: Any = dict(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    padding = attention_mask, padding_ids(model)
    prompts, single, chosen = checked_request(model.config, prompt_tokens, padding, eos_token_id=eos_token_id, **options)
    tokens, lengths, drafted, accepted = decode_on_devices(_decode_with(source), chosen, model, prompts, seed)
    return new_tokens(tokens, lengths, single), Drafts(int(drafted.sum()), int(accepted.sum()))


def check_drafts(config: ModelConfig, source: DraftSource) -> None:
    """Checks that a model can have drafts from a source.

    Raises:
      ValueError: no module for the module's drafts, or recurrent layers, which cannot undo a draft.
    """
    if (reason := config.mixer_refusal("taking back a draft")) is not None:
        raise ValueError(reason)
    if source.name == "module" and not config.mtp_stages:
        raise ValueError("drafts need a model loaded with its MTP modules (num_nextn_predict_layers)")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _DraftState:
    """The state between two passes. `token` is the newest token, which no cache holds yet, at `position`; drafts follow it.

    `drafter` belongs to the source: the distribution of the module's draft, and the module's cache; or the tokens of each row.
    """

    passes: Int[Array, ""]
    token: Int[Array, "batch"]
    draft: Int[Array, "batch drafts"]
    position: Int[Array, "batch"]
    cache: KVCache
    drafter: Any
    produced: Int[Array, "batch max_new_tokens"]
    lengths: Int[Array, "batch"]
    done: Bool[Array, "batch"]
    drafted: Int[Array, "batch"]
    accepted: Int[Array, "batch"]


@cache
def _decode_with(source: DraftSource) -> Callable[[DecodeOptions, DecodeInputs], tuple]:
    # The same function for the same source: compiled programs are found by it.
    return partial(_decode, source)


def _decode(source: DraftSource, options: DecodeOptions, inputs: DecodeInputs) -> tuple:
    """Returns new tokens, and for each row the numbers of valid, drafted and accepted tokens."""
    max_new_tokens, temperature, top_k, top_p, ends, _ = options
    devices, model, tokens, segment_ids, keys = inputs
    batch, prompt_length = tokens.shape
    positions = jnp.maximum(jnp.cumsum(segment_ids, axis=1) - 1, 0)
    rows = jnp.arange(batch)
    execution = replace(model.execution, spread=devices.spread)
    restricted: Any = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    room = batch, prompt_length + (1 + source.num) * max_new_tokens, model.dtype

    def logits_of(hidden: Float[Array, "batch ... hidden"]) -> Float[Array, "batch ... vocab"]:
        return jnp.einsum("...d,vd->...v", hidden, model.head_weight.astype(model.dtype))

    def next_distribution(hidden: Float[Array, "batch ... hidden"]) -> Float[Array, "batch ... vocab"]:
        return distribution(logits_of(hidden), **restricted)

    def draw_from(probabilities, number):
        """Samples with the rows' PRNG keys, folded with even numbers for tokens and odd ones for drafts."""
        return draw(jnp.log(probabilities), folded(keys, number))

    def ends_with(token, lengths):
        is_end = jnp.isin(token, jnp.array(ends, jnp.int32)) if ends else jnp.zeros(batch, bool)
        return is_end | (lengths >= max_new_tokens)

    def drawn_with_module(state, hidden):
        after_token, after_draft = jnp.unstack(next_distribution(hidden), axis=1)
        in_place = given_draft(after_token, state.drafter[0], state.draft[:, 0])
        return draw_from(jnp.stack([in_place, after_draft], axis=1), 2 * state.passes + 2)

    def drawn_alone(state, hidden):
        """Draws each token with the key that `generate` has for it."""
        logits, numbers = logits_of(hidden), state.lengths + jnp.arange(hidden.shape[1])[:, None]
        drawn = [sample(logits[:, i], jax.vmap(jax.random.fold_in)(keys, each), **restricted) for i, each in enumerate(numbers)]
        return jnp.stack(drawn, axis=1)

    def of_module(passes, drafter, hidden, following, positions, segments, last):
        module = model.predict(1, hidden, following, positions, segments, cache=drafter[1], execution=execution)
        assert module.cache is not None
        draft_distribution = next_distribution(module.hidden[rows, last])
        return draw_from(draft_distribution, 2 * passes + 1)[:, None], (draft_distribution, module.cache)

    def of_text(passes, text, hidden, following, positions, segments, last):
        places = jnp.where(segments > 0, positions + 1, text.shape[1])
        text = text.at[rows[:, None], places].set(following, mode="drop")
        return looked_up(text, positions[rows, last] + 1, source.num), text

    def start() -> _DraftState:
        states = model.hidden_states(
            tokens, positions, segment_ids, cache=init_cache(model.config, *room), spread=devices.spread
        )
        assert states.cache is not None
        if source.name == "module":
            first = draw_from(next_distribution(states.hidden[:, -1]), 0)
            drafter: Any = None, init_cache(replace(model.config, num_hidden_layers=1), *room)
        else:
            first = sample(logits_of(states.hidden[:, -1]), folded(keys, 0), **restricted)
            beginning = tokens[rows, segment_ids.argmax(axis=1)]
            drafter = jnp.zeros((batch, prompt_length + max_new_tokens), jnp.int32).at[:, 0].set(beginning)
        following = jnp.concatenate([tokens[:, 1:], first[:, None]], axis=1)
        last = jnp.full_like(rows, prompt_length - 1)
        draft, drafter = propose(0, drafter, states.hidden, following, positions, segment_ids, last)
        lengths = vary_as(jnp.ones(batch, jnp.int32), tokens)
        return _DraftState(
            passes=jnp.int32(0),
            token=first,
            draft=draft,
            position=positions[:, -1] + 1,
            cache=states.cache,
            drafter=drafter,
            produced=jnp.zeros((batch, max_new_tokens), jnp.int32).at[:, 0].set(first),
            lengths=lengths,
            done=ends_with(first, lengths) | ~segment_ids.any(axis=1),
            drafted=jnp.zeros_like(lengths),
            accepted=jnp.zeros_like(lengths),
        )

    def one_pass(num_drafts: int, state: _DraftState) -> _DraftState:
        draft, goes_on = state.draft[:, :num_drafts], ~state.done
        positions = state.position[:, None] + jnp.arange(1 + num_drafts)
        several = jnp.concatenate([state.token[:, None], draft], axis=1)
        segments = (goes_on[:, None] & (several >= 0)).astype(jnp.int32)
        states = model.hidden_states(jnp.maximum(several, 0), positions, segments, cache=state.cache, spread=devices.spread)
        assert states.cache is not None
        answers = drawn(state, states.hidden)
        right = jnp.cumprod(answers[:, :-1] == draft, axis=1)
        # The rows of wrong drafts become padding, which no later token sees.
        segments = segments.at[:, 1:].mul(right)
        cached = jax.lax.dynamic_update_slice(states.cache.segment_ids, segments, (0, states.cache.length - 1 - num_drafts))
        last, passes = right.sum(axis=1), state.passes + 1
        next_draft, drafter = propose(passes, state.drafter, states.hidden, answers, positions, segments, last)

        lengths, done, produced = state.lengths, state.done, state.produced
        for number, answer in enumerate(answers.T):
            counts = goes_on & (last >= number) & ~done
            produced = produced.at[rows, jnp.where(counts, lengths, max_new_tokens)].set(answer, mode="drop")
            lengths += counts
            done |= counts & ends_with(answer, lengths)
        return _DraftState(
            passes=passes,
            token=answers[rows, last],
            draft=next_draft,
            position=state.position + 1 + last,
            cache=replace(states.cache, segment_ids=cached),
            drafter=drafter,
            produced=produced,
            lengths=lengths,
            done=done,
            drafted=state.drafted + goes_on * (draft >= 0).sum(axis=1),
            accepted=state.accepted + goes_on * last,
        )

    def next_pass(state: _DraftState) -> _DraftState:
        if source.name == "module":
            return one_pass(1, state)
        found = devices.any(~state.done & (state.draft >= 0).any(axis=1))
        return jax.lax.cond(found, partial(one_pass, source.num), partial(one_pass, 0), state)

    drawn, propose = (drawn_with_module, of_module) if source.name == "module" else (drawn_alone, of_text)
    state = jax.lax.while_loop(lambda state: devices.any(~state.done), next_pass, start())
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
