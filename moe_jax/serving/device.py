"""The engine's device: weights, state, and the compiled programs that run a planned step and draw its tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from moe_jax.models.decoder import Decoder
from moe_jax.serving.drafts import check_program, draft_program
from moe_jax.serving.drawing import VARIANTS, Variant, draw_program
from moe_jax.serving.limits import EngineLimits
from moe_jax.serving.pages import pages_of
from moe_jax.serving.programs import module_programs, step_programs
from moe_jax.serving.prompts import PIECE_TOKENS, PromptScores, score_piece, score_prompts
from moe_jax.serving.request import SamplingOptions
from moe_jax.serving.sampling import Sampled
from moe_jax.serving.schedule import StepPlan
from moe_jax.serving.slots import DrawingSlots
from moe_jax.serving.step import StepOutput, initial_state
from moe_jax.serving.upload import StepRows, StepShape, empty_rows, filled, packed
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

    def __init__(
        self,
        model: Decoder,
        limits: EngineLimits,
        *,
        keep_experts: bool,
        take_over: bool = False,
        drafts: int = 0,
        strict: bool = False,
    ):
        self.limits = limits
        self._drafts = drafts
        served, weights = take_apart(model, drafts=drafts, take_over=take_over)
        self.served = served._replace(strict=strict)
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
        self.slots = DrawingSlots(limits, self.served.config.vocab_size, self._device)

    def warm_up(self) -> None:
        """Runs every program once, on rows that are not used: the first run compiles it, or is the slow one."""
        self.slots.make_penalties()
        for shape, program in self._programs.items():
            for variant in [*VARIANTS, *VARIANTS[:1] * program.num_copies]:
                step = self._launch(shape, empty_rows(shape), variant)
            if shape.chunks:
                score_piece(step.hidden, self._head, *np.zeros((2, PIECE_TOKENS), np.int32), strict=self.served.strict)
        self.slots.start_penalties(0, [0], [0], SamplingOptions())
        # Most engines are never asked for any.
        self.slots.penalties = None
        if self.state.experts is not None:
            self.experts_of([], 0)
        jax.block_until_ready(self.state)

    def launch(self, plan: StepPlan) -> Launched:
        """Starts a step; the copies of its tokens to the host start with it."""
        self.slots.start([chunk.sequence for chunk in plan.chunks if chunk.samples])
        shape = self._shape_for(plan)
        rows = filled(plan, empty_rows(shape))
        step = self._launch(shape, rows, self.slots.variant_for(plan))
        for array in jax.tree.leaves((step.sampled, step.second, step.accepted)):
            array.copy_to_host_async()
        of_chunks = [shape.decodes + i for i, chunk in enumerate(plan.chunks) if chunk.samples]
        first = shape.decodes * (1 + self._drafts)
        scores = score_prompts(plan, first, step.hidden, self._head, strict=self.served.strict)
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
        served = served._replace(strict=self.served.strict)
        leaves, tree = jax.tree.flatten(weights)
        shapes, own = ([(leaf.shape, leaf.dtype) for leaf in some] for some in (leaves, self._weights))
        if (served, tree, shapes) != (self.served, self._weights_tree, own):
            raise ValueError("the new weights must be of a model with the same config and dtype as the engine's")
        self._weights, self._head = jax.device_put(leaves, self._device), self._head_of(weights)

    def _launch(self, shape: StepShape, rows: StepRows, variant: Variant) -> "_Step":
        """Starts a step; returns what it draws, and the hidden states of its tokens."""
        upload = packed(rows)
        self.state, output = self._programs[shape](self._weights, self.state, upload)
        penalties = self.slots.penalties if variant == "full" else None
        arguments = output, self.slots.options, self.state.last_token, penalties
        if self.state.drafting is None:
            sampled, last_token, new_penalties = draw_program(variant, strict=self.served.strict)(*arguments)
            step = _Step(output.hidden, sampled)
        else:
            first, second, accepted, last_token, new_penalties = check_program(variant)(*arguments)
            step = _Step(output.hidden, first, second, accepted)
            checked = first.tokens, second.tokens, accepted
            inputs = self.state.drafting, _without_logits(output), checked, upload
            drafting, of_module = self._modules[shape](self._weights, *inputs)
            draft = draft_program(variant)(of_module, self.slots.options, drafting.draft, new_penalties)
            self.state = self.state._replace(drafting=drafting._replace(draft=draft))
        self.state = self.state._replace(last_token=last_token)
        if variant == "full":
            self.slots.penalties = new_penalties
        return step

    def _head_of(self, weights: Weights) -> Array:
        return jax.device_put(head_of(frame_of(self.served, weights)), self._device)

    def _shape_for(self, plan: StepPlan) -> StepShape:
        """Returns the smallest shape that has room for the plan."""
        if not plan.chunks:
            return next(shape for shape in self._decode_shapes if shape.decodes >= len(plan.decodes))
        tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
        return next(
            shape for shape in self._chunk_shapes if shape.chunk_tokens >= tokens and shape.decodes >= len(plan.decodes)
        )


class _Step(NamedTuple):
    """The results of a step that runs: hidden states of its tokens, and all that it draws."""

    hidden: Array
    sampled: Sampled
    second: Sampled | None = None
    accepted: Array | None = None


def _without_logits(output: StepOutput) -> StepOutput:
    # The module does not read them, and a program that is given an array keeps it in memory.
    nothing: Any = None
    return output._replace(logits=nothing)


@jax.jit
def _taken(pages: UInt[Array, "pages ..."], numbers: Int[Array, "_"]) -> UInt[Array, "_ ..."]:
    return jnp.take(pages, numbers, axis=0)


def _doubling(largest: int, smallest: int = 1) -> list[int]:
    """Returns `smallest` and its doubles below `largest`, and `largest`."""
    return [*(smallest << i for i in range(largest.bit_length()) if smallest << i < largest), largest]
