"""Tokens in parts: together they give what all tokens give at once, one part after the other, in the room that each has."""

import jax
import jax.numpy as jnp
import pytest

from moe_jax.kernels.experts.call import TokenPart, experts
from moe_jax.kernels.experts.weights import ExpertWeights
from tests.helpers import oracle, seeds
from tests.helpers.expert_gradients import compare, make_inputs


def test_parts_give_what_all_their_tokens_give_at_once():
    with jax.enable_x64(True):
        inputs, ends = make_inputs(seeds.rng(), 21, 5, 2, 8, 4), [3, 15]

        def in_parts(x, w_gate_up, w_down, weights, chosen):
            parts = list(map(TokenPart, *(jnp.split(a, ends) for a in (x, weights, chosen))))
            room = [2 * part.x.shape[0] for part in parts]
            shares = [next(n for n in (2, 3, 7) if part.x.shape[0] % n == 0) for part in parts]
            return jnp.concatenate(experts(parts, ExpertWeights.of(w_gate_up, w_down), max_pairs=room, shares=shares))

        compare(in_parts, oracle.experts_mlp, inputs, 1e-12)


def test_room_for_fewer_pairs_leaves_out_the_last_experts():
    """At most 37 of 60 pairs are in range, and 20 have room."""
    with jax.enable_x64(True):
        max_pairs = 20
        *arrays, chosen = make_inputs(seeds.rng(), 20, 5, 3, 8, 4)
        chosen = jnp.where(jnp.arange(60).reshape(20, 3) % 60 < 37, chosen, -1)
        order = jnp.argsort(jnp.where(chosen < 0, 5, chosen).reshape(-1), stable=True)
        within = (*arrays, chosen.reshape(-1).at[order[max_pairs:]].set(-1).reshape(20, 3))

        def in_room(x, w_gate_up, w_down, weights, _):
            return experts([TokenPart(x, weights, chosen)], ExpertWeights.of(w_gate_up, w_down), max_pairs=[max_pairs])[0]

        compare(in_room, oracle.experts_mlp, within, 1e-12)


def test_barriers_keep_the_parts_in_order():
    """A part waits for the parts before it; its result waits for no other part. Without barriers XLA joins small operations of
    all parts, and none begins before the last part's tokens are there. The first part's down pass waits for all others."""
    x, w_gate_up, w_down, weights, chosen = make_inputs(seeds.rng(), 6, 3, 2, 8, 4, dtype=jnp.float32)
    parts = list(map(TokenPart, *(jnp.split(a, 3) for a in (x, weights, chosen))))
    text = jax.jit(experts).lower(parts, ExpertWeights.of(w_gate_up, w_down)).as_text()
    assert text.count("optimization_barrier") == 3


def test_parts_that_differ_in_more_than_their_tokens_are_refused():
    x, w_gate_up, w_down, weights, chosen = make_inputs(seeds.rng(), 6, 3, 2, 8, 4, dtype=jnp.float32)
    part = TokenPart(x, weights, chosen)
    one_choice = part._replace(topk_weights=weights[:, :1], topk_experts=chosen[:, :1])
    with pytest.raises(ValueError, match=r"the same dtypes and widths; got .*, int32\[tokens, 2\]; .*, int32\[tokens, 1\]"):
        experts([part, one_choice], ExpertWeights.of(w_gate_up, w_down))
    with pytest.raises(ValueError, match=r"got float32\[tokens, 8\], .*; bfloat16\[tokens, 8\], "):
        experts([part, part._replace(x=x.astype(jnp.bfloat16))], ExpertWeights.of(w_gate_up, w_down))
    with pytest.raises(ValueError, match="one or more, all of the same dtypes and widths; got none"):
        experts([], ExpertWeights.of(w_gate_up, w_down))
    with pytest.raises(ValueError, match="max_pairs must have one entry for each of the 2 parts; got 1"):
        experts([part, part], ExpertWeights.of(w_gate_up, w_down), max_pairs=[3])
    with pytest.raises(ValueError, match="max_pairs must be at least 1 or None; got 0"):
        experts([part], ExpertWeights.of(w_gate_up, w_down), max_pairs=[0])
    with pytest.raises(
        ValueError, match=r"shares must have one entry for each part, a divisor of its tokens; got \[4\] for \[6\] tokens"
    ):
        experts([part], ExpertWeights.of(w_gate_up, w_down), shares=[4])
