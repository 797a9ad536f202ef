"""The engine's devices: weights, state, and the compiled programs that run a planned step and draw its tokens."""

import functools
import logging
from collections.abc import Callable
from operator import ge
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled
from jaxtyping import Array, Int, UInt

from moe_jax.adapters.load import Stack
from moe_jax.generation.speculative import NO_DRAFTS, DraftSource
from moe_jax.models.decoder import Decoder
from moe_jax.serving.adapters import empty_factors, factors_of, sites_of, written
from moe_jax.serving.drafts import begin_lookups, draft_program, look_up
from moe_jax.serving.drawing import DrawingSlots, draw_program
from moe_jax.serving.pages import pages_of
from moe_jax.serving.placement import Placement
from moe_jax.serving.programs import OnDemand, StepProgram, leave_gaps, module_programs, step_programs
from moe_jax.serving.prompts import PIECE_TOKENS, PromptScores, read_scores, score_piece, score_prompts
from moe_jax.serving.request import DrawnToken, EngineLimits, SamplingOptions
from moe_jax.serving.sampling import VARIANTS, Sampled, SlotOptions, Variant
from moe_jax.serving.schedule import Sequence, StepPlan
from moe_jax.serving.step import Drafting, StepBatch, StepOutput, StepShape, empty_rows, filled, initial_state, packed
from moe_jax.serving.weights import ServedModel, Weights, first_difference, frame_of, head_of, take_apart

_logger = logging.getLogger(__name__)

SMALLEST_CHUNKS = 128
"""Tokens of the smallest program with chunks; each larger program has twice as many."""


class Launched(NamedTuple):
    """A step that has been started on the device."""

    plans: list[StepPlan]
    """The plan of each device."""
    rows: list[int]
    """The row of each of `samples` in the arrays of `first`."""
    scores: PromptScores | None
    """Scores of prompts; None where the step has no chunk of a prompt."""
    first: Sampled
    further: tuple[Sampled, ...]
    checked: Array | None
    """Results of `draw_program`."""

    @property
    def samples(self) -> list[Sequence]:
        """The sequences that the step draws tokens for, in device order."""
        return [sequence for plan in self.plans for sequence in plan.samples]

    def read(self) -> list[list[DrawnToken]]:
        """Waits for the step; returns for each of `samples` its token, and the tokens after accepted drafts."""
        found = [[token] for token in self._drawn(self.first, len(self.rows))]
        for number, sampled in enumerate(self.further):
            drawn = self._drawn(sampled, len(self.plans[0].decodes))
            for tokens, token, accepted in zip(found, drawn, np.asarray(self.checked)[1].tolist(), strict=False):
                tokens += [token] if accepted > number else []
        return found

    def num_drafted(self) -> list[int]:
        """Returns the number of drafts that the step checked for each decoding row; drafts are on one device alone."""
        num_decodes = len(self.plans[0].decodes)
        return [0] * num_decodes if self.checked is None else np.asarray(self.checked)[0, :num_decodes].tolist()

    def prompt_scores(self) -> list[tuple[Sequence, list[dict[int, float]]]]:
        """Returns the scores that the step adds to prompts (`read_scores`)."""
        return [] if self.scores is None else read_scores(self.scores)

    def _drawn(self, sampled: Sampled, num: int) -> list[DrawnToken]:
        tokens, logprobs, top_tokens, top_logprobs = (np.asarray(array)[self.rows[:num]] for array in sampled)
        tops: list[dict[int, float] | None] = [None] * num
        for i, sequence in enumerate(self.samples[:num]):
            if wanted := sequence.options.logprobs:
                tops[i] = dict(zip(top_tokens[i, :wanted].tolist(), top_logprobs[i, :wanted].tolist(), strict=True))
        return list(zip(tokens.tolist(), logprobs.tolist(), tops, strict=True))


class Device:
    """Weights and state of one engine, on its device or its devices.

    One program is compiled per step shape. Without chunks, the number of decoding rows is a power of two. With chunks, the
    number of their tokens doubles from shape to shape, with either all decoding rows or none. Several devices run the same
    program together, each with its own rows, because tokens travel between them to the experts.

    Args:
      parts: the model's, as `weights.take_apart` returns them. Its weights may be on another device.
      owns_weights: True if none of the weights is the model's own array, because all are copied from another device.
    """

    def __init__(
        self,
        parts: tuple[ServedModel, Weights],
        placement: Placement,
        limits: EngineLimits,
        *,
        keep_experts: bool,
        drafts: DraftSource = NO_DRAFTS,
        lazy: bool = False,
        owns_weights: bool = False,
    ):
        self.limits = limits
        self.placement = placement
        self._owns_weights = owns_weights
        self._drafts, self.is_tempered = drafts, False
        modules = self._num_modules = int(drafts.name == "module")
        self.served, weights = parts[0]._replace(mesh=placement.mesh), parts[1]
        if self.served.unfused is not None and not owns_weights:
            _logger.info("steps run the model's modules, without the fused kernels: %s", self.served.unfused)
        # JAX recompiles if an argument was not committed to a device before and is now: all are committed from the start.
        weights = placement.place(weights)
        # Flat: flattening the states of all layers in each step would cost the host more time than the step itself.
        self._weights, self._weights_tree = jax.tree.flatten(weights)
        self._shared = self._shared_of(weights)
        self._head = self._head_of(weights)
        self._sites = [sites_of(layer) for layer in weights.layers] if limits.max_adapters else []
        sizes_of_table = limits.max_adapters, limits.max_adapter_rank, self.served.dtype
        table = placement.place(tuple(empty_factors(sites, *sizes_of_table) for sites in self._sites))
        self._table, tree = jax.tree.leaves(table), jax.tree.structure(weights._replace(adapters=table))
        # The last of several drafts may be past the longest sequence: attention reads its place in the table too.
        max_pages = pages_of(limits.max_length + max(drafts.num - 1, 0))
        sizes = (*(len(self.placement.devices) * size for size in (limits.num_pages, limits.max_sequences)), max_pages)
        options: dict[str, Any] = dict(keep_experts=keep_experts, drafts=drafts, in_fp8=limits.kv_dtype == "fp8")
        make_state = functools.partial(initial_state, self.served, *sizes, **options)
        self._make_state = jax.jit(make_state, out_shardings=self.placement.rows)
        self.state = self._make_state()
        # The module computes every token. Without it a step whose rows have no drafts runs as in an engine without drafts.
        counts = [drafts.num] if modules else sorted({0, drafts.num})
        # A step without an adapter's row costs as much as in an engine without adapters.
        adapted = [False, True] if limits.max_adapters else [False]
        self._decode_shapes = [
            StepShape(n, 0, 0, max_pages, k, has) for n in _doubling(limits.max_sequences) for k in counts for has in adapted
        ]
        self._chunk_shapes = [
            StepShape(decodes, tokens, limits.max_chunks_per_step, max_pages, count, has)
            for tokens in _doubling(limits.max_tokens_per_step, SMALLEST_CHUNKS)
            for decodes in (0, limits.max_sequences)
            for count in (counts if decodes else counts[:1])
            for has in adapted
        ]
        shapes = self._decode_shapes + self._chunk_shapes
        num_programs = (1 + modules) * len(shapes)
        arrays = self.served, tree, [*self._weights, *self._table], self.state
        self._programs: dict[StepShape, StepProgram]
        self._modules: dict[StepShape, Compiled]
        if lazy:
            _logger.info("each of %d programs is compiled when a request first needs it", num_programs)
            self._programs, self._modules = OnDemand(step_programs, *arrays), OnDemand(module_programs, *arrays)
        else:
            _logger.info("compiling %d programs before the first request, some minutes for a large model", num_programs)
            self._programs = step_programs(*arrays, shapes)
            self._modules = module_programs(*arrays, shapes) if modules else {}
        self.slots = DrawingSlots(limits, self.served.config.vocab_size, self.placement)
        self._gaps: list[Array] = []
        """Arrays that keep the gaps between them free (`programs.leave_gaps`)."""

    def warm_up(self) -> None:
        """Runs every compiled program once on unused rows, because the first run is slow. Then leaves gaps.

        Also compiles the drawing programs, and logs a line at the end. A lazy engine has nothing to run yet.
        """
        if self._programs:
            self._run_all()
        jax.block_until_ready(self.state)
        self._leave_gaps()

    @property
    def weights_are_deleted(self) -> bool:
        """True once arrays that the engine shares with its model were deleted, for example by a program that donates them."""
        # Checked before each step, so the engine's own copies of layers, hundreds of arrays, are skipped.
        return any(array.is_deleted() for array in self._shared)

    @property
    def state_is_deleted(self) -> bool:
        """True once a program failed after the state was donated to it."""
        return any(array.is_deleted() for array in jax.tree.leaves(self.state))

    def sleep(self) -> None:
        """Frees pages, penalties and the engine's copies of weights, until `replace_weights`."""
        self._delete_arrays()
        # The shapes of the next weights are compared with them. Shared arrays would stay as long as a reference to them.
        self._weights = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in self._weights]
        self._shared, self._gaps, self.slots.penalties = [], [], None

    def release(self) -> None:
        """Frees pages and the engine's copies of weights, and drops everything else; nothing can be computed afterwards.

        An exception's frames may still reference them, so lists are emptied and the engine's own arrays deleted.
        """
        self._delete_arrays()
        for array in jax.tree.leaves(self.slots.options):
            array.delete()
        for array in self._table:
            array.delete()
        for held in (self._weights, self._table, self._shared, self._gaps, self._programs, self._modules):
            held.clear()

    def _run_all(self) -> None:
        began = perf_counter()
        self.slots.make_penalties()
        for shape in self._programs:
            for variant in VARIANTS:
                upload = packed([empty_rows(shape)] * len(self.placement.devices))
                output = self._compute(shape, upload)
                self._draw(shape, upload, output, variant, self.slots.options)
            if shape.chunks:
                nothing = np.zeros((2, PIECE_TOKENS), np.int32)
                score_piece(output.hidden, self._head, *nothing, strict=self.served.strict, mesh=self.served.mesh)
        self.slots.start_penalties(0, [0], [0], SamplingOptions())
        self._begin_drafts(0, [0])
        # Most engines never need penalties.
        self.slots.penalties = None
        if self.state.experts is not None:
            self.experts_of(0, [])
        _logger.info("ran each program once, %.1f s", perf_counter() - began)

    def launch(self, plans: list[StepPlan]) -> Callable[[], Launched]:
        """Starts a step with a plan for each device; the result draws its tokens, and starts to copy them to the host.

        A step without constraints draws at once. The result must be called after the step before was read, and before the next
        one starts.
        """
        if begun := [chunk.sequence for plan in plans for chunk in plan.chunks if chunk.samples]:
            self.slots.start(begun)
        for sequence in begun:
            assert sequence.slot is not None
            self._begin_drafts(sequence.slot, sequence.tokens)
        shape = self._shape_for(plans)
        samples = [sequence for plan in plans for sequence in plan.samples]
        variant = VARIANTS[max((sequence.variant for sequence in samples), default=0)]
        upload = packed([filled(plan, empty_rows(shape)) for plan in plans])
        output = self._compute(shape, upload)
        rows = _rows_of_samples(shape, plans)

        def draw() -> Launched:
            is_free = all(sequence.constraint is None for sequence in samples)
            options = self.slots.options if is_free else self.slots.constrained(samples)
            new, scores = self._draw(shape, upload, output, variant, options), None
            for array in jax.tree.leaves(new):
                array.copy_to_host_async()
            if shape.chunks:
                in_chunks = shape.decodes * (1 + shape.drafts)
                firsts = [number * (in_chunks + shape.chunk_tokens) + in_chunks for number in range(len(plans))]
                served = self.served
                scores = score_prompts(plans, firsts, output.hidden, self._head, strict=served.strict, mesh=served.mesh)
            return Launched(plans, rows, scores, *new)

        if any(sequence.constraint is not None for sequence in samples):
            return draw
        launched = draw()
        return lambda: launched

    def experts_of(self, device: int, pages: list[int]) -> UInt[Array, "pages page_size moe_layers k"]:
        """Copies the experts of a sequence's tokens out of its pages, and begins to copy them to the host."""
        padded = np.zeros(self.state.page_table.shape[1], np.int32)
        padded[: len(pages)] = pages
        padded += device * self.limits.num_pages
        found = _taken(self.state.experts, padded)
        found.copy_to_host_async()
        return found

    def weights_of(self, model: Decoder) -> Weights:
        """Returns the weights of another model of the same architecture, for `replace_weights`.

        Raises:
          ValueError: the model has another architecture or dtype, another form of weights, or an adapter of another shape.
        """
        served, weights = take_apart(model, drafts=self._num_modules, mesh=self.served.mesh, strict=self.served.strict)
        leaves, tree = jax.tree.flatten(weights)
        shapes, own = ([(leaf.shape, leaf.dtype) for leaf in some] for some in (leaves, self._weights))
        if (served, tree, shapes) != (self.served, self._weights_tree, own):
            own_weights = jax.tree.unflatten(self._weights_tree, self._weights)
            difference = first_difference((served, weights), (self.served, own_weights))
            raise ValueError(
                "the new weights must be of a model with the same config and dtype as the engine's, in the same form, and with "
                f"an adapter of the same targets and ranks if that has one: {difference}"
            )
        return weights

    def replace_weights(self, weights: Weights) -> None:
        """Uses these weights from the next step on. Ends a `sleep`."""
        if self._owns_weights:
            # First: old and new weights together would leave no room for pages.
            for old in self._weights:
                if isinstance(old, Array):
                    old.delete()
        weights = self.placement.place(weights)
        if self.state_is_deleted:
            self.state = self._make_state()
        self._weights, self._shared = jax.tree.leaves(weights), self._shared_of(weights)
        self._head = self._head_of(weights)
        # Small weights may occupy the old gaps.
        self._leave_gaps()

    def write_adapter(self, number: int, stacks: list[Stack]) -> None:
        """Puts an adapter's factors at a place of the table, for steps from the next one on."""
        factors = factors_of(stacks, self.served.config, self._sites, self.limits.max_adapter_rank)
        own = [jnp.asarray(factor, self.served.dtype) for factor in jax.tree.leaves(factors)]
        self._table = written(self._table, np.int32(number), jax.device_put(own, self.placement.whole))

    def _compute(self, shape: StepShape, upload: np.ndarray) -> StepOutput:
        """Starts the layers of a step."""
        program, over = self._programs[shape]
        self.state, output = program([*self._weights, *self._table], self.state, upload, over)
        if over is not None:
            # All readers of these results must start before the next step of the shape.
            self._programs[shape] = program, output
        return output

    def _draw(self, shape: StepShape, upload: np.ndarray, output: StepOutput, variant: Variant, options: SlotOptions) -> tuple:
        """Starts to draw the tokens of a step; returns `first`, `further` and `checked` of `draw_program`."""
        penalties = self.slots.penalties if variant == "full" else None
        draw = draw_program(variant, strict=self.served.strict, tempered=self.is_tempered, mesh=self.served.mesh)
        last_token, penalties, first, further, checked = draw(_for_drawing(output), options, self.state.last_token, penalties)
        if self.state.drafting is not None:
            drafting = self._draft(shape, upload, output, (first, further, checked), (variant, penalties))
            self.state = self.state._replace(drafting=drafting)
        self.state = self.state._replace(last_token=last_token)
        if variant == "full":
            self.slots.penalties = penalties
        return first, further, checked

    def _begin_drafts(self, slot: int, tokens: list[int]) -> None:
        """Tells the device the tokens of the sequence that starts drawing in a slot, if drafts are looked up there."""
        drafting = self.state.drafting
        if drafting is not None and drafting.tokens is not None:
            padded = np.zeros(drafting.tokens.shape[1], np.int32)
            padded[: len(tokens)] = tokens
            self.state = self.state._replace(drafting=begin_lookups(drafting, np.int32(slot), padded))

    def _draft(self, shape: StepShape, upload: np.ndarray, output: StepOutput, drawn: tuple, of_draws: tuple) -> Drafting:
        """Starts the program that drafts the next tokens."""
        first, further, checked = drawn
        drafting, tokens = self.state.drafting, (first.tokens, *(sampled.tokens for sampled in further))
        if not self._num_modules:
            return look_up(drafting, output.slots, output.positions, tokens, checked)
        # The module does not read the logits, and passing an array to a program keeps it in memory.
        inputs = drafting, output._replace(logits=None), (*tokens, checked), upload  # type: ignore[arg-type]
        drafting, of_module = self._modules[shape](self._weights, *inputs)
        variant, penalties = of_draws
        return drafting._replace(draft=draft_program(variant)(of_module, self.slots.options, drafting.draft, penalties))

    def _delete_arrays(self) -> None:
        """Deletes the state, penalties, gaps and the engine's own copies of weights, if there are any."""
        shared = set(map(id, self._shared))
        own = [array for array in self._weights if id(array) not in shared]
        for array in jax.tree.leaves((self.state, self.slots.penalties, self._gaps, own)):
            if isinstance(array, Array):
                array.delete()
        vars(self).pop("_head", None)

    def _leave_gaps(self) -> None:
        """Leaves gaps on all devices, after all long-lived arrays."""
        self._gaps = [array for device in self.placement.devices for array in leave_gaps(device)]

    def _shared_of(self, weights: Weights) -> list[Array]:
        """Returns the arrays that may be the model's own."""
        return [] if self._owns_weights else jax.tree.leaves((weights.frame, weights.experts))

    def _head_of(self, weights: Weights) -> Array:
        return jax.device_put(head_of(frame_of(self.served, weights)), self.placement.whole)

    def _shape_for(self, plans: list[StepPlan]) -> StepShape:
        """Returns the smallest shape that has room for each plan."""
        decodes = max(len(plan.decodes) for plan in plans)
        tokens = max(sum(len(chunk.tokens) for chunk in plan.chunks) for plan in plans)
        drafts = max((decode.drafts for plan in plans for decode in plan.decodes), default=0)
        rows = (row for plan in plans for of_kind in (plan.decodes, plan.chunks) for row in of_kind)
        adapted = self.limits.max_adapters > 0 and any(row.sequence.adapter is not None for row in rows)
        wanted = decodes, tokens, drafts, adapted
        return next(
            shape
            for shape in (self._chunk_shapes if tokens else self._decode_shapes)
            if all(map(ge, (shape.decodes, shape.chunk_tokens, shape.drafts, shape.adapted), wanted))
        )


def _rows_of_samples(shape: StepShape, plans: list[StepPlan]) -> list[int]:
    """Returns the indices of rows that draw tokens, among the rows of all devices."""
    rows: list[int] = []
    for number, plan in enumerate(plans):
        first = number * (shape.decodes + shape.chunks)
        rows += range(first, first + len(plan.decodes))
        rows += [first + shape.decodes + i for i, chunk in enumerate(plan.chunks) if chunk.samples]
    return rows


def _for_drawing(output: StepOutput) -> StepOutput:
    # Steps with equal numbers of rows share a drawing program; arrays of all tokens would need one per number of tokens.
    nothing: Any = None
    drafted = output.drafted and StepBatch(output.drafted.tokens, *[nothing] * 5)
    return output._replace(hidden=nothing, drafted=drafted)


@jax.jit
def _taken(pages: UInt[Array, "pages ..."], numbers: Int[Array, "_"]) -> UInt[Array, "_ ..."]:
    return jnp.take(pages, numbers, axis=0)


def _doubling(largest: int, smallest: int = 1) -> list[int]:
    """Returns `smallest` and its doubles below `largest`, and `largest`."""
    return [*(smallest << i for i in range(largest.bit_length()) if smallest << i < largest), largest]
