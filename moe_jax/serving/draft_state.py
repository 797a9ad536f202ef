"""The arrays of an engine that drafts: its state on the device, and the tokens of a step for the module that drafts."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from moe_jax.config import ModelConfig
from moe_jax.generation.speculative import check_drafts
from moe_jax.kernels.attention.paged import PagedQueries
from moe_jax.layers.paged import LayerPages, TokenPlaces, empty_pages
from moe_jax.serving.limits import EngineLimits


class Drafting(NamedTuple):
    """The state of drafts."""

    pages: LayerPages
    """Pages of the module's layer; a page has the number that it has in the model's layers."""
    position: Int[Array, "slots"]
    """The position of each slot's newest token. The host knows it only once it has read the step that drew the token."""
    draft: Int[Array, "slots"]
    """The draft of the token behind it."""


class DraftedTokens(NamedTuple):
    """The tokens of a step, and where each stands; a decoding row has two of them, its newest token and its draft."""

    drafts: Int[Array, "decodes"]
    """The draft of each decoding row; -1: it has none, because its place is behind the sequence's end."""
    positions: Int[Array, "tokens"]
    valid: Bool[Array, "tokens"]
    places: TokenPlaces
    queries: PagedQueries
    outputs: Int[Array, "outputs"]
    """Indices of the tokens that `StepOutput.logits` is for."""


def check_drafting(drafts: int, config: ModelConfig, limits: EngineLimits) -> None:
    """Checks that an engine of these limits can draft.

    Raises:
      ValueError: drafts are neither 0 nor 1, the model has no module that drafts, or a step no room for drafts.
    """
    if drafts not in (0, 1):
        raise ValueError(f"drafts must be 0 or 1; got {drafts!r}")
    if drafts:
        check_drafts(config)
        if limits.max_tokens_per_step < 2 * limits.max_sequences:
            raise ValueError(
                f"with drafts max_tokens_per_step must be at least twice max_sequences; "
                f"got {limits.max_tokens_per_step} and {limits.max_sequences}"
            )


def init_drafting(config: ModelConfig, num_pages: int, num_slots: int, dtype: DTypeLike) -> Drafting:
    """Returns the state without sequences."""
    slots = jnp.zeros((2, num_slots), jnp.int32)
    return Drafting(empty_pages(config, num_pages, dtype)[0], slots[0], slots[1])
