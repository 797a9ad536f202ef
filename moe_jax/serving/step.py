"""One step of the engine on the device: a token of each decoding row, and chunks of prompts, through all layers.

    step(served, shape, weights, state, upload) -> state, StepOutput

A program is compiled for each `StepShape`. Layers are unrolled and the state is donated: its arrays keep their addresses, so
that a GPU replays the step as one command buffer. The tokens of decoding rows come from the state, because the host may not
know them yet.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from moe_jax.kernels import target
from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.layers.paged import LayerPages, PagedAttend, empty_pages
from moe_jax.models.forward import LayerInputs, layer_inputs
from moe_jax.serving.batch import (
    ComputedLayers,
    DraftedTokens,
    Drafting,
    StepBatch,
    StepShape,
    batch_of,
    init_drafting,
    unpacked,
    updated_table,
)
from moe_jax.serving.placement import spread_on
from moe_jax.serving.weights import (
    LayerWeights,
    ServedModel,
    Weights,
    behind_norm,
    frame_of,
    head_of,
    layer_module,
    layers_of,
    logits_of,
)


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
    hidden: Float[Array, "tokens columns"]
    """Hidden states of all tokens, behind the last norm; as `head_of` takes them (`weights.behind_norm`)."""
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
    """Runs the step that `upload` describes (`batch.packed`)."""
    rows = unpacked(upload, shape)
    page_table = updated_table(state.page_table, rows)
    batch = batch_of(rows, page_table, state.last_token, state.drafting)
    frame = frame_of(served, weights)
    x = frame["embed_tokens"](batch.tokens[None], served.dtype)
    inputs = layer_inputs(served.config, batch.positions[None], jnp.ones_like(batch.tokens)[None], batch.valid[None])
    hidden, pages, expert_ids = _layers(served, weights, state.pages, x, inputs, batch)
    hidden = behind_norm(frame, hidden)
    last = hidden[batch.outputs]
    logits = logits_of(last, head_of(frame), strict=served.strict)
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
    served: ServedModel, weights: Weights, pages: list[LayerPages], x: Array, inputs: LayerInputs, batch: StepBatch
) -> ComputedLayers:
    """Runs all layers and the norm behind them."""
    layers, windows = layers_of(served, weights), served.config.layer_windows
    value_dim = served.config.latent_value_dim
    attends = [
        PagedAttend(of_layer, batch.places, batch.queries, batch.single_query_rows, value_dim, window)
        for of_layer, window in zip(pages, windows, strict=True)
    ]
    norm = frame_of(served, weights)["norm"]
    # Layers of kernels import Pallas Mosaic GPU, a second of CPU time.
    if served.strict:
        from moe_jax.serving.strict import strict_layers

        return strict_layers(served, layers, norm, x[0], batch.positions, attends, batch.valid)
    if _fuses(served, batch):
        from moe_jax.serving.fused import fused_layers

        return fused_layers(served, layers, norm, x[0], inputs.rope, attends, batch.valid)
    written, expert_ids = [], []
    for (stage, of_layer), attend in zip(layers, attends, strict=True):
        x, layer_pages, experts = _layer(served, stage, of_layer, x, inputs, attend)
        written.append(layer_pages)
        expert_ids += [] if experts is None else [experts]
    return ComputedLayers(norm(x)[0], written, expert_ids)


# Jitted, so that layers which differ in their arrays alone are traced once.
@partial(jax.jit, static_argnums=(0, 1))
def _layer(
    served: ServedModel, stage: int, weights: LayerWeights, x: Array, inputs: LayerInputs, attend: PagedAttend
) -> tuple[Array, LayerPages, Int[Array, "tokens k"] | None]:
    """Returns the residual stream behind the layer, its pages, and its tokens' experts (None for a dense layer)."""
    out = layer_module(served, stage, weights)(x, inputs, attend, spread_on(served.mesh))
    return out.x, out.cache, None if out.routing is None else out.routing.experts


def _fuses(served: ServedModel, batch: StepBatch) -> bool:
    """Returns True for a step of a model that `fused` takes, on one GPU that it is written for."""
    if served.unfused is not None or served.mesh is not None or target.compute_capability() != "9.0":
        return False
    from moe_jax.serving.fused import refusal

    return refusal(served.config, served.dtype, len(batch.tokens), in_fp8=served.precision is not None) is None
