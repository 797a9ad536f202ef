"""The options and penalties of the sequences in an engine's slots: changed on the host, read by the programs that draw."""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Sharding

from moe_jax.serving.drawing import VARIANTS, Variant, variant_of
from moe_jax.serving.limits import EngineLimits
from moe_jax.serving.penalties import Penalties, init_penalties, penalty_row, start_slot
from moe_jax.serving.placement import Placement
from moe_jax.serving.request import SamplingOptions
from moe_jax.serving.sampling import SlotOptions, init_slots, slot_row
from moe_jax.serving.schedule import StepPlan
from moe_jax.serving.sequence import Sequence


class DrawingSlots:
    """The way in which each slot's sequence draws.

    Attributes:
      options: all slots' options, on the device.
      penalties: the counts of tokens; None until a sequence asks for penalties, because they take much memory.
    """

    def __init__(self, limits: EngineLimits, vocab_size: int, placement: Placement):
        self._limits, self._vocab_size, self._sharding = limits, vocab_size, placement.rows
        self._num_slots = limits.max_sequences * len(placement.devices)
        self._on_host = jax.tree.map(np.array, init_slots(self._num_slots))
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
        self.penalties = _start_slot(self._sharding)(self.penalties, np.int32(slot), penalty_row(options), padded, *sizes)

    def _start(self, sequence: Sequence) -> None:
        slot, options = self._place_of(sequence), sequence.options
        for values, value in zip(self._on_host, slot_row(options, sequence.seed), strict=True):
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
    return jax.jit(start_slot, donate_argnums=0, out_shardings=sharding)


@functools.cache
def _init_penalties(sharding: Sharding) -> Callable[[int, int], Penalties]:
    # Compiled, so that each array has memory of its own: the same zeros twice could not be donated.
    return jax.jit(init_penalties, static_argnums=(0, 1), out_shardings=sharding)
