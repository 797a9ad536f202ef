"""The plans of few tokens equal `experts.routing`'s: offsets, experts of blocks, rows of choices, sources of rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.kernels.decode.plan_rows import place_rows, plan_rows
from tests.helpers import seeds
from tests.helpers.compiled_steps import plan, plan_of_few

EXPERTS, K, LAYER = 128, 4, 2


def choices(rng, tokens, num_experts=EXPERTS):
    """Ids and the mask of choices. Two thirds of the tokens share few experts, so that these have more rows than a block."""
    ids = np.stack([rng.permutation(5 if token % 3 else num_experts)[:K] for token in range(tokens)])
    is_chosen = np.zeros((tokens, EXPERTS), np.int32)
    np.put_along_axis(is_chosen, ids, 1, axis=1)
    return jnp.asarray(ids, jnp.int32), jnp.asarray(is_chosen)


def check_blocks(found, expected, num_experts=EXPERTS):
    np.testing.assert_array_equal(found.offsets[: num_experts + 1], expected.offsets)
    blocks = np.arange(int(expected.offsets[-1]) // 64)
    experts = np.searchsorted(expected.offsets[1:], 64 * blocks, side="right")
    np.testing.assert_array_equal(found.expert_of_block[: len(blocks)], experts + LAYER * num_experts)


@pytest.mark.parametrize("tokens, num_experts", [pytest.param(1, 128, marks=pytest.mark.thorough), (33, 60)])
def test_one_block_an_expert(tokens, num_experts):
    """Columns after the last of 60 experts are empty, and the next layer's experts begin at 60."""
    ids, is_chosen = choices(seeds.rng(), tokens, num_experts)
    found = plan_rows(is_chosen, jnp.int32(LAYER), num_held=num_experts, num_blocks=EXPERTS + 1, holds_all_tokens=True)
    check_blocks(found, plan_of_few(ids, num_experts, 64), num_experts)


def test_blocks_of_sorted_rows():
    """The last eighth of the tokens has fewer than the others."""
    tokens = 131
    ids, is_chosen = choices(seeds.rng(), tokens)
    expected = plan(ids, EXPERTS, 64)
    num_blocks = expected.num_rows // 64
    found = plan_rows(is_chosen, jnp.int32(LAYER), num_held=EXPERTS, num_blocks=num_blocks, holds_all_tokens=False)
    check_blocks(found, expected)
    assert int((expected.offsets[1:] - expected.offsets[:-1]).max()) > 64
    experts = jnp.pad(ids, ((0, 0), (0, EXPERTS - K)))
    places, source_of_row = place_rows(is_chosen, experts, found, k=K, num_blocks=num_blocks)
    place = np.take_along_axis(np.asarray(places), np.asarray(ids), axis=1)
    np.testing.assert_array_equal(np.asarray(found.offsets)[ids] + place, expected.row_of_pair)
    has_token = np.asarray(expected.token_of_row) < tokens
    np.testing.assert_array_equal(source_of_row[has_token], expected.token_of_row[has_token])
    # Bits of an expert's last block: rows 8 i and on, while they have tokens.
    in_last = np.asarray(expected.ends - expected.offsets[:-1]) % 64
    bits = np.where(in_last, (1 << -(-in_last // 8)) - 1, 255)
    has_rows = np.asarray(expected.ends > expected.offsets[:-1])
    np.testing.assert_array_equal(np.asarray(found.chosen_rows)[has_rows], bits[has_rows])
