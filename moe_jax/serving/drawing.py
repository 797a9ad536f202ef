"""The program that draws the tokens of a step, and keeps them on the device for the next one.

Three variants are compiled. A step uses the cheapest one that serves the options of all its rows.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Int

from moe_jax.serving import sampling
from moe_jax.serving.constraints import num_words
from moe_jax.serving.placement import Placement, on_each
from moe_jax.serving.request import EngineLimits, SamplingOptions
from moe_jax.serving.sampling import VARIANTS, Penalties, Sampled, SlotOptions, Variant, variant_of
from moe_jax.serving.schedule import Sequence
from moe_jax.serving.step import StepOutput, first_outputs


@functools.cache
def draw_program(
    variant: Variant, *, strict: bool = False, tempered: bool = False, mesh: Mesh | None = None
) -> Callable[..., tuple]:
    """Returns the jitted f(output, options, last_token, penalties), which changes the last two in place.

    It returns (last_token, penalties, first, further, checked). `first` is `Sampled` for the token after each row's newest one.
    `further` has `Sampled` for the token after each of the decoding rows' drafts, 0 unless that draft is accepted. `checked`
    [2, decodes] has the numbers of checked and of accepted drafts; None without drafts. Arrays changed in place come first: JAX
    gives a donated array's memory to the first result of its shape. A last token at a new address would change the CUDA graph
    of the next step. With a mesh all arrays have rows of each device (`placement.on_each`).

    Args:
      variant, strict, tempered: as in `sampling.sample_rows`.
    """
    sample_rows = functools.partial(sampling.sample_rows, variant, strict=strict, tempered=tempered)
    return jax.jit(on_each(mesh, functools.partial(_draw, sample_rows)), donate_argnums=(2, 3))


def _draw(
    sample_rows: Callable[..., tuple[Sampled, Penalties | None]],
    output: StepOutput,
    options: SlotOptions,
    last_token: Int[Array, "slots"],
    penalties: Penalties | None,
) -> tuple:
    if output.drafted is not None:
        return _check(sample_rows, output, options, last_token, penalties)
    sampled, penalties = sample_rows(output.logits, output.slots, output.positions, options, penalties)
    return sampling.with_last_tokens(last_token, output.slots, sampled.tokens), penalties, sampled, (), None


def _check(
    sample_rows: Callable[..., tuple[Sampled, Penalties | None]],
    output: StepOutput,
    options: SlotOptions,
    last_token: Int[Array, "slots"],
    penalties: Penalties | None,
) -> tuple:
    """Draws with drafts: a draft is accepted if it equals the drawn token, and then yields a further token."""
    assert output.drafted is not None
    drafts = output.drafted.tokens
    num_decodes, per_row = len(drafts), 1 + drafts.shape[1]
    firsts = first_outputs(num_decodes, per_row, len(output.logits))
    logits, positions, slots = output.logits, output.positions, output.slots
    first, penalties = sample_rows(logits[firsts], slots, positions[firsts], options, penalties)
    last_token = sampling.with_last_tokens(last_token, slots, first.tokens)
    drawn, further, accepted = first.tokens[:num_decodes], list[Sampled](), jnp.zeros(num_decodes, jnp.int32)
    right = slots[:num_decodes] >= 0
    for number in range(1, per_row):
        right &= drawn == drafts[:, number - 1]
        accepted += right
        of_draft, slots_of_right = slice(number, num_decodes * per_row, per_row), jnp.where(right, slots[:num_decodes], -1)
        inputs = logits[of_draft], slots_of_right, positions[of_draft], options, penalties
        sampled, penalties = sample_rows(*inputs)
        last_token = sampling.with_last_tokens(last_token, slots_of_right, sampled.tokens)
        drawn = sampled.tokens
        further.append(sampled)
    return last_token, penalties, first, tuple(further), jnp.stack([(drafts >= 0).sum(axis=1, dtype=jnp.int32), accepted])


class DrawingSlots:
    """The sampling options and penalties of each slot's sequence.

    Attributes:
      options: all slots' options, on the device.
      penalties: the counts of tokens; None until a sequence asks for penalties, because they need much memory.
    """

    def __init__(self, limits: EngineLimits, vocab_size: int, placement: Placement):
        self._limits, self._vocab_size, self._sharding = limits, vocab_size, placement.rows
        self._num_slots = limits.max_sequences * len(placement.devices)
        self._on_host = jax.tree.map(np.array, sampling.init_slots(self._num_slots))
        self.options: SlotOptions = self._copied()
        self.penalties: Penalties | None = None

    def start(self, sequences: list[Sequence]) -> None:
        """Sets the slots' options for the sequences that start drawing there."""
        for sequence in sequences:
            self._start(sequence)
        self.options = self._copied()

    def constrained(self, sequences: list[Sequence]) -> SlotOptions:
        """Returns the options of all slots, with the tokens that the constraints of these sequences allow."""
        allowed = np.full((self._num_slots, num_words(self._vocab_size)), 0xFFFFFFFF, np.uint32)
        for each in sequences:
            # A sequence that has ended has no slot, and its row is ignored.
            if each.constraint is not None and each.constraint.bits is not None and each.slot is not None:
                allowed[self._slot_of(each)] = each.constraint.bits
        return self.options._replace(allowed=jax.device_put(allowed, self._sharding))

    def make_penalties(self) -> None:
        """Makes the counts of tokens, all zero."""
        self.penalties = _init_penalties(self._sharding)(self._num_slots, self._vocab_size)

    def start_penalties(self, slot: int, prompt: list[int], tokens: list[int], options: SamplingOptions) -> None:
        """Counts the tokens of the sequence that starts drawing in a slot."""
        padded = np.zeros(self._limits.max_length, np.int32)
        padded[: len(tokens)] = tokens
        sizes = np.int32(len(prompt)), np.int32(len(tokens))
        row = sampling.penalty_row(options)
        self.penalties = _start_slot(self._sharding)(self.penalties, np.int32(slot), row, padded, *sizes)

    def _start(self, sequence: Sequence) -> None:
        slot, options = self._slot_of(sequence), sequence.options
        row = sampling.slot_row(options, sequence.seed)
        for values, value in zip(jax.tree.leaves(self._on_host), jax.tree.leaves(row), strict=True):
            values[slot] = value
        variant = variant_of(options)
        sequence.variant = VARIANTS.index(variant)
        # For all options once penalties exist: the slot's previous sequence may have left some.
        if self.penalties is None and variant == "full":
            self.make_penalties()
        if self.penalties is not None:
            self.start_penalties(slot, sequence.prompt, sequence.tokens, options)

    def _slot_of(self, sequence: Sequence) -> int:
        """Returns the number of the sequence's slot among the slots of all devices."""
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
    # Compiled, so that each array has its own memory: the same zeros twice could not be donated.
    return jax.jit(sampling.init_penalties, static_argnums=(0, 1), out_shardings=sharding)
