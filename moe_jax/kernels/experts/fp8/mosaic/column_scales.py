"""The scales of a matrix's blocks, as TMA reads them beside the blocks of a step: four at a time.

TMA copies at least 16 bytes, which begin at a multiple of 16 bytes of a row. A copy that begins elsewhere stops the kernel with
"illegal instruction". So a slot gets the four scales among which those of its steps are. A consumer takes these out.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from moe_jax.kernels.experts.fp8.mosaic.promoted import SlotStep

PIECE = 4
"""Scales that are copied together: the steps of a slot divide them."""

LINES = 8
"""Pieces of a place in shared memory: TMA copies to multiples of 128 bytes."""


def in_pieces(scales: Float[Array, "experts n k"]) -> Float[Array, "experts n k4"]:
    """Returns the scales with zeros behind each row, up to a multiple of PIECE; as they are where there is nothing to fill.

    All layers that read one stack share the result, since XLA computes equal things once.
    """
    return jnp.pad(scales, ((0, 0), (0, 0), (0, -scales.shape[2] % PIECE)))


def piece_of(number, steps_of_slot: int) -> pl.Slice:
    """Returns the piece with the scales of slot `number` of a tile."""
    assert PIECE % steps_of_slot == 0
    return pl.ds(pl.multiple_of(number * steps_of_slot // PIECE * PIECE, PIECE), PIECE)


def place_in_piece(step: SlotStep, steps_of_slot: int):
    """Returns the place of a step's scale in the piece of its slot."""
    return lax.rem(step.number * steps_of_slot + step.step, jnp.int32(PIECE))
