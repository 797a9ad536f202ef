"""The program that draws the tokens of a step, and remembers them on the device for the next one.

Three variants are compiled. A step takes the cheapest one that serves the options of all its rows.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from moe_jax.serving.penalties import Penalties, count_tokens, has_penalties
from moe_jax.serving.placement import on_each
from moe_jax.serving.request import MAX_LOGPROBS, SamplingOptions
from moe_jax.serving.sampling import Sampled, SlotOptions, sample_rows, variant_for, with_last_tokens
from moe_jax.serving.step import StepOutput

Variant = Literal["greedy", "plain", "full"]
"""Argmax alone; temperatures too; all options, with penalties and alternatives."""

VARIANTS: tuple[Variant, ...] = ("greedy", "plain", "full")


class Drawn(NamedTuple):
    """The results of drawing the tokens of a step.

    What is changed in place comes first: JAX gives a donated array's memory to the first result of its shape. A last token at
    a new address would change the CUDA graph of the next step.
    """

    last_token: Int[Array, "slots"]
    penalties: Penalties | None
    """With the new tokens counted; None in variants without penalties."""
    sampled: Sampled


def variant_of(options: SamplingOptions) -> Variant:
    """Returns the cheapest variant that serves these options."""
    if has_penalties(options) or options.logprobs or (variant := variant_for(options)) == "restricted":
        return "full"
    return variant


@functools.cache
def draw_program(variant: Variant, *, strict: bool = False, mesh: Mesh | None = None) -> Callable[..., Drawn]:
    """Returns the jitted f(output, options, last_token, penalties) -> `Drawn`, which changes the last two in place.

    With a mesh all arrays have rows of each of its devices (`placement.on_each`).
    """
    return jax.jit(on_each(mesh, functools.partial(_draw, variant, strict)), donate_argnums=(2, 3))


def draw_rows(
    variant: Variant,
    logits: Float[Array, "rows vocab"],
    slots: Int[Array, "rows"],
    positions: Int[Array, "rows"],
    options: SlotOptions,
    penalties: Penalties | None,
    *,
    strict: bool = False,
) -> tuple[Sampled, Penalties | None]:
    """Draws a token for each row, as `sample_rows` does; returns the penalties with the new tokens counted too."""
    is_full = variant == "full"
    sampled = sample_rows(
        logits,
        slots,
        positions,
        options,
        variant="restricted" if variant == "full" else variant,
        penalties=penalties,
        num_top=min(MAX_LOGPROBS, logits.shape[1]) if is_full else 0,
        strict=strict,
    )
    return sampled, None if penalties is None else count_tokens(penalties, slots, sampled.tokens)


def _draw(
    variant: Variant,
    strict: bool,
    output: StepOutput,
    options: SlotOptions,
    last_token: Int[Array, "slots"],
    penalties: Penalties | None,
) -> Drawn:
    of_rows = output.logits, output.slots, output.positions, options
    sampled, penalties = draw_rows(variant, *of_rows, penalties, strict=strict)
    return Drawn(with_last_tokens(last_token, output.slots, sampled.tokens), penalties, sampled)
