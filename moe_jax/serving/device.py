"""The engine's device: weights, state, and the compiled programs that run a planned step and draw its tokens."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled, Lowered
from jaxtyping import Array, Int, UInt

from moe_jax.models.decoder import Decoder
from moe_jax.serving.drawing import VARIANTS, Variant, draw_program, variant_of
from moe_jax.serving.limits import EngineLimits
from moe_jax.serving.pages import pages_of
from moe_jax.serving.penalties import Penalties, init_penalties, penalty_row, start_slot
from moe_jax.serving.prompts import PIECE_TOKENS, PromptScores, score_piece, score_prompts
from moe_jax.serving.sampling import Sampled, init_slots, slot_row
from moe_jax.serving.schedule import StepPlan
from moe_jax.serving.sequence import Sequence
from moe_jax.serving.step import initial_state, step_program
from moe_jax.serving.upload import StepRows, StepShape, empty_rows, packed
from moe_jax.serving.weights import frame_of, head_of, take_apart

SMALLEST_CHUNKS = 128
"""Tokens of the smallest program with chunks; each further one has twice as many."""


class Launched(NamedTuple):
    """A step that the device runs, or has run."""

    plan: StepPlan
    rows: list[int]
    """The row of each of `plan.samples` in the arrays of `sampled`."""
    sampled: Sampled
    scores: PromptScores


class Device:
    """Weights and state of one engine on one device.

    A program is compiled for each of the step shapes. Without chunks, the numbers of decoding rows double. With chunks, the
    numbers of their tokens double; decoding rows are then as many as there may be, or none.
    """

    def __init__(self, model: Decoder, limits: EngineLimits, *, keep_experts: bool, take_over: bool = False):
        self.limits = limits
        self.served, weights = take_apart(model, take_over=take_over)
        # Flat: to flatten the states of all layers again in each step takes the host longer than the step takes the device.
        self._weights, self._weights_tree = jax.tree.flatten(weights)
        self._head = head_of(frame_of(self.served, weights))
        max_pages = pages_of(limits.max_length)
        self.state = initial_state(self.served, limits.num_pages, limits.max_sequences, max_pages, keep_experts=keep_experts)
        self._decode_shapes = [StepShape(n, 0, 0, max_pages) for n in _doubling(limits.max_sequences)]
        chunk_tokens = _chunk_sizes(limits.max_tokens_per_step)
        self._chunk_shapes = [
            StepShape(decodes, tokens, limits.max_chunks_per_step, max_pages)
            for tokens in chunk_tokens
            for decodes in (0, limits.max_sequences)
        ]
        self._programs = self._compiled(self._decode_shapes + self._chunk_shapes)
        self._options = jax.tree.map(np.array, init_slots(limits.max_sequences))
        self._options_on_device = jax.device_put(self._options)
        self._penalties: Penalties | None = None

    def warm_up(self) -> None:
        """Runs every program once, on rows that are not used: the first run is the slow one."""
        for shape in self._programs:
            for variant in VARIANTS:
                _, hidden = self._launch(shape, empty_rows(shape), variant)
            if shape.chunks:
                score_piece(hidden, self._head, *np.zeros((2, PIECE_TOKENS), np.int32))
        # They take much memory, and most engines are never asked for any.
        self._penalties = None
        jax.block_until_ready(self.state)

    def launch(self, plan: StepPlan) -> Launched:
        """Starts a step; the copies of its tokens to the host start with it."""
        for chunk in plan.chunks:
            if chunk.samples:
                self._start_slot(chunk.sequence)
        shape = self._shape_for(plan)
        rows = _filled(plan, empty_rows(shape))
        sampled, hidden = self._launch(shape, rows, variant_of(sequence.options for sequence in plan.samples))
        for array in sampled:
            array.copy_to_host_async()
        of_chunks = [shape.decodes + i for i, chunk in enumerate(plan.chunks) if chunk.samples]
        scores = score_prompts(plan, shape.decodes, hidden, self._head)
        return Launched(plan, [*range(len(plan.decodes)), *of_chunks], sampled, scores)

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
        served, weights = take_apart(model)
        leaves, tree = jax.tree.flatten(weights)
        shapes, own = ([(leaf.shape, leaf.dtype) for leaf in some] for some in (leaves, self._weights))
        if (served, tree, shapes) != (self.served, self._weights_tree, own):
            raise ValueError("the new weights must be of a model with the same config and dtype as the engine's")
        self._weights, self._head = leaves, head_of(frame_of(served, weights))

    def _compiled(self, shapes: list[StepShape]) -> dict[StepShape, Compiled]:
        """Compiles the programs of all shapes, many at a time."""
        lowered = [
            step_program(self.served, self._weights_tree, shape).lower(self._weights, self.state, packed(empty_rows(shape)))
            for shape in shapes
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            return dict(zip(shapes, pool.map(Lowered.compile, lowered), strict=True))

    def _launch(self, shape: StepShape, rows: StepRows, variant: Variant) -> tuple[Sampled, Array]:
        """Starts a step; returns what it draws, and the hidden states of its tokens."""
        self.state, output = self._programs[shape](self._weights, self.state, packed(rows))
        penalties = None
        if variant == "full":
            penalties = self._penalties or self._no_penalties()
        drawn = draw_program(variant)(output, self._options_on_device, self.state.last_token, penalties)
        self.state = self.state._replace(last_token=drawn.last_token)
        if variant == "full":
            self._penalties = drawn.penalties
        return drawn.sampled, output.hidden

    def _no_penalties(self) -> Penalties:
        return _init_penalties(self.limits.max_sequences, self.served.config.vocab_size)

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
        # A copy: the array on the device may share the host's memory, which the next sequence changes.
        self._options_on_device = jax.device_put(jax.tree.map(np.copy, self._options))
        # All slots once penalties exist: the slot's last sequence may have left some.
        if self._penalties is None and variant_of([options]) == "full":
            self._penalties = self._no_penalties()
        if self._penalties is not None:
            tokens = np.zeros(self.limits.max_length, np.int32)
            tokens[: len(sequence.tokens)] = sequence.tokens
            sizes = np.int32(len(sequence.prompt)), np.int32(len(sequence.tokens))
            self._penalties = _start_slot(self._penalties, np.int32(slot), penalty_row(options), tokens, *sizes)


_start_slot = jax.jit(start_slot, donate_argnums=0)
# Compiled, so that each array has memory of its own: the same zeros twice could not be donated.
_init_penalties = jax.jit(init_penalties, static_argnums=(0, 1))


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
        rows.chunk_tokens[first : first + count] = chunk.tokens
        rows.chunk_tables[i, : len(pages)] = pages
        first += count
    return rows


def _doubling(largest: int) -> list[int]:
    """Returns 1, 2, 4 and so on, and `largest` as the last one."""
    return [*(1 << i for i in range(largest.bit_length()) if 1 << i < largest), largest]


def _chunk_sizes(largest: int) -> list[int]:
    """Returns SMALLEST_CHUNKS and its doubles below `largest`, and `largest`."""
    return [*(SMALLEST_CHUNKS << i for i in range(largest.bit_length()) if SMALLEST_CHUNKS << i < largest), largest]
