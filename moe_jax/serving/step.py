"""One step of the engine on the device: a token of each decoding row, and chunks of prompts, through all layers.

    step(served, shape, weights, state, upload) -> state, StepOutput

A program is compiled for each `StepShape`. Layers are unrolled and the state is donated: its arrays keep their addresses, so
that a GPU replays the step as one command buffer. The tokens of decoding rows come from the state, because the host may not
know them yet.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from moe_jax.kernels.attention.paged import PAGE_SIZE, PagedQueries
from moe_jax.kernels.hopper import target
from moe_jax.layers.paged import LayerPages, PagedAttend, TokenPlaces, empty_pages
from moe_jax.models.forward import LayerInputs, layer_inputs
from moe_jax.parallel.spread import ONE_DEVICE
from moe_jax.serving.fused import DecodedLayers, decoded_layers, refusal
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


class StepOutput(NamedTuple):
    """The results of a step. A row is a decoding row or, behind these, a chunk."""

    logits: Float[Array, "rows vocab"]
    """Logits of each row's last token, f32."""
    slots: Int[Array, "rows"]
    """The slot of each row that samples; -1: the row samples nothing."""
    positions: Int[Array, "rows"]
    """The position of the token that is to be drawn."""
    hidden: Float[Array, "tokens hidden"]
    """Hidden states of all tokens, behind the last norm."""


def initial_state(
    served: ServedModel, num_pages: int, num_slots: int, max_pages: int, *, keep_experts: bool = False
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
    )


def output_like(served: ServedModel, shape: StepShape) -> StepOutput:
    """Returns the shapes and dtypes of a step's results."""
    config, rows, tokens = served.config, shape.decodes + shape.chunks, shape.decodes + shape.chunk_tokens
    like: Any = jax.ShapeDtypeStruct
    of_rows = like((rows,), jnp.int32)
    logits = like((rows, config.vocab_size), jnp.float32)
    return StepOutput(logits, of_rows, of_rows, like((tokens, config.hidden_size), served.dtype))


def step(
    served: ServedModel, shape: StepShape, weights: Weights, state: DeviceState, upload: Int[Array, "_"]
) -> tuple[DeviceState, StepOutput]:
    """Runs the step that `upload` describes (`upload.packed`)."""
    rows = unpacked(upload, shape)
    page_table = _updated(state.page_table, rows)
    batch = _batch(rows, page_table, state.last_token)
    frame = frame_of(served, weights)
    x = frame["embed_tokens"](batch.tokens[None], served.dtype)
    inputs = layer_inputs(served.config, batch.positions[None], jnp.ones_like(batch.tokens)[None], batch.valid[None])
    hidden, pages, expert_ids = _layers(served, weights, state.pages, x, inputs, batch)
    last = hidden[batch.last_token_of_row]
    logits = jnp.einsum("rd,vd->rv", last, head_of(frame).astype(served.dtype), preferred_element_type=jnp.float32)
    experts = state.experts
    if experts is not None:
        page, offset = batch.places
        experts = experts.at[page, offset].set(jnp.stack(expert_ids, axis=1).astype(experts.dtype), mode="drop")
    output = StepOutput(logits, rows.sampling_slots, batch.positions[batch.last_token_of_row] + 1, hidden)
    return DeviceState(pages, page_table, state.last_token, experts), output


def _layers(
    served: ServedModel, weights: Weights, pages: list[LayerPages], x: Array, inputs: LayerInputs, batch: "_Batch"
) -> DecodedLayers:
    """Runs all layers and the norm behind them."""
    config = served.config
    norm = frame_of(served, weights)["norm"]
    places = [(number, place) for number, stage in enumerate(config.stages) for place in range(stage.num_layers)]
    layers = [layer_of(served, weights, number, place) for number, place in places]
    attends = [
        PagedAttend(
            of_layer,
            batch.places,
            batch.queries,
            queries_per_row=batch.queries_per_row,
            value_dim=config.latent_value_dim,
            window=window,
        )
        for of_layer, window in zip(pages, config.layer_windows, strict=True)
    ]
    if _fuses(served, batch):
        return decoded_layers(layers, norm, x[0], inputs.rope, attends, batch.valid)
    written, expert_ids = [], []
    for layer, attend in zip(layers, attends, strict=True):
        out = layer(x, inputs, attend, ONE_DEVICE)
        x = out.x
        written.append(out.cache)
        if out.routing is not None:
            expert_ids.append(out.routing.experts)
    return DecodedLayers(norm(x)[0], written, expert_ids)


def _fuses(served: ServedModel, batch: "_Batch") -> bool:
    """Returns True for a step without chunks of a model that `fused` takes, on a GPU that it is written for."""
    is_decoding = batch.queries_per_row == 1 and target.compute_capability() == "9.0"
    return is_decoding and refusal(served.config, served.dtype, len(batch.tokens)) is None


class _Batch(NamedTuple):
    """The tokens of a step, decoding rows first, and where each stands."""

    tokens: Int[Array, "tokens"]
    positions: Int[Array, "tokens"]
    valid: Bool[Array, "tokens"]
    places: TokenPlaces
    queries: PagedQueries
    last_token_of_row: Int[Array, "rows"]
    queries_per_row: int | None
    """1 for a step without chunks."""


def _updated(page_table: Int[Array, "slots max_pages"], rows: StepRows) -> Int[Array, "slots max_pages"]:
    """Returns the table with the new pages of decoding rows, and the tables of chunks."""
    nowhere = len(page_table)
    column = rows.decode_positions // PAGE_SIZE
    slots = jnp.where((rows.decode_slots >= 0) & (rows.decode_pages >= 0), rows.decode_slots, nowhere)
    page_table = page_table.at[slots, column].set(rows.decode_pages, mode="drop")
    slots = jnp.where(rows.chunk_slots >= 0, rows.chunk_slots, nowhere)
    return page_table.at[slots].set(rows.chunk_tables, mode="drop")


def _batch(rows: StepRows, page_table: Int[Array, "slots max_pages"], last_token: Int[Array, "slots"]) -> _Batch:
    num_decodes, num_chunk_tokens = len(rows.decode_slots), len(rows.chunk_tokens)
    decoding = rows.decode_slots >= 0
    # Chunks lie one behind the other, in the order of their rows.
    ends = jnp.cumsum(rows.chunk_counts)
    index = jnp.arange(num_chunk_tokens, dtype=jnp.int32)
    chunk = jnp.minimum(jnp.searchsorted(ends, index, side="right"), len(ends) - 1)
    in_chunk = index < rows.chunk_counts.sum()
    starts = ends - rows.chunk_counts
    chunk_positions = rows.chunk_starts[chunk] + index - starts[chunk]

    slots = jnp.concatenate([rows.decode_slots, rows.chunk_slots])
    tables = page_table.at[slots].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    row = jnp.concatenate([jnp.arange(num_decodes, dtype=jnp.int32), num_decodes + chunk.astype(jnp.int32)])
    valid = jnp.concatenate([decoding, in_chunk])
    positions = jnp.where(valid, jnp.concatenate([rows.decode_positions, chunk_positions]), 0)
    tokens = jnp.concatenate([jnp.where(decoding, last_token[rows.decode_slots], 0), rows.chunk_tokens])
    page = jnp.where(valid, tables[row, positions // PAGE_SIZE], 0)
    first_query = jnp.concatenate([jnp.arange(num_decodes + 1, dtype=jnp.int32), num_decodes + ends.astype(jnp.int32)])
    num_keys = jnp.concatenate([jnp.where(decoding, rows.decode_positions + 1, 1), rows.chunk_starts + rows.chunk_counts])
    return _Batch(
        tokens,
        positions,
        valid,
        TokenPlaces(page, positions % PAGE_SIZE),
        PagedQueries(first_query, num_keys, tables),
        jnp.maximum(first_query[1:] - 1, 0),
        queries_per_row=None if num_chunk_tokens else 1,
    )
