"""Penalties of tokens that a sequence holds already, and biases of single tokens, for every slot of the engine."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

if TYPE_CHECKING:
    from moe_jax.serving.request import SamplingOptions

MAX_BIASED = 300
"""Largest number of tokens with a bias in one request, as OpenAI's server has it."""


class SlotPenalties(NamedTuple):
    """The penalties of every slot."""

    repetition: Float[Array, "slots"]
    """1: none."""
    presence: Float[Array, "slots"]
    """0: none."""
    frequency: Float[Array, "slots"]
    """0: none."""
    biased_tokens: Int[Array, "slots 300"]
    bias: Float[Array, "slots 300"]
    """Added to the logits of `biased_tokens`; 0 behind the last one."""


class Penalties(NamedTuple):
    """Penalties of the slots, and the tokens that they are for. It exists only once a request has a penalty or a bias."""

    options: SlotPenalties
    in_prompt: Bool[Array, "slots vocab"]
    outputs: Int[Array, "slots vocab"]
    """The number of times that a sequence's output holds each token."""


def penalised(
    logits: Float[Array, "rows vocab"], slots: Int[Array, "rows"], penalties: Penalties
) -> Float[Array, "rows vocab"]:
    """Returns logits with biases added, then divided by repetition penalties, then less the other penalties.

    The repetition penalty divides positive logits and multiplies negative ones, of tokens of the prompt and the output
    (https://arxiv.org/abs/1909.05858). The presence penalty is subtracted once, and the frequency penalty once for each time
    that a token is in the output.
    """
    options, in_prompt, outputs = jax.tree.map(lambda values: values[jnp.maximum(slots, 0)], penalties)
    logits = logits.at[jnp.arange(len(slots))[:, None], options.biased_tokens].add(options.bias)
    repeated = jnp.where(logits > 0, logits / options.repetition[:, None], logits * options.repetition[:, None])
    logits = jnp.where(in_prompt | (outputs > 0), repeated, logits)
    return logits - options.frequency[:, None] * outputs - options.presence[:, None] * (outputs > 0)


def init_penalties(num_slots: int, vocab_size: int) -> Penalties:
    """Returns slots without penalties."""
    zeros = jnp.zeros(num_slots, jnp.float32)
    biased = jnp.zeros((num_slots, MAX_BIASED), jnp.int32)
    options = SlotPenalties(zeros + 1, zeros, zeros, biased, biased.astype(jnp.float32))
    return Penalties(options, jnp.zeros((num_slots, vocab_size), jnp.bool), jnp.zeros((num_slots, vocab_size), jnp.int32))


def start_slot(
    penalties: Penalties,
    slot: Int[Array, ""],
    row: SlotPenalties,
    tokens: Int[Array, "length"],
    num_prompt: Int[Array, ""],
    num_tokens: Int[Array, ""],
) -> Penalties:
    """Returns penalties with a slot's options and tokens replaced by those of the sequence that takes it.

    Args:
      row: the slot's new options (`penalty_row`).
      tokens: the prompt, then the output that is known already (after a preemption), then padding of any value.
      num_prompt, num_tokens: the number of tokens of the prompt, and without the padding.
    """
    vocab, place = penalties.outputs.shape[1], jnp.arange(len(tokens))
    of_prompt = jnp.where(place < num_prompt, tokens, vocab)
    of_output = jnp.where((place >= num_prompt) & (place < num_tokens), tokens, vocab)
    in_prompt = jnp.zeros(vocab, jnp.bool).at[of_prompt].set(True, mode="drop")
    outputs = jnp.zeros(vocab, jnp.int32).at[of_output].add(1, mode="drop")
    return jax.tree.map(lambda values, new: values.at[slot].set(new), penalties, Penalties(row, in_prompt, outputs))


def penalty_row(options: "SamplingOptions") -> SlotPenalties:
    """Returns the row of a slot that a sequence with these options takes, in NumPy."""
    tokens, bias = np.zeros(MAX_BIASED, np.int32), np.zeros(MAX_BIASED, np.float32)
    for place, (token, value) in enumerate(options.logit_bias.items()):
        tokens[place], bias[place] = token, value
    numbers = options.repetition_penalty, options.presence_penalty, options.frequency_penalty
    return SlotPenalties(*map(np.float32, numbers), tokens, bias)  # type: ignore[call-arg, arg-type]


def has_penalties(options: "SamplingOptions") -> bool:
    """Returns whether a sequence with these options needs `Penalties`."""
    numbers = options.repetition_penalty, options.presence_penalty, options.frequency_penalty
    return bool(options.logit_bias) or numbers != (1, 0, 0)


def count_tokens(penalties: Penalties, slots: Int[Array, "rows"], tokens: Int[Array, "rows"]) -> Penalties:
    """Returns penalties with the new token of each row counted; rows of slot -1 are padding."""
    outputs = penalties.outputs.at[jnp.where(slots < 0, len(penalties.outputs), slots), tokens].add(1, mode="drop")
    return penalties._replace(outputs=outputs)
