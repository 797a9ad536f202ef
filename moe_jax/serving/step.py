"""One step of the engine on the device: a token of each decoding row, and chunks of prompts, through all layers.

    step(served, shape, weights, state, upload) -> state, StepOutput

The host uploads the rows of a step as one array of int32. The tokens of decoding rows come from the state on the device,
because the host may not know them yet. A program is compiled for each `StepShape`. Layers are unrolled and the state is
donated: its arrays keep their addresses, so that a GPU replays the step as one command buffer.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from moe_jax.generation.speculative import NO_DRAFTS, DraftSource
from moe_jax.kernels import backends
from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries
from moe_jax.layers.lora import beside_head
from moe_jax.layers.paged import LayerPages, PagedAttend, TokenPlaces, empty_pages
from moe_jax.models.forward import LayerInputs, layer_inputs
from moe_jax.serving.adapters import RowAdapters
from moe_jax.serving.placement import splits_experts, spread_on
from moe_jax.serving.schedule import StepPlan
from moe_jax.serving.weights import (
    ComputedLayers,
    LayerWeights,
    ServedModel,
    Weights,
    frame_of,
    head_of,
    layer_module,
    layers_of,
    logits_of,
)  # fmt: skip


class StepShape(NamedTuple):
    """The sizes of a step's program; `StepRows` has arrays of these sizes."""

    decodes: int
    """Decoding rows."""
    chunk_tokens: int
    """Tokens of all chunks of prompts."""
    chunks: int
    max_pages: int
    """Pages of the longest sequence."""
    drafts: int = 0
    """Drafts of a decoding row: tokens that it computes in addition to its newest one."""
    adapted: bool = False
    """True: rows may have adapters."""


class StepRows(NamedTuple):
    """The rows of a step; rows that are not used have slot -1."""

    decode_slots: Int[Array, "decodes"]
    decode_positions: Int[Array, "decodes"]
    """The position of the token that the row reads: the slot's newest. With drafts the last position that it may compute."""
    decode_pages: Int[Array, "decodes"]
    """The page of the position; -1 if the table has it already."""
    chunk_slots: Int[Array, "chunks"]
    chunk_starts: Int[Array, "chunks"]
    """The position of the chunk's first token."""
    chunk_counts: Int[Array, "chunks"]
    """The number of the chunk's tokens; 0 for a row that is not used."""
    chunk_samples: Int[Array, "chunks"]
    """1 if the chunk ends its prompt, so that a token is drawn after it; else 0."""
    chunk_next: Int[Array, "chunks"]
    """The token after the chunk, if none is drawn; only drafts read it."""
    chunk_tokens: Int[Array, "chunk_tokens"]
    """The tokens of all chunks, concatenated."""
    chunk_tables: Int[Array, "chunks max_pages"]
    """The pages of each chunk's sequence."""
    adapters: Int[Array, "rows"] | None = None
    """The place of each row's adapter in the table, decoding rows first; -1: none. None: no row has an adapter."""

    @property
    def sampling_slots(self) -> Int[Array, "rows"]:
        """The slot of each row after which a token is drawn; -1 for other rows."""
        # Arrays of numpy or of jax: `pack` and the tests use the one, the step the other.
        xp = self.decode_slots.__array_namespace__()
        return xp.concat([self.decode_slots, xp.where(self.chunk_samples > 0, self.chunk_slots, -1)])


def empty_rows(shape: StepShape) -> StepRows:
    """Makes unused rows."""
    decodes, chunk_tokens, chunks, max_pages, _, adapted = shape
    sizes = [(decodes,)] * 3 + [(chunks,)] * 5 + [(chunk_tokens,), (chunks, max_pages)]
    arrays: list[Any] = [np.zeros(size, np.int32) for size in sizes]
    arrays.append(np.full(decodes + chunks, -1, np.int32) if adapted else None)
    rows = StepRows(*arrays)
    rows.decode_slots[:], rows.decode_pages[:], rows.chunk_slots[:] = -1, -1, -1
    return rows


def packed(rows: Sequence[StepRows]) -> np.ndarray:
    """Concatenates all arrays of each device's rows into one."""
    return np.concatenate([np.ravel(array) for of_device in rows for array in of_device if array is not None])


def unpacked(upload: Int[Array, "_"], shape: StepShape) -> StepRows:
    """Undoes `packed` for one device."""
    arrays, start = [], 0
    for like in empty_rows(shape):
        if like is None:
            continue
        size = math.prod(like.shape)
        arrays.append(upload[start : start + size].reshape(like.shape))
        start += size
    return StepRows(*arrays)


def filled(plan: StepPlan, rows: StepRows) -> StepRows:
    """Writes the plan into empty rows, and returns them."""
    if plan.decodes:
        n = len(plan.decodes)
        columns = np.array([decode[1:4] for decode in plan.decodes], np.int32).T
        rows.decode_slots[:n], rows.decode_positions[:n], rows.decode_pages[:n] = columns
    if rows.adapters is not None:
        of_row = dict(enumerate(each.sequence for each in plan.decodes))
        of_row |= dict(enumerate((each.sequence for each in plan.chunks), len(rows.decode_slots)))
        for row, sequence in of_row.items():
            rows.adapters[row] = -1 if sequence.adapter is None else sequence.adapter.number
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


class Drafting(NamedTuple):
    """The state of drafts."""

    position: Int[Array, "slots"]
    """The position of each slot's newest token. The host learns it only by reading the step that drew the token."""
    draft: Int[Array, "slots drafts"]
    """The drafts of the next tokens; -1: none."""
    pages: LayerPages | None = None
    """Pages of the module's layer, with the same page numbers as in the model's layers; None without a module."""
    tokens: Int[Array, "slots length"] | None = None
    """The tokens of each slot's sequence, in which drafts are looked up; None with a module."""


class StepBatch(NamedTuple):
    """The tokens of a step, decoding rows first, and their positions."""

    tokens: Int[Array, "tokens"]
    """With drafts a decoding row has its newest token, then its drafts."""
    positions: Int[Array, "tokens"]
    valid: Bool[Array, "tokens"]
    places: TokenPlaces
    queries: PagedQueries
    outputs: Int[Array, "outputs"]
    """Indices of the tokens that `StepOutput.logits` is for."""
    adapters: Int[Array, "tokens"] | None = None
    """The place of each token's adapter in the table; -1: none. None: no token has an adapter."""


class DeviceState(NamedTuple):
    """The arrays that steps read and write; a slot is the place of a running sequence."""

    pages: list[LayerPages]
    """Pages of each layer. Page 0 belongs to no sequence: padding tokens are written there."""
    page_table: Int[Array, "slots max_pages"]
    """The pages of each slot's sequence, in order."""
    last_token: Int[Array, "slots"]
    """The newest token of each slot, not yet computed by any step."""
    experts: UInt[Array, "pages page_size moe_layers k"] | None
    """The experts of every token in the pages; None unless the engine keeps them."""
    drafting: Drafting | None = None
    """The state of drafts, if the engine has any."""


class StepOutput(NamedTuple):
    """The results of a step. Decoding rows come first, then chunks.

    An output is a row's last token. With drafts a decoding row has consecutive outputs: its token and its drafts.
    """

    logits: Float[Array, "outputs vocab"]
    """Logits of each output, f32."""
    slots: Int[Array, "rows"]
    """The slot of each row that samples; -1: the row samples nothing."""
    positions: Int[Array, "outputs"]
    """The position of the token to draw."""
    hidden: Float[Array, "tokens columns"]
    """Hidden states of all tokens after the last norm, as the head's matrix reads them: wider if the head has an adapter."""
    drafted: StepBatch | None = None
    """The step's batch, if it checks drafts. Its `tokens` [decodes, drafts] are each decoding row's drafts.

    -1: there is none, or it is past the sequence's end.
    """


def initial_state(
    served: ServedModel,
    num_pages: int,
    num_slots: int,
    max_pages: int,
    *,
    keep_experts: bool = False,
    drafts: DraftSource = NO_DRAFTS,
    in_fp8: bool = False,
) -> DeviceState:
    """Makes a state without sequences. `max_pages` is the number of pages of the longest sequence.

    Args:
      in_fp8: pages hold keys and values in FP8.
    """
    config, experts, drafting = served.config, None, None
    pages = empty_pages(config, num_pages, served.dtype, in_fp8=in_fp8)
    if drafts.num:
        drafting = Drafting(jnp.zeros(num_slots, jnp.int32), jnp.zeros((num_slots, drafts.num), jnp.int32))
        if drafts.name == "module":
            drafting = drafting._replace(pages=empty_pages(config, num_pages, served.dtype, in_fp8=in_fp8)[0])
        else:
            drafting = drafting._replace(tokens=jnp.zeros((num_slots, max_pages * PAGE_SIZE), jnp.int32))
    if keep_experts and config.experts is not None:
        per_token = len(config.moe_layers), config.experts.num_experts_per_tok
        dtype = jnp.uint8 if config.experts.num_experts <= 256 else jnp.uint16
        experts = jnp.zeros((num_pages, PAGE_SIZE, *per_token), dtype)
    return DeviceState(
        pages,
        jnp.zeros((num_slots, max_pages), jnp.int32),
        jnp.zeros(num_slots, jnp.int32),
        experts,
        drafting,
    )


def first_outputs(num_decodes: int, per_row: int, num_outputs: int) -> Int[Array, "rows"]:
    """Returns the index of each row's first output: decoding rows have `per_row` outputs, other rows one."""
    num_decoding = num_decodes * per_row
    return jnp.concatenate([jnp.arange(0, num_decoding, per_row), jnp.arange(num_decoding, num_outputs)])


def output_like(served: ServedModel, weights: Weights, shape: StepShape) -> StepOutput:
    """Returns the shapes and dtypes of the results of a step without drafts."""
    config, rows, tokens = served.config, shape.decodes + shape.chunks, shape.decodes + shape.chunk_tokens
    columns = jax.eval_shape(lambda weights: head_of(frame_of(served, weights)), weights).shape[1]
    like: Any = jax.ShapeDtypeStruct
    of_rows = like((rows,), jnp.int32)
    logits = like((rows, config.vocab_size), jnp.float32)
    return StepOutput(logits, of_rows, of_rows, like((tokens, columns), served.dtype))


def step(
    served: ServedModel, shape: StepShape, weights: Weights, state: DeviceState, upload: Int[Array, "_"]
) -> tuple[DeviceState, StepOutput]:
    """Runs the step that `upload` describes (`packed`)."""
    rows = unpacked(upload, shape)
    batch, page_table = batch_of(rows, state.page_table, state.last_token, state.drafting if shape.drafts else None)
    frame = frame_of(served, weights)
    x = frame["embed_tokens"](batch.tokens[None], served.dtype)
    inputs = layer_inputs(served.config, batch.positions[None], jnp.ones_like(batch.tokens)[None], batch.valid[None])
    # With drafts decoding rows have several queries each.
    single_rows, value_dim = 0 if shape.drafts else shape.decodes, served.config.mixer.latent_value_dim
    attends = [
        PagedAttend(pages, batch.places, batch.queries, single_rows, value_dim, window)
        for pages, window in zip(state.pages, served.config.layer_windows, strict=True)
    ]
    hidden, pages, expert_ids = _layers(served, weights, attends, x, inputs, batch)
    adapter = frame["lm_head"].lora if "lm_head" in frame else None
    hidden = hidden if adapter is None else beside_head(adapter, hidden)
    last = hidden[batch.outputs]
    logits = logits_of(last, head_of(frame), strict=served.strict)
    experts = state.experts
    if experts is not None:
        page, offset = batch.places
        experts = experts.at[page, offset].set(jnp.stack(expert_ids, axis=1).astype(experts.dtype), mode="drop")
    output = StepOutput(logits, rows.sampling_slots, batch.positions[batch.outputs] + 1, hidden)
    if shape.drafts:
        of_decodes = jnp.where(batch.valid, batch.tokens, -1)[: shape.decodes * (1 + shape.drafts)]
        drafts = of_decodes.reshape(shape.decodes, 1 + shape.drafts)[:, 1:]
        output = output._replace(drafted=batch._replace(tokens=drafts))
    return DeviceState(pages, page_table, state.last_token, experts, state.drafting), output


def batch_of(
    rows: StepRows, page_table: Int[Array, "slots max_pages"], last_token: Int[Array, "slots"], drafting: Drafting | None
) -> tuple[StepBatch, Int[Array, "slots max_pages"]]:
    """Makes the batch, and the page table with the new pages of decoding rows and the tables of chunks."""
    page_table = _updated_table(page_table, rows)
    num_decodes, num_chunk_tokens = len(rows.decode_slots), len(rows.chunk_tokens)
    own_tokens, own_positions, own_valid = _decoding(rows, last_token, drafting)
    per_row = own_tokens.shape[1]
    # Chunks are concatenated in the order of their rows.
    ends = jnp.cumsum(rows.chunk_counts)
    index = jnp.arange(num_chunk_tokens, dtype=jnp.int32)
    chunk = jnp.minimum(jnp.searchsorted(ends, index, side="right"), len(ends) - 1)
    in_chunk = index < rows.chunk_counts.sum()
    starts = ends - rows.chunk_counts
    chunk_positions = rows.chunk_starts[chunk] + index - starts[chunk]

    slots = jnp.concatenate([rows.decode_slots, rows.chunk_slots])
    tables = page_table.at[slots].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    decode_rows = jnp.arange(num_decodes, dtype=jnp.int32)
    row = jnp.concatenate([jnp.repeat(decode_rows, per_row), num_decodes + chunk.astype(jnp.int32)])
    valid = jnp.concatenate([own_valid.ravel(), in_chunk])
    positions = jnp.where(valid, jnp.concatenate([own_positions.ravel(), chunk_positions]), 0)
    tokens = jnp.concatenate([jnp.where(own_valid, own_tokens, 0).ravel(), rows.chunk_tokens])
    page = jnp.where(valid, tables[row, positions // PAGE_SIZE], 0)
    num_decoding = num_decodes * per_row
    first_query = per_row * jnp.arange(num_decodes + 1, dtype=jnp.int32)
    first_query = jnp.concatenate([first_query, num_decoding + ends.astype(jnp.int32)])
    num_keys = jnp.where(rows.decode_slots >= 0, own_positions[:, -1] + 1, 1)
    num_keys = jnp.concatenate([num_keys, rows.chunk_starts + rows.chunk_counts])
    last_of_chunks = jnp.maximum(first_query[num_decodes + 1 :] - 1, 0)
    batch = StepBatch(
        tokens,
        positions,
        valid,
        TokenPlaces(page, positions % PAGE_SIZE),
        PagedQueries(first_query, num_keys, tables),
        jnp.concatenate([jnp.arange(num_decoding, dtype=jnp.int32), last_of_chunks]),
        None if rows.adapters is None else rows.adapters[row],
    )
    return batch, page_table


def _updated_table(page_table: Int[Array, "slots max_pages"], rows: StepRows) -> Int[Array, "slots max_pages"]:
    nowhere = len(page_table)
    column = rows.decode_positions // PAGE_SIZE
    slots = jnp.where((rows.decode_slots >= 0) & (rows.decode_pages >= 0), rows.decode_slots, nowhere)
    page_table = page_table.at[slots, column].set(rows.decode_pages, mode="drop")
    slots = jnp.where(rows.chunk_slots >= 0, rows.chunk_slots, nowhere)
    return page_table.at[slots].set(rows.chunk_tables, mode="drop")


def _decoding(rows: StepRows, last_token: Int[Array, "slots"], drafting: Drafting | None) -> tuple:
    """Returns tokens, positions and validity [decodes, per_row] of decoding rows: one token each, and its drafts."""
    slots, last = rows.decode_slots, rows.decode_positions[:, None]
    used, tokens = slots[:, None] >= 0, last_token[slots][:, None]
    if drafting is None:
        return tokens, last, used
    own = drafting.position[slots][:, None]
    tokens = jnp.concatenate([tokens, drafting.draft[slots]], axis=1)
    places = jnp.arange(tokens.shape[1])
    # A row whose sequence has ended, unknown to the host, may be past the sequence's pages: it writes nothing.
    return tokens, jnp.minimum(own, last) + places, used & (own + places <= last) & (tokens >= 0)


def _layers(
    served: ServedModel, weights: Weights, attends: list[PagedAttend], x: Array, inputs: LayerInputs, batch: StepBatch
) -> ComputedLayers:
    """Runs all layers and the last norm."""
    layers, norm = layers_of(served, weights), frame_of(served, weights)["norm"]
    adapters: list[RowAdapters | None] = [None] * len(layers)
    if batch.adapters is not None:
        adapters = [RowAdapters(of_layer, batch.adapters) for of_layer in weights.adapters]
    # Imported here: kernels import Pallas Mosaic GPU, a second of CPU time.
    if served.strict:
        from moe_jax.serving.fused import strict_layers

        return strict_layers(served, layers, norm, x[0], batch.positions, attends, batch.valid)
    if _fuses(served, batch):
        from moe_jax.serving.fused import fused_layers

        return fused_layers(served, layers, norm, x[0], inputs.rope, attends, batch.valid, adapters)
    written, expert_ids = [], []
    for (stage, of_layer), attend, of_rows in zip(layers, attends, adapters, strict=True):
        x, layer_pages, experts = _layer(served, stage, of_layer, x, inputs, attend, of_rows)
        written.append(layer_pages)
        expert_ids += [] if experts is None else [experts]
    return norm(x)[0], written, expert_ids


# Jitted, so that layers which differ only in their arrays are traced once.
@partial(jax.jit, static_argnums=(0, 1))
def _layer(
    served: ServedModel,
    stage: int,
    weights: LayerWeights,
    x: Array,
    inputs: LayerInputs,
    attend: PagedAttend,
    adapters: RowAdapters | None,
) -> tuple[Array, LayerPages, Int[Array, "tokens k"] | None]:
    """Returns the residual stream after the layer, its pages, and its tokens' experts (None for a dense layer)."""
    layer = layer_module(served, stage, weights)
    if adapters is not None:
        adapters.attach(layer.self_attn)
    out = layer(x, inputs, attend, spread_on(served.mesh))
    return out.x, out.cache, None if out.routing is None else out.routing.experts


def _fuses(served: ServedModel, batch: StepBatch) -> bool:
    """Returns True if `fused` supports the model and its kernels run on this GPU."""
    if served.unfused is not None or backends.compute_capability() != "9.0":
        return False
    from moe_jax.serving.fused import MOST_PLANNED_TOKENS, refusal

    if splits_experts(served.mesh) and (served.precision is not None or len(batch.tokens) > MOST_PLANNED_TOKENS):
        # The modules exchange fewer bytes for many tokens, and experts in FP8 have no fused exchange.
        return False
    return refusal(served.config, served.dtype, len(batch.tokens), in_fp8=served.precision is not None) is None
