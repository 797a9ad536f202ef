"""Programs that draw change arrays in place: each stays at its address, because a CUDA graph holds that."""

import jax
import jax.numpy as jnp
import pytest

from moe_jax.serving.drawing import draw_program
from moe_jax.serving.sampling import VARIANTS, init_penalties, init_slots
from moe_jax.serving.step import StepBatch, StepOutput

SLOTS, VOCAB = 2, 97


def output_of(rows: int, outputs: int, drafted=None) -> StepOutput:
    """Rows draw in the first slots; all logits are equal."""
    slots, positions = jnp.arange(rows, dtype=jnp.int32), jnp.full(outputs, 5, jnp.int32)
    return StepOutput(jnp.zeros((outputs, VOCAB)), slots, positions, jnp.zeros((outputs, 8)), drafted)


def addresses(tree) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(tree)]


@pytest.mark.parametrize("rows", [1, SLOTS])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drawn_in_place(variant, rows):
    """Also with a row for each slot: drawn tokens then have the last tokens' shape."""
    changed = jnp.zeros(SLOTS, jnp.int32), init_penalties(SLOTS, VOCAB) if variant == "full" else None
    # Equal zeros may share their memory, which cannot be given away twice.
    changed = jax.tree.map(jnp.copy, changed)
    before = addresses(changed)
    last_token, penalties, *_ = draw_program(variant)(output_of(rows, rows), init_slots(SLOTS), *changed)
    assert addresses((last_token, penalties)) == before


def test_checked_in_place():
    drafts = StepBatch(jnp.zeros((SLOTS, 1), jnp.int32), *[None] * 5)
    last_token = jnp.zeros(SLOTS, jnp.int32)
    before = addresses(last_token)
    last_token, *_ = draw_program("greedy")(output_of(SLOTS, 2 * SLOTS, drafts), init_slots(SLOTS), last_token, None)
    assert addresses(last_token) == before
