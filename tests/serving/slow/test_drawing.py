"""Programs that draw change arrays in place: each stays at its address, because a CUDA graph holds that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.serving.drawing import draw_program
from moe_jax.serving.sampling import VARIANTS, init_penalties, init_slots
from moe_jax.serving.step import StepBatch, StepOutput
from tests.helpers import seeds

SLOTS, VOCAB = 2, 97


def output_of(rows: int, outputs: int, drafted=None) -> StepOutput:
    """Rows draw in the first slots; all logits are equal."""
    slots, positions = jnp.arange(rows, dtype=jnp.int32), jnp.full(outputs, 5, jnp.int32)
    return StepOutput(jnp.zeros((outputs, VOCAB)), slots, positions, jnp.zeros((outputs, 8)), drafted)


def addresses(tree) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(tree)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_drawn_in_place(variant):
    """With a row for each slot: drawn tokens have the last tokens' shape."""
    changed = jnp.zeros(SLOTS, jnp.int32), init_penalties(SLOTS, VOCAB) if variant == "full" else None
    # Equal zeros may share their memory, which cannot be given away twice.
    changed = jax.tree.map(jnp.copy, changed)
    before = addresses(changed)
    last_token, penalties, *_ = draw_program(variant)(output_of(SLOTS, SLOTS), init_slots(SLOTS), *changed)
    assert addresses((last_token, penalties)) == before


def test_checked_in_place():
    drafts = StepBatch(jnp.zeros((SLOTS, 1), jnp.int32), *[None] * 5)
    last_token = jnp.zeros(SLOTS, jnp.int32)
    before = addresses(last_token)
    last_token, *_ = draw_program("greedy")(output_of(SLOTS, 2 * SLOTS, drafts), init_slots(SLOTS), last_token, None)
    assert addresses(last_token) == before


def test_checked_draws_keep_their_distribution():
    """Rows with three drafts and with none: each token is as frequent as without drafts, after any number of accepted ones."""
    rows, likely = 4000, np.array([0.5, 0.3, 0.15, 0.05], np.float32)
    logits = jnp.tile(jnp.log(likely), (4 * rows, 1))
    drafts = jnp.where(jnp.arange(rows)[:, None] % 4 < 3, jnp.array([[0, 0, 1]], jnp.int32), -1)
    slots, positions = jnp.arange(rows, dtype=jnp.int32), jnp.tile(jnp.arange(5, 9, dtype=jnp.int32), rows)
    options = init_slots(rows)._replace(
        temperature=jnp.ones(rows), seed=jnp.asarray(seeds.rng().integers(2**32, size=(rows, 2)), jnp.uint32)
    )
    output = StepOutput(logits, slots, positions, jnp.zeros((1, 8)), StepBatch(drafts, *[None] * 5))
    last_token, _, first, further, checked = draw_program("plain")(output, options, jnp.zeros(rows, jnp.int32), None)
    num_drafted, accepted = np.asarray(checked)
    np.testing.assert_array_equal(num_drafted, np.where(np.arange(rows) % 4 < 3, 3, 0))
    drawn = np.stack([np.asarray(each.tokens) for each in (first, *further)], axis=1)
    right = np.cumprod(drawn[:, :3] == drafts, axis=1)
    np.testing.assert_array_equal(accepted, right.sum(axis=1))
    np.testing.assert_array_equal(last_token, drawn[np.arange(rows), accepted])
    for number, reached in enumerate([np.ones(rows, bool), *right.astype(bool).T]):
        shares = np.bincount(drawn[reached, number], minlength=4) / reached.sum()
        assert (np.abs(shares - likely) < 6 * np.sqrt(likely * (1 - likely) / reached.sum())).all()
    assert not drawn[:, 1:][right == 0].any()
