"""The rows of a layer on Hopper: where tokens are gathered, and how much room their choices have."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import kernels
from moe_jax.kernels.experts import mosaic
from tests.helpers.compiled_steps import plan
from tests.helpers.expert_layers import (
    SMALL,
    choose,
    compute,
    few_bits,
    make_layer,
    relative_error,
    types_of,
    with_gradients,
)
from tests.helpers.lowered import launches_on_h200


def test_gather_where_used(rng):
    """A forward pass alone gathers them in its first matmul. Tokens that choose nobody reach no row."""
    # Enough tokens that each of a GPU's blocks has several tiles.
    tokens, hidden, inter = (20000, 1024, 384) if mosaic.is_native() else (150, 192, 128)
    x, w_gate_up, _, _, chosen = make_layer(rng, "random", tokens, 5, 2, hidden, inter)
    x, chosen = x.at[-1].set(jnp.nan), chosen.at[-1].set(-1)
    rows = plan(chosen, 5, mosaic.ROW_ALIGNMENT)
    gathered, _ = mosaic.rows_of_tokens(x, rows)
    where_used, source = mosaic.rows_of_tokens(x, rows, for_gradients=False)
    assert where_used is x
    _, before = mosaic.gated_matmul(gathered, w_gate_up, rows, keep_h=False)
    h, act = mosaic.gated_matmul(where_used, w_gate_up, rows, source_of_row=source, keep_h=True)
    _, alone = mosaic.gated_matmul(where_used, w_gate_up, rows, source_of_row=source, keep_h=False)
    computed = int(rows.offsets[-1])
    for actual in (act, alone):
        np.testing.assert_array_equal(actual[:computed], before[:computed])
    assert np.isfinite(np.asarray(h[:computed], np.float32)).all()


def test_few_tokens_are_not_gathered(rng):
    """Up to 64 tokens are read where they are, in a forward pass alone. The first token chooses one expert three times.

    A CPU rounds some sums by a row's position in a tile.
    """
    x, w_gate_up, w_down, weights, chosen = make_layer(rng, "half_empty", 70, 5, 3, 128, 64)
    weights, chosen = few_bits(weights), chosen.at[0].set(chosen[0, 0])

    def run(count):
        return kernels.experts_mlp(x[:count], w_gate_up, w_down, weights[:count], chosen[:count], backend="mosaic")

    gathered = run(70)
    for tokens in (9, 64) if mosaic.is_native() else (9,):
        found = run(tokens)
        if mosaic.is_native():
            np.testing.assert_array_equal(found, gathered[:tokens])
        assert relative_error(found, gathered[:tokens]) < 3e-3


@pytest.mark.parametrize(
    "tokens, max_pairs, blocks",
    [(1, None, 2), (64, None, 4), (65, None, 6), (64, 127, 6), (64, 128, 4)],
)
def test_rows_of_up_to_64_tokens(tokens, max_pairs, blocks):
    """Unless there is no room for all that they choose. A forward pass gathers rows in its first matmul and is two kernels."""

    def layer(x, w_gate_up, w_down, weights, chosen):
        return in_room(max_pairs, x, w_gate_up, w_down, weights, chosen)

    launches = launches_on_h200(layer, *types_of(tokens, 4, 2, 256, 320))
    assert len(launches) == 2
    # One more block is kept free.
    assert ((blocks + 1) * 64, 320) in [result.aval.shape for result in launches[0].outvars]


@pytest.mark.thorough
def test_max_pairs(rng):
    """Room for fewer rows, if most experts live elsewhere, changes no bit."""
    tokens, here, k, hidden, _ = SMALL
    *arrays, _ = make_layer(rng, "random", *SMALL)
    chosen = jnp.asarray(choose(rng, "random", tokens, 4 * here, k), jnp.int32)
    layer = *arrays, chosen
    dy = jnp.asarray(rng.normal(size=(tokens, hidden)), jnp.bfloat16)
    in_range = int((chosen < here).sum())
    ours = with_gradients(lambda *a: in_room(in_range, *a), layer, dy)
    theirs = with_gradients(lambda *a: kernels.experts_mlp(*a, backend="mosaic"), layer, dy)
    for actual, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(actual, expected)


def in_room(max_pairs, x, w_gate_up, w_down, weights, chosen):
    """The experts of all tokens as one part, with room for max_pairs of their choices."""
    return compute(x, w_gate_up, w_down, weights, chosen, backend="mosaic", max_pairs=[max_pairs], shares=[1])
