"""Draws the next token of each running sequence on the device: every row has its own options and does not depend on other rows.

Penalties of tokens that a sequence already contains, and biases of single tokens, are applied first. Then masks exclude tokens.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from moe_jax.generation.sampling import draw
from moe_jax.serving.request import MAX_BIASES, MAX_LOGPROBS, SamplingOptions


class Penalties(NamedTuple):
    """Penalties of the slots, and the tokens that they apply to. It exists only once a request has a penalty or a bias."""

    repetition: Float[Array, "slots"]
    """1: none."""
    presence: Float[Array, "slots"]
    """0: none."""
    frequency: Float[Array, "slots"]
    """0: none."""
    biased_tokens: Int[Array, "slots 300"]
    bias: Float[Array, "slots 300"]
    """Added to the logits of `biased_tokens`; 0 in unused entries."""
    in_prompt: Bool[Array, "slots vocab"]
    outputs: Int[Array, "slots vocab"]
    """The number of occurrences of each token in a sequence's output."""


def penalised(
    logits: Float[Array, "rows vocab"], slots: Int[Array, "rows"], penalties: Penalties
) -> Float[Array, "rows vocab"]:
    """Returns logits with biases added, then divided by repetition penalties, then minus the other penalties.

    The repetition penalty divides positive logits and multiplies negative ones, of tokens of the prompt and the output
    (https://arxiv.org/abs/1909.05858). The presence penalty is subtracted once, and the frequency penalty once for each time
    that a token is in the output.
    """
    of_row = jax.tree.map(lambda values: values[jnp.maximum(slots, 0)], penalties)
    logits = logits.at[jnp.arange(len(slots))[:, None], of_row.biased_tokens].add(of_row.bias)
    repeated = jnp.where(logits > 0, logits / of_row.repetition[:, None], logits * of_row.repetition[:, None])
    logits = jnp.where(of_row.in_prompt | (of_row.outputs > 0), repeated, logits)
    return logits - of_row.frequency[:, None] * of_row.outputs - of_row.presence[:, None] * (of_row.outputs > 0)


def masked(scores: Float[Array, "rows vocab"], allowed: UInt32[Array, "rows words"]) -> Float[Array, "rows vocab"]:
    """Returns the scores with -inf for tokens whose bit is 0 (`SlotOptions.allowed`)."""
    bits = allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return jnp.where(bits.reshape(len(allowed), -1)[:, : scores.shape[1]] > 0, scores, -jnp.inf)


def init_penalties(num_slots: int, vocab_size: int) -> Penalties:
    """Returns slots without penalties."""
    zeros, biased = jnp.zeros(num_slots, jnp.float32), jnp.zeros((num_slots, MAX_BIASES), jnp.int32)
    outputs = jnp.zeros((num_slots, vocab_size), jnp.int32)
    return Penalties(zeros + 1, zeros, zeros, biased, biased.astype(jnp.float32), outputs.astype(jnp.bool), outputs)


def start_slot(
    penalties: Penalties,
    slot: Int[Array, ""],
    row: tuple[Array | np.ndarray | np.float32, ...],
    tokens: Int[Array, "length"],
    num_prompt: Int[Array, ""],
    num_tokens: Int[Array, ""],
) -> Penalties:
    """Returns penalties with a slot's options and tokens replaced by its new sequence's.

    Args:
      row: the slot's new penalties (`penalty_row`).
      tokens: the prompt, then output that is already known (after a preemption), then padding of any value.
      num_prompt, num_tokens: the number of tokens of the prompt, and of `tokens` without padding.
    """
    vocab, place = penalties.outputs.shape[1], jnp.arange(len(tokens))
    of_prompt = jnp.where(place < num_prompt, tokens, vocab)
    of_output = jnp.where((place >= num_prompt) & (place < num_tokens), tokens, vocab)
    in_prompt = jnp.zeros(vocab, jnp.bool).at[of_prompt].set(True, mode="drop")
    outputs = jnp.zeros(vocab, jnp.int32).at[of_output].add(1, mode="drop")
    return jax.tree.map(lambda values, new: values.at[slot].set(new), penalties, Penalties(*row, in_prompt, outputs))  # type: ignore[arg-type, call-arg]


def penalty_row(options: SamplingOptions) -> tuple[np.ndarray | np.float32, ...]:
    """Returns the first five fields of `Penalties` for the slot of a sequence with these options, in NumPy."""
    tokens, bias = np.zeros(MAX_BIASES, np.int32), np.zeros(MAX_BIASES, np.float32)
    for place, (token, value) in enumerate(options.logit_bias.items()):
        tokens[place], bias[place] = token, value
    numbers = options.repetition_penalty, options.presence_penalty, options.frequency_penalty
    return *map(np.float32, numbers), tokens, bias


def count_tokens(penalties: Penalties, slots: Int[Array, "rows"], tokens: Int[Array, "rows"]) -> Penalties:
    """Returns penalties with the new token of each row counted; rows of slot -1 are padding."""
    outputs = penalties.outputs.at[jnp.where(slots < 0, len(penalties.outputs), slots), tokens].add(1, mode="drop")
    return penalties._replace(outputs=outputs)


Variant = Literal["greedy", "plain", "full"]
"""A variant of the drawing program: only argmax; temperatures too; all options, with penalties and alternatives.

A row has the same token in each variant that can serve it, so a step runs the smallest one that serves all its rows.
"""

VARIANTS: tuple[Variant, ...] = ("greedy", "plain", "full")


def variant_of(options: SamplingOptions) -> Variant:
    """Returns the smallest variant that serves these options."""
    penalties = options.repetition_penalty, options.presence_penalty, options.frequency_penalty
    if options.logit_bias or options.logprobs or penalties != (1, 0, 0):
        return "full"
    if options.temperature == 0:
        return "greedy"
    return "plain" if options.top_k is None and options.top_p is None and not options.min_p else "full"


SMALLEST_TEMPERATURE = 1e-30
"""Below it the most likely token is chosen: with a smaller temperature all logits would be infinite in f32."""


class SlotOptions(NamedTuple):
    """The sampling options of every slot."""

    temperature: Float[Array, "slots"]
    """0: the most likely token."""
    top_k: Int[Array, "slots"]
    """0: no restriction."""
    top_p: Float[Array, "slots"]
    """1: no restriction."""
    min_p: Float[Array, "slots"]
    """0: no restriction."""
    seed: UInt32[Array, "slots 2"]
    """High and low 32 bits of the sequence's seed."""
    allowed: UInt32[Array, "slots words"] | None = None
    """The tokens that may be drawn: bit i of word j is for token 32 j + i. None: all, in all slots."""


Scores = tuple[Float[Array, "rows"], Int[Array, "rows choices"], Float[Array, "rows choices"]]
"""Log-probabilities of a token of each row; the most likely tokens, ties in order of their ids; their log-probabilities."""


class Sampled(NamedTuple):
    """The new token of each row. Log-probabilities are computed from the model's logits, without penalties and masks."""

    tokens: Int[Array, "rows"]
    logprobs: Float[Array, "rows"]
    top_tokens: Int[Array, "rows choices"]
    """The most likely tokens, the first of equals first; up to `MAX_LOGPROBS` in variant "full"."""
    top_logprobs: Float[Array, "rows choices"]


def sample_rows(
    variant: Variant,
    logits: Float[Array, "rows vocab"],
    slots: Int[Array, "rows"],
    positions: Int[Array, "rows"],
    options: SlotOptions,
    penalties: Penalties | None = None,
    *,
    strict: bool = False,
    tempered: bool = False,
) -> tuple[Sampled, Penalties | None]:
    """Draws a token for each row from softmax(logits / temperature), restricted to the top k, then top p, then min p.

    Returns the tokens, and the penalties with the tokens counted. Only variant "full" returns the most likely tokens.

    The draw's random key depends only on the sequence's seed and the new token's position. top_k and top_p cut as
    `generation.sampling.sample` does. min_p cuts tokens less likely than min_p times the most likely one.

    Args:
      variant: static; it must serve the options of all rows.
      slots: the slot of each row, which has its options; -1: the row is padding, and gets token 0.
      positions: the positions of the new tokens.
      penalties: penalties and biases of the slots; None: no row has any.
      strict: static; as in `scores_of`.
      tempered: static; True: log-probabilities are computed from logits / temperature; False: from the logits.
    """
    logits = logits.astype(jnp.float32)
    of_row = jax.tree.map(lambda values: values[jnp.maximum(slots, 0)], options)
    scores = logits if penalties is None else penalised(logits, slots, penalties)
    scores = scores if of_row.allowed is None else masked(scores, of_row.allowed)
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    if variant != "greedy":
        divisor = jnp.where(of_row.temperature > 0, of_row.temperature, 1)[:, None]
        scores = scores / divisor
        if variant == "full":
            scores = _restricted(scores, of_row)
        tokens = jnp.where(of_row.temperature > 0, draw(scores, _keys(of_row.seed, positions)), tokens)
        logits = logits / divisor if tempered else logits
    tokens = jnp.where(slots < 0, 0, tokens)
    num_top = min(MAX_LOGPROBS, logits.shape[1]) if variant == "full" else 0
    sampled = Sampled(tokens, *scores_of(logits, tokens, num_top, strict=strict))
    return sampled, None if penalties is None else count_tokens(penalties, slots, tokens)


def scores_of(logits: Float[Array, "rows vocab"], tokens: Int[Array, "rows"], num_top: int, *, strict: bool = False) -> Scores:
    """Returns the log-probabilities of each row's token and of the `num_top` most likely ones, from f32 logits.

    With `strict` a row's bits do not depend on the number of rows.
    """
    if strict:
        # Imports Pallas Mosaic GPU, a second of CPU time that other engines save.
        from moe_jax.kernels.strict.rows import log_sum_exp

        total = log_sum_exp(logits)
        top_logits, top_tokens = jax.lax.top_k(logits, num_top)
        of_tokens = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
        return of_tokens - total, top_tokens, top_logits - total[:, None]
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top_logprobs, top_tokens = jax.lax.top_k(logprobs, num_top)
    return jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0], top_tokens, top_logprobs


def init_slots(num_slots: int) -> SlotOptions:
    """Returns options of greedy slots."""
    zeros, ones = jnp.zeros(num_slots, jnp.float32), jnp.ones(num_slots, jnp.float32)
    return SlotOptions(zeros, jnp.zeros(num_slots, jnp.int32), ones, zeros, jnp.zeros((num_slots, 2), jnp.uint32))


def slot_row(options: SamplingOptions, seed: int) -> SlotOptions:
    """Returns the row of options for a slot, with this seed of up to 64 bits, in NumPy."""
    row = dict(
        temperature=np.float32(options.temperature if options.temperature >= SMALLEST_TEMPERATURE else 0),
        # NumPy would raise for a larger value, in the engine's thread.
        top_k=np.int32(min(options.top_k or 0, 2**31 - 1)),
        top_p=np.float32(1 if options.top_p is None else options.top_p),
        min_p=np.float32(options.min_p or 0),
        seed=np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32),
    )
    return SlotOptions(**row)  # type: ignore[arg-type]


def with_last_tokens(
    last_token: Int[Array, "slots *_"], slots: Int[Array, "rows"], tokens: Int[Array, "rows *_"]
) -> Int[Array, "slots *_"]:
    """Returns `last_token` with the new tokens of all rows except padding."""
    return last_token.at[jnp.where(slots < 0, len(last_token), slots)].set(tokens, mode="drop")


def _keys(seed: UInt32[Array, "rows 2"], positions: Int[Array, "rows"]) -> Key[Array, "rows"]:
    return jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seed, impl="threefry2x32"), positions)


def _restricted(scores: Float[Array, "rows vocab"], options: SlotOptions) -> Float[Array, "rows vocab"]:
    """Returns the scores with -inf for tokens that the options cut."""
    vocab, best = scores.shape[-1], jnp.max(scores, axis=-1, keepdims=True)
    k = jnp.where(options.top_k > 0, options.top_k, vocab + 1)
    smallest = _threshold(scores, jnp.ones_like(scores, jnp.int32), k, jnp.any(k < vocab))
    scores = jnp.where(scores < smallest[:, None], -jnp.inf, scores)
    weights = jnp.exp(scores - best)
    mass = jnp.where(options.top_p < 1, options.top_p * weights.sum(axis=-1), jnp.inf)
    smallest = _threshold(scores, weights, mass, jnp.any(options.top_p < 1))
    scores = jnp.where(scores < smallest[:, None], -jnp.inf, scores)
    return jnp.where(scores < best + jnp.log(options.min_p)[:, None], -jnp.inf, scores)


def _threshold(scores: Float[Array, "rows vocab"], weights: Array, wanted: Array, any_row: Array) -> Float[Array, "rows"]:
    """Returns the largest score of each row at which the weights of all scores not below it reach `wanted`; else -inf.

    Halves an interval of floats, in the order of their bits, 32 times. Each time reads the scores once; a sort would read and
    write them more often. Sums do not depend on other rows, and `any_row` False skips the work if no row needs a threshold.
    """

    def halve(_, interval):
        low, high = interval
        # Rounded up, without the overflow of low + high: the last two floats end at the upper one if it reaches `wanted`.
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        reached = jnp.where(scores >= _as_float(middle)[:, None], weights, 0).sum(axis=-1) >= wanted
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

    ends = jnp.full_like(scores[:, 0], MINUS_INFINITY, jnp.int32), jnp.full_like(scores[:, 0], INFINITY, jnp.int32)
    low, _ = jax.lax.fori_loop(0, jnp.where(any_row, 32, 0), halve, ends)
    return _as_float(low)


INFINITY = 0x7F800000
MINUS_INFINITY = -INFINITY - 1
"""The integers of the infinite floats in `_as_float`."""


def _as_float(ordered: Int[Array, "rows"]) -> Float[Array, "rows"]:
    """Returns the floats whose order is that of these integers: a negative float's bits count down."""
    return jnp.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(jnp.float32)
