"""Drafts: tokens that are proposed without the model, and checked by the next step.

A step computes the newest token of each decoding row and its drafts. The next token is drawn as without drafts: from the
model's logits, with the key of its position. If it equals the draft, the draft is accepted, and a further token is drawn from
the draft's logits, and so on. So, up to rounding, tokens do not depend on drafts.

Drafts come from one of two sources (`generation.speculative.DraftSource`). "lookup" proposes the tokens that followed an
earlier occurrence of the newest ones: the device keeps each sequence's tokens. A sequence with too few right drafts has none
for a while (`schedule.weigh_drafts`). One whose newest two tokens never occurred before has none either
(`schedule.look_back`). A step in which no row may have drafts runs the program of an engine without drafts.

"module" proposes a token of the model's multi-token prediction module. The module draws its draft with the key of the draft's
position. If its logits equal the model's, so do the draws. Among rules whose tokens do not depend on the module, such coupled
draws accept nearly the most drafts (https://arxiv.org/abs/2408.07978).

    step -> logits of both tokens -> check: tokens -> module: logits after the newest token -> draft

A wrong draft stays in the pages, one position after the newest token: the next step overwrites it before any row reads. At each
position the module also reads the next token. So the last position of a shared page may come from another continuation; this
can worsen drafts, but changes no tokens.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Wrapped
from jaxtyping import Array, Float, Int

from moe_jax.generation.speculative import looked_up
from moe_jax.layers.paged import PagedAttend
from moe_jax.models.forward import layer_inputs
from moe_jax.models.mtp import PredictorState
from moe_jax.parallel.spread import ONE_DEVICE
from moe_jax.serving.sampling import Penalties, SlotOptions, Variant, sample_rows, with_last_tokens
from moe_jax.serving.step import Drafting, StepOutput, StepRows, StepShape, first_outputs, unpacked
from moe_jax.serving.weights import ServedModel, Weights, frame_of, head_of, layer_module, logits_of

DraftLogits = tuple[Float[Array, "rows vocab"], Int[Array, "rows"], Int[Array, "rows"]]
"""The module's logits, with the slot of each row, and the position of its draft."""


@functools.partial(jax.jit, donate_argnums=0)
def begin_lookups(drafting: Drafting, slot: Int[Array, ""], tokens: Int[Array, "length"]) -> Drafting:
    """Sets the tokens of the sequence that starts drawing in a slot, in place."""
    assert drafting.tokens is not None
    return drafting._replace(tokens=drafting.tokens.at[slot].set(tokens))


@functools.partial(jax.jit, donate_argnums=0)
def look_up(
    drafting: Drafting,
    slots: Int[Array, "rows"],
    positions: Int[Array, "outputs"],
    drawn: tuple[Int[Array, "_"], ...],
    checked: Int[Array, "2 decodes"] | None,
) -> Drafting:
    """Adds a step's tokens to their slots' tokens, and looks up the next drafts there, in place.

    `slots` and `positions` are of `StepOutput`; `drawn` (the tokens of `first` and `further`) and `checked` of `draw_program`.
    """
    assert drafting.tokens is not None
    accepted = jnp.zeros(0, jnp.int32) if checked is None else checked[1]
    num_decodes = len(accepted)
    positions = positions[first_outputs(num_decodes, len(drawn), len(positions))]
    tokens, nowhere = drafting.tokens, len(drafting.tokens)
    for number, each in enumerate(drawn):
        # All rows have a first token, and decoding rows a further one for each accepted draft.
        used = slots[: len(each)] >= 0 if number == 0 else accepted >= number
        rows = jnp.where(used, slots[: len(each)], nowhere)
        tokens = tokens.at[rows, positions[: len(each)] + number].set(each, mode="drop")
    positions = positions.at[:num_decodes].add(accepted)
    draft = with_last_tokens(drafting.draft, slots, looked_up(tokens[slots], positions, drafting.draft.shape[1]))
    return Drafting(with_last_tokens(drafting.position, slots, positions), draft, tokens=tokens)


@functools.cache
def draft_program(variant: Variant) -> Callable[..., Int[Array, "slots 1"]]:
    """Returns the jitted f(draft logits, options, drafts, penalties) -> drafts, which changes the drafts in place."""
    return jax.jit(functools.partial(_draft, variant), donate_argnums=2)


def module_program(served: ServedModel, weights_tree: Any, shape: StepShape) -> Wrapped:
    """Returns the jitted f(leaves, drafting, output, checked, upload) -> drafting, `DraftLogits`; it changes drafting in place.

    `output` may come without logits. `checked` are the tokens of `first` and `further`, and `checked` of `draw_program`.
    """

    def of_leaves(leaves: list[Array], drafting: Drafting, output: StepOutput, checked: tuple, upload: Int[Array, "_"]):
        weights = jax.tree.unflatten(weights_tree, leaves)
        return _module(served, weights, drafting, output, checked, unpacked(upload, shape))

    return jax.jit(of_leaves, donate_argnums=1)


def _draft(
    variant: Variant, of_module: DraftLogits, options: SlotOptions, drafts: Int[Array, "slots 1"], penalties: Penalties | None
) -> Int[Array, "slots 1"]:
    sampled, _ = sample_rows(variant, *of_module, options, penalties)
    return with_last_tokens(drafts, of_module[1], sampled.tokens[:, None])


def _module(
    served: ServedModel, weights: Weights, drafting: Drafting, output: StepOutput, checked: tuple, rows: StepRows
) -> tuple[Drafting, DraftLogits]:
    """Runs the module on all tokens of a step, now that the token after each is known."""
    config, drafted = served.config, output.drafted
    assert drafted is not None and drafting.pages is not None
    first, second, (_, accepted) = checked
    num_decodes = len(accepted)
    frame = frame_of(served, weights)
    following = jnp.concatenate([jnp.stack([first[:num_decodes], second], axis=1).ravel(), _behind_chunks(rows, first)])
    state = PredictorState(output.hidden[None], frame["embed_tokens"](following[None], served.dtype))
    inputs = layer_inputs(config, drafted.positions[None], jnp.ones_like(following)[None], drafted.valid[None])
    attend = PagedAttend(drafting.pages, drafted.places, drafted.queries, value_dim=config.mixer.latent_value_dim)
    of_module = weights.layers[-1], weights.experts[-1], jnp.int32(0)
    out = layer_module(served, len(config.stages), of_module)(state, inputs, attend, ONE_DEVICE)
    newest = jnp.concatenate([2 * jnp.arange(num_decodes) + accepted, drafted.outputs[2 * num_decodes :]])
    hidden = out.x.hidden[0][newest]
    logits = logits_of(hidden, head_of(frame), strict=False)
    position = with_last_tokens(drafting.position, output.slots, drafted.positions[newest] + 1)
    return Drafting(position, drafting.draft, out.cache), (logits, output.slots, drafted.positions[newest] + 2)


def _behind_chunks(rows: StepRows, first: Int[Array, "rows"]) -> Int[Array, "chunk_tokens"]:
    """Returns the token after each token of the chunks."""
    ends = jnp.cumsum(rows.chunk_counts)
    last = jnp.where(rows.chunk_counts > 0, ends - 1, len(rows.chunk_tokens))
    behind_last = jnp.where(rows.chunk_samples > 0, first[len(rows.decode_slots) :], rows.chunk_next)
    return jnp.roll(rows.chunk_tokens, -1).at[last].set(behind_last, mode="drop")
