"""One step of the engine on the device: a token of each decoding row, and chunks of prompts, through all layers.

    step(served, shape, weights, state, upload) -> state, StepOutput

A program is compiled for each `StepShape`. Layers are unrolled and the state is donated: its arrays keep their addresses, so
that a GPU replays the step as one command buffer. The tokens of decoding rows come from the state, because the host may not
know them yet.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.stages import Wrapped
from jaxtyping import Array, Bool, Float, Int, UInt

from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries
from moe_jax.layers.paged import LayerPages, PagedAttend, TokenPlaces, empty_pages
from moe_jax.models.forward import LayerInputs, layer_inputs
from moe_jax.parallel.spread import ONE_DEVICE
from moe_jax.serving.draft_state import DraftedTokens, Drafting, init_drafting
from moe_jax.serving.upload import StepRows, StepShape, unpacked
from moe_jax.serving.weights import ServedModel, Weights, frame_of, head_of, layer_of


class DeviceState(NamedTuple):
    """The arrays that steps read and write; a slot is the place of a running sequence."""

    pages: list[LayerPages]
    """Pages of each layer. Page 0 belongs to no sequence: padding tokens are written there."""
    page_table: Int[Array, "slots max_pages"]
    """The pages of each slot's sequence, in order."""
    last_token: Int[Array, "slots"]
    """The newest token of each slot, which no step has read yet."""
    experts: UInt[Array, "pages page_size moe_layers k"] | None
    """The experts of every token in the pages; None where nobody asks for them."""
    drafting: Drafting | None = None
    """The state of drafts, if the engine has any."""


class StepOutput(NamedTuple):
    """The results of a step. A row is a decoding row or, behind these, a chunk.

    An output is a row's last token. With drafts a decoding row has two outputs, one behind the other: its token and its draft.
    """

    logits: Float[Array, "outputs vocab"]
    """Logits of each output, f32."""
    slots: Int[Array, "rows"]
    """The slot of each row that samples; -1: the row samples nothing."""
    positions: Int[Array, "outputs"]
    """The position of the token that is to be drawn."""
    hidden: Float[Array, "tokens hidden"]
    """Hidden states of all tokens, behind the last norm."""
    drafted: DraftedTokens | None = None
    """The step's tokens, if the engine drafts."""


def initial_state(
    served: ServedModel, num_pages: int, num_slots: int, max_pages: int, *, keep_experts: bool = False, drafts: int = 0
) -> DeviceState:
    """Makes a state without sequences. `max_pages` is the number of pages of the longest sequence."""
    config = served.config
    experts = None
    if keep_experts and config.experts is not None:
        per_token = len(config.moe_layers), config.experts.num_experts_per_tok
        dtype = jnp.uint8 if config.experts.num_experts <= 256 else jnp.uint16
        experts = jnp.zeros((num_pages, PAGE_SIZE, *per_token), dtype)
    return DeviceState(
        empty_pages(config, num_pages, served.dtype),
        jnp.zeros((num_slots, max_pages), jnp.int32),
        jnp.zeros(num_slots, jnp.int32),
        experts,
        init_drafting(config, num_pages, num_slots, served.dtype) if drafts else None,
    )


def step_program(served: ServedModel, weights_tree: Any, shape: StepShape) -> Wrapped:
    """Returns the jitted step of this shape, which takes the leaves of the weights in place of the weights."""

    def of_leaves(leaves: list[Array], state: DeviceState, upload: Int[Array, "_"]) -> tuple[DeviceState, StepOutput]:
        return step(served, shape, jax.tree.unflatten(weights_tree, leaves), state, upload)

    return jax.jit(of_leaves, donate_argnums=1)


def step(
    served: ServedModel, shape: StepShape, weights: Weights, state: DeviceState, upload: Int[Array, "_"]
) -> tuple[DeviceState, StepOutput]:
    """Runs the step that `upload` describes (`upload.packed`)."""
    rows = unpacked(upload, shape)
    page_table = _updated(state.page_table, rows)
    batch = _batch(rows, page_table, state.last_token, state.drafting)
    frame = frame_of(served, weights)
    x = frame["embed_tokens"](batch.tokens[None], served.dtype)
    inputs = layer_inputs(served.config, batch.positions[None], jnp.ones_like(batch.tokens)[None], batch.valid[None])
    x, pages, expert_ids = _layers(served, weights, state.pages, x, inputs, batch)
    hidden = frame["norm"](x)[0]
    last = hidden[batch.outputs]
    logits = jnp.einsum("rd,vd->rv", last, head_of(frame).astype(served.dtype), preferred_element_type=jnp.float32)
    experts = state.experts
    if experts is not None:
        page, offset = batch.places
        experts = experts.at[page, offset].set(jnp.stack(expert_ids, axis=1).astype(experts.dtype), mode="drop")
    output = StepOutput(logits, rows.sampling_slots, batch.positions[batch.outputs] + 1, hidden)
    if state.drafting is not None:
        drafts = jnp.where(batch.valid, batch.tokens, -1)[1 : 2 * len(rows.decode_slots) : 2]
        tokens = DraftedTokens(drafts, batch.positions, batch.valid, batch.places, batch.queries, batch.outputs)
        output = output._replace(drafted=tokens)
    return DeviceState(pages, page_table, state.last_token, experts, state.drafting), output


def _layers(
    served: ServedModel, weights: Weights, pages: list[LayerPages], x: Array, inputs: LayerInputs, batch: "_Batch"
) -> tuple[Array, list[LayerPages], list[Array]]:
    """Returns the residual stream behind the last layer, the pages with the new tokens, and the experts of each MoE layer."""
    config = served.config
    written, expert_ids = [], []
    value_dim = config.latent_value_dim
    for number, stage in enumerate(config.stages):
        for place in range(stage.num_layers):
            layer = stage.first_layer + place
            attend = PagedAttend(
                pages[layer],
                batch.places,
                batch.queries,
                queries_per_row=batch.queries_per_row,
                value_dim=value_dim,
                window=config.layer_windows[layer],
            )
            out = layer_of(served, weights, number, place)(x, inputs, attend, ONE_DEVICE)
            x = out.x
            written.append(out.cache)
            if out.routing is not None:
                expert_ids.append(out.routing.experts)
    return x, written, expert_ids


class _Batch(NamedTuple):
    """The tokens of a step, decoding rows first, and where each stands."""

    tokens: Int[Array, "tokens"]
    positions: Int[Array, "tokens"]
    valid: Bool[Array, "tokens"]
    places: TokenPlaces
    queries: PagedQueries
    outputs: Int[Array, "outputs"]
    queries_per_row: int | None
    """Tokens of a decoding row, for a step without chunks."""


def _updated(page_table: Int[Array, "slots max_pages"], rows: StepRows) -> Int[Array, "slots max_pages"]:
    """Returns the table with the new pages of decoding rows, and the tables of chunks."""
    nowhere = len(page_table)
    column = rows.decode_positions // PAGE_SIZE
    slots = jnp.where((rows.decode_slots >= 0) & (rows.decode_pages >= 0), rows.decode_slots, nowhere)
    page_table = page_table.at[slots, column].set(rows.decode_pages, mode="drop")
    slots = jnp.where(rows.chunk_slots >= 0, rows.chunk_slots, nowhere)
    return page_table.at[slots].set(rows.chunk_tables, mode="drop")


def _batch(
    rows: StepRows, page_table: Int[Array, "slots max_pages"], last_token: Int[Array, "slots"], drafting: Drafting | None
) -> _Batch:
    num_decodes, num_chunk_tokens = len(rows.decode_slots), len(rows.chunk_tokens)
    decoding = _decoding(rows, last_token, drafting)
    per_row = decoding.tokens.shape[1]
    # Chunks lie one behind the other, in the order of their rows.
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
    valid = jnp.concatenate([decoding.valid.ravel(), in_chunk])
    positions = jnp.where(valid, jnp.concatenate([decoding.positions.ravel(), chunk_positions]), 0)
    tokens = jnp.concatenate([jnp.where(decoding.valid, decoding.tokens, 0).ravel(), rows.chunk_tokens])
    page = jnp.where(valid, tables[row, positions // PAGE_SIZE], 0)
    num_decoding = num_decodes * per_row
    first_query = per_row * jnp.arange(num_decodes + 1, dtype=jnp.int32)
    first_query = jnp.concatenate([first_query, num_decoding + ends.astype(jnp.int32)])
    num_keys = jnp.where(rows.decode_slots >= 0, decoding.positions[:, -1] + 1, 1)
    num_keys = jnp.concatenate([num_keys, rows.chunk_starts + rows.chunk_counts])
    last_of_chunks = jnp.maximum(first_query[num_decodes + 1 :] - 1, 0)
    return _Batch(
        tokens,
        positions,
        valid,
        TokenPlaces(page, positions % PAGE_SIZE),
        PagedQueries(first_query, num_keys, tables),
        jnp.concatenate([jnp.arange(num_decoding, dtype=jnp.int32), last_of_chunks]),
        queries_per_row=None if num_chunk_tokens else per_row,
    )


class _Decoding(NamedTuple):
    """The tokens of decoding rows: one of each, or with drafts two."""

    tokens: Int[Array, "decodes per_row"]
    positions: Int[Array, "decodes per_row"]
    valid: Bool[Array, "decodes per_row"]


def _decoding(rows: StepRows, last_token: Int[Array, "slots"], drafting: Drafting | None) -> _Decoding:
    slots, last = rows.decode_slots, rows.decode_positions[:, None]
    used, tokens = slots[:, None] >= 0, last_token[slots][:, None]
    if drafting is None:
        return _Decoding(tokens, last, used)
    own = drafting.position[slots][:, None]
    tokens = jnp.concatenate([tokens, drafting.draft[slots][:, None]], axis=1)
    # A row whose sequence has ended, as the host does not know yet, may lie behind the sequence's pages: it writes nothing.
    return _Decoding(tokens, jnp.minimum(own, last) + jnp.arange(2), used & (own + jnp.arange(2) <= last))
