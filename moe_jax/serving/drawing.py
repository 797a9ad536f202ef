"""The program that draws the tokens of a step, and remembers them on the device for the next one.

Three variants are compiled. A step takes the cheapest one that serves the options of all its rows.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Bool, Float, Int

from moe_jax.serving import sampling
from moe_jax.serving.limits import EngineLimits
from moe_jax.serving.placement import Placement, on_each
from moe_jax.serving.request import MAX_LOGPROBS, SamplingOptions
from moe_jax.serving.sampling import Penalties, Sampled, SlotOptions
from moe_jax.serving.schedule import StepPlan
from moe_jax.serving.sequence import Sequence
from moe_jax.serving.step import StepOutput

Variant = Literal["greedy", "plain", "full"]
"""Argmax alone; temperatures too; all options, with penalties and alternatives."""

VARIANTS: tuple[Variant, ...] = ("greedy", "plain", "full")


class Drawn(NamedTuple):
    """The results of drawing the tokens of a step.

    What is changed in place comes first: JAX gives a donated array's memory to the first result of its shape. A last token at
    a new address would change the CUDA graph of the next step.
    """

    last_token: Int[Array, "slots"]
    penalties: Penalties | None
    """With the new tokens counted; None in variants without penalties."""
    sampled: Sampled
    """The token behind each row's newest one; rows as in a step without drafts."""
    second: Sampled | None = None
    """The token behind each decoding row's draft; 0 where the draft was wrong. None without drafts, as `accepted` is."""
    accepted: Bool[Array, "decodes"] | None = None
    """True for each decoding row whose draft was accepted."""


def variant_of(options: SamplingOptions) -> Variant:
    """Returns the cheapest variant that serves these options."""
    if sampling.has_penalties(options) or options.logprobs or (variant := sampling.variant_for(options)) == "restricted":
        return "full"
    return variant


@functools.cache
def draw_program(variant: Variant, *, strict: bool = False, mesh: Mesh | None = None) -> Callable[..., Drawn]:
    """Returns the jitted f(output, options, last_token, penalties) -> `Drawn`, which changes the last two in place.

    With a mesh all arrays have rows of each of its devices (`placement.on_each`).
    """
    return jax.jit(on_each(mesh, functools.partial(_draw, variant, strict)), donate_argnums=(2, 3))


def draw_rows(
    variant: Variant,
    logits: Float[Array, "rows vocab"],
    slots: Int[Array, "rows"],
    positions: Int[Array, "rows"],
    options: SlotOptions,
    penalties: Penalties | None,
    *,
    strict: bool = False,
) -> tuple[Sampled, Penalties | None]:
    """Draws a token for each row, as `sample_rows` does; returns the penalties with the new tokens counted too."""
    is_full = variant == "full"
    sampled = sampling.sample_rows(
        logits,
        slots,
        positions,
        options,
        variant="restricted" if variant == "full" else variant,
        penalties=penalties,
        num_top=min(MAX_LOGPROBS, logits.shape[1]) if is_full else 0,
        strict=strict,
    )
    return sampled, None if penalties is None else sampling.count_tokens(penalties, slots, sampled.tokens)


def _draw(
    variant: Variant,
    strict: bool,
    output: StepOutput,
    options: SlotOptions,
    last_token: Int[Array, "slots"],
    penalties: Penalties | None,
) -> Drawn:
    if output.drafted is not None:
        return _check(variant, output, options, last_token, penalties)
    of_rows = output.logits, output.slots, output.positions, options
    sampled, penalties = draw_rows(variant, *of_rows, penalties, strict=strict)
    return Drawn(sampling.with_last_tokens(last_token, output.slots, sampled.tokens), penalties, sampled)


def _check(
    variant: Variant, output: StepOutput, options: SlotOptions, last_token: Int[Array, "slots"], penalties: Penalties | None
) -> Drawn:
    """Draws with drafts: a draft is accepted if the token in its place is equal, and then gives a second token."""
    assert output.drafted is not None
    drafts = output.drafted.drafts
    behind_drafts = 2 * len(drafts)
    firsts = jnp.concatenate([jnp.arange(0, behind_drafts, 2), jnp.arange(behind_drafts, len(output.logits))])
    logits, positions, slots = output.logits, output.positions, output.slots
    first, penalties = draw_rows(variant, logits[firsts], slots, positions[firsts], options, penalties)
    slots_of_drafts = slots[: len(drafts)]
    accepted = (slots_of_drafts >= 0) & (first.tokens[: len(drafts)] == drafts)
    slots_of_drafts = jnp.where(accepted, slots_of_drafts, -1)
    seconds = slice(1, behind_drafts, 2)
    second, penalties = draw_rows(variant, logits[seconds], slots_of_drafts, positions[seconds], options, penalties)
    last_token = sampling.with_last_tokens(last_token, slots, first.tokens)
    last_token = sampling.with_last_tokens(last_token, slots_of_drafts, second.tokens)
    return Drawn(last_token, penalties, first, second, accepted)


class DrawingSlots:
    """The way in which each slot's sequence draws.

    Attributes:
      options: all slots' options, on the device.
      penalties: the counts of tokens; None until a sequence asks for penalties, because they take much memory.
    """

    def __init__(self, limits: EngineLimits, vocab_size: int, placement: Placement):
        self._limits, self._vocab_size, self._sharding = limits, vocab_size, placement.rows
        self._num_slots = limits.max_sequences * len(placement.devices)
        self._on_host = jax.tree.map(np.array, sampling.init_slots(self._num_slots))
        self._variants = [0] * self._num_slots
        """For each slot the number in VARIANTS of the cheapest one that serves it."""
        self.options: SlotOptions = self._copied()
        self.penalties: Penalties | None = None

    def start(self, sequences: list[Sequence]) -> None:
        """Gives slots the options of the sequences that begin to draw there."""
        for sequence in sequences:
            self._start(sequence)
        if sequences:
            self.options = self._copied()

    def variant_for(self, plans: list[StepPlan]) -> Variant:
        """Returns the cheapest variant that serves all rows that draw."""
        slots = (self._place_of(sequence) for plan in plans for sequence in plan.samples if sequence.slot is not None)
        return VARIANTS[max((self._variants[slot] for slot in slots), default=0)]

    def make_penalties(self) -> None:
        """Makes the counts of tokens, all zero."""
        self.penalties = _init_penalties(self._sharding)(self._num_slots, self._vocab_size)

    def start_penalties(self, slot: int, prompt: list[int], tokens: list[int], options: SamplingOptions) -> None:
        """Counts the tokens of the sequence that begins to draw in a slot."""
        padded = np.zeros(self._limits.max_length, np.int32)
        padded[: len(tokens)] = tokens
        sizes = np.int32(len(prompt)), np.int32(len(tokens))
        row = sampling.penalty_row(options)
        self.penalties = _start_slot(self._sharding)(self.penalties, np.int32(slot), row, padded, *sizes)

    def _start(self, sequence: Sequence) -> None:
        slot, options = self._place_of(sequence), sequence.options
        for values, value in zip(self._on_host, sampling.slot_row(options, sequence.seed), strict=True):
            values[slot] = value
        self._variants[slot] = VARIANTS.index(variant_of(options))
        # All slots once penalties exist: the slot's last sequence may have left some.
        if self.penalties is None and variant_of(options) == "full":
            self.make_penalties()
        if self.penalties is not None:
            self.start_penalties(slot, sequence.prompt, sequence.tokens, options)

    def _place_of(self, sequence: Sequence) -> int:
        """Returns the index of a running sequence's slot among those of all devices."""
        assert sequence.slot is not None
        return sequence.device * self._limits.max_sequences + sequence.slot

    def _copied(self) -> SlotOptions:
        # A copy: the array on the device may share the host's memory, which the next sequence changes.
        return jax.device_put(jax.tree.map(np.copy, self._on_host), self._sharding)


@functools.cache
def _start_slot(sharding: Sharding) -> Callable[..., Penalties]:
    return jax.jit(sampling.start_slot, donate_argnums=0, out_shardings=sharding)


@functools.cache
def _init_penalties(sharding: Sharding) -> Callable[[int, int], Penalties]:
    # Compiled, so that each array has memory of its own: the same zeros twice could not be donated.
    return jax.jit(sampling.init_penalties, static_argnums=(0, 1), out_shardings=sharding)
