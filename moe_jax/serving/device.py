"""The engine's device: weights, state, and the compiled programs that run a planned step and draw its tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from moe_jax.models.decoder import Decoder
from moe_jax.serving.drafts import check_program, draft_program
from moe_jax.serving.drawing import VARIANTS, Variant, draw_program, variant_of
from moe_jax.serving.limits import EngineLimits
from moe_jax.serving.pages import pages_of
from moe_jax.serving.penalties import Penalties, init_penalties, penalty_row, start_slot
from moe_jax.serving.programs import module_programs, step_programs
from moe_jax.serving.prompts import PIECE_TOKENS, PromptScores, score_piece, score_prompts
from moe_jax.serving.request import SamplingOptions
from moe_jax.serving.sampling import Sampled, SlotOptions, init_slots, slot_row
from moe_jax.serving.schedule import StepPlan
from moe_jax.serving.sequence import Sequence
from moe_jax.serving.step import StepOutput, initial_state
from moe_jax.serving.upload import StepRows, StepShape, empty_rows, packed
from moe_jax.serving.weights import Weights, frame_of, head_of, take_apart

SMALLEST_CHUNKS = 128
"""Tokens of the smallest program with chunks; each further one has twice as many."""


class Launched(NamedTuple):
    """A step that the device runs, or has run."""

    plan: StepPlan
    rows: list[int]
    """The row of each of `plan.samples` in the arrays of `sampled`."""
    sampled: Sampled
    scores: PromptScores
    second: Sampled | None = None
    """The tokens behind accepted drafts of decoding rows; None without drafts."""
    accepted: Array | None = None
    """True for each decoding row whose draft was accepted."""


class Device:
    """Weights and state of one engine on one device.

    A program is compiled for each of the step shapes. Without chunks, the numbers of decoding rows double. With chunks, the
    numbers of their tokens double; decoding rows are then as many as there may be, or none.
    """

    def __init__(self, model: Decoder, limits: EngineLimits, *, keep_experts: bool, take_over: bool = False, drafts: int = 0):
        self.limits = limits
        self._drafts = drafts
        self.served, weights = take_apart(model, drafts=drafts, take_over=take_over)
        # Flat: to flatten the states of all layers again in each step takes the host longer than the step takes the device.
        leaves, self._weights_tree = jax.tree.flatten(weights)
        # JAX compiles again for arrays that are bound to a device where others were not: all are, from the beginning.
        (self._device,) = leaves[0].devices()
        self._weights = jax.device_put(leaves, self._device)
        self._head = self._head_of(weights)
        max_pages = pages_of(limits.max_length)
        sizes = limits.num_pages, limits.max_sequences, max_pages
        state = initial_state(self.served, *sizes, keep_experts=keep_experts, drafts=drafts)
        self.state = jax.device_put(state, self._device)
        self._decode_shapes = [StepShape(n, 0, 0, max_pages, drafts) for n in _doubling(limits.max_sequences)]
        self._chunk_shapes = [
            StepShape(decodes, tokens, limits.max_chunks_per_step, max_pages, drafts)
            for tokens in _doubling(limits.max_tokens_per_step, SMALLEST_CHUNKS)
            for decodes in (0, limits.max_sequences)
        ]
        shapes = self._decode_shapes + self._chunk_shapes
        arrays = self.served, self._weights_tree, self._weights, self.state
        self._programs = step_programs(*arrays, shapes)
        self._modules = module_programs(*arrays, shapes) if drafts else {}
        self._options = jax.tree.map(np.array, init_slots(limits.max_sequences))
        self._options_on_device = self._copy_of_options()
        self._variants = [0] * limits.max_sequences
        """For each slot the number in VARIANTS of the cheapest one that serves it."""
        self._penalties: Penalties | None = None

    def warm_up(self) -> None:
        """Runs every program once, on rows that are not used: the first run compiles it, or is the slow one."""
        self._penalties = self._no_penalties()
        for shape, program in self._programs.items():
            for variant in [*VARIANTS, *VARIANTS[:1] * program.num_copies]:
                step = self._launch(shape, empty_rows(shape), variant)
            if shape.chunks:
                score_piece(step.hidden, self._head, *np.zeros((2, PIECE_TOKENS), np.int32))
        self._start_penalties(0, [0], [0], SamplingOptions())
        # They take much memory, and most engines are never asked for any.
        self._penalties = None
        if self.state.experts is not None:
            self.experts_of([], 0)
        jax.block_until_ready(self.state)

    def launch(self, plan: StepPlan) -> Launched:
        """Starts a step; the copies of its tokens to the host start with it."""
        if starting := [chunk.sequence for chunk in plan.chunks if chunk.samples]:
            for sequence in starting:
                self._start_slot(sequence)
            self._options_on_device = self._copy_of_options()
        shape = self._shape_for(plan)
        rows = _filled(plan, empty_rows(shape))
        step = self._launch(shape, rows, self._variant_for(plan))
        for array in jax.tree.leaves((step.sampled, step.second, step.accepted)):
            array.copy_to_host_async()
        of_chunks = [shape.decodes + i for i, chunk in enumerate(plan.chunks) if chunk.samples]
        scores = score_prompts(plan, shape.decodes * (1 + self._drafts), step.hidden, self._head)
        rows_of_samples = [*range(len(plan.decodes)), *of_chunks]
        return Launched(plan, rows_of_samples, step.sampled, scores, step.second, step.accepted)

    def experts_of(self, pages: list[int], num_tokens: int) -> np.ndarray:
        """Returns the experts of a sequence's tokens, [tokens, moe_layers, k], from its pages."""
        padded = np.zeros(self.state.page_table.shape[1], np.int32)
        padded[: len(pages)] = pages
        found = np.asarray(_taken(self.state.experts, padded))
        return found.reshape(-1, *found.shape[2:])[:num_tokens]

    def replace_weights(self, model: Decoder) -> None:
        """Computes with the weights of another model of the same architecture from the next step on.

        Raises:
          ValueError: the model has another architecture or dtype.
        """
        served, weights = take_apart(model, drafts=self._drafts)
        leaves, tree = jax.tree.flatten(weights)
        shapes, own = ([(leaf.shape, leaf.dtype) for leaf in some] for some in (leaves, self._weights))
        if (served, tree, shapes) != (self.served, self._weights_tree, own):
            raise ValueError("the new weights must be of a model with the same config and dtype as the engine's")
        self._weights, self._head = jax.device_put(leaves, self._device), self._head_of(weights)

    def _launch(self, shape: StepShape, rows: StepRows, variant: Variant) -> "_Step":
        """Starts a step; returns what it draws, and the hidden states of its tokens."""
        upload = packed(rows)
        self.state, output = self._programs[shape](self._weights, self.state, upload)
        penalties = self._penalties if variant == "full" else None
        arguments = output, self._options_on_device, self.state.last_token, penalties
        if self.state.drafting is None:
            sampled, last_token, new_penalties = draw_program(variant)(*arguments)
            step = _Step(output.hidden, sampled)
        else:
            first, second, accepted, last_token, new_penalties = check_program(variant)(*arguments)
            step = _Step(output.hidden, first, second, accepted)
            checked = first.tokens, second.tokens, accepted
            inputs = self.state.drafting, _without_logits(output), checked, upload
            drafting, of_module = self._modules[shape](self._weights, *inputs)
            draft = draft_program(variant)(of_module, self._options_on_device, drafting.draft, new_penalties)
            self.state = self.state._replace(drafting=drafting._replace(draft=draft))
        self.state = self.state._replace(last_token=last_token)
        if variant == "full":
            self._penalties = new_penalties
        return step

    def _head_of(self, weights: Weights) -> Array:
        return jax.device_put(head_of(frame_of(self.served, weights)), self._device)

    def _copy_of_options(self) -> SlotOptions:
        # A copy: the array on the device may share the host's memory, which the next sequence changes.
        return jax.device_put(jax.tree.map(np.copy, self._options), self._device)

    def _no_penalties(self) -> Penalties:
        return jax.device_put(_init_penalties(self.limits.max_sequences, self.served.config.vocab_size), self._device)

    def _shape_for(self, plan: StepPlan) -> StepShape:
        """Returns the smallest shape that has room for the plan."""
        if not plan.chunks:
            return next(shape for shape in self._decode_shapes if shape.decodes >= len(plan.decodes))
        tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
        return next(
            shape for shape in self._chunk_shapes if shape.chunk_tokens >= tokens and shape.decodes >= len(plan.decodes)
        )

    def _start_slot(self, sequence: Sequence) -> None:
        """Gives a slot the options of the sequence that begins to draw there."""
        slot, options = sequence.slot, sequence.options
        assert slot is not None
        for values, value in zip(self._options, slot_row(options, sequence.seed), strict=True):
            values[slot] = value
        self._variants[slot] = VARIANTS.index(variant_of(options))
        # All slots once penalties exist: the slot's last sequence may have left some.
        if self._penalties is None and variant_of(options) == "full":
            self._penalties = self._no_penalties()
        if self._penalties is not None:
            self._start_penalties(slot, sequence.prompt, sequence.tokens, options)

    def _start_penalties(self, slot: int, prompt: list[int], tokens: list[int], options: SamplingOptions) -> None:
        padded = np.zeros(self.limits.max_length, np.int32)
        padded[: len(tokens)] = tokens
        sizes = np.int32(len(prompt)), np.int32(len(tokens))
        self._penalties = _start_slot(self._penalties, np.int32(slot), penalty_row(options), padded, *sizes)

    def _variant_for(self, plan: StepPlan) -> Variant:
        """Returns the cheapest variant that serves all rows that draw."""
        slots = (sequence.slot for sequence in plan.samples if sequence.slot is not None)
        return VARIANTS[max((self._variants[slot] for slot in slots), default=0)]


class _Step(NamedTuple):
    """The results of a step that runs: hidden states of its tokens, and all that it draws."""

    hidden: Array
    sampled: Sampled
    second: Sampled | None = None
    accepted: Array | None = None


_start_slot = jax.jit(start_slot, donate_argnums=0)
# Compiled, so that each array has memory of its own: the same zeros twice could not be donated.
_init_penalties = jax.jit(init_penalties, static_argnums=(0, 1))


def _without_logits(output: StepOutput) -> StepOutput:
    # The module does not read them, and a program that is given an array keeps it in memory.
    nothing: Any = None
    return output._replace(logits=nothing)


@jax.jit
def _taken(pages: UInt[Array, "pages ..."], numbers: Int[Array, "_"]) -> UInt[Array, "_ ..."]:
    return jnp.take(pages, numbers, axis=0)


def _filled(plan: StepPlan, rows: StepRows) -> StepRows:
    """Writes the plan into empty rows, and returns them."""
    if plan.decodes:
        n = len(plan.decodes)
        columns = np.array([decode[1:] for decode in plan.decodes], np.int32).T
        rows.decode_slots[:n], rows.decode_positions[:n], rows.decode_pages[:n] = columns
    first = 0
    for i, chunk in enumerate(plan.chunks):
        count, pages = len(chunk.tokens), chunk.sequence.pages
        rows.chunk_slots[i], rows.chunk_starts[i], rows.chunk_counts[i] = chunk.sequence.slot, chunk.start, count
        rows.chunk_samples[i] = chunk.samples
        rows.chunk_next[i] = 0 if chunk.samples else chunk.sequence.tokens[chunk.start + count]
        rows.chunk_tokens[first : first + count] = chunk.tokens
        rows.chunk_tables[i, : len(pages)] = pages
        first += count
    return rows


def _doubling(largest: int, smallest: int = 1) -> list[int]:
    """Returns `smallest` and its doubles below `largest`, and `largest`."""
    return [*(smallest << i for i in range(largest.bit_length()) if smallest << i < largest), largest]
