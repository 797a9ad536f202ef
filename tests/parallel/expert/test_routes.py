"""Compares queues and slots with loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.parallel.expert.routes import first_route, further_route, in_first_round, owners, pack, queue, unpack
from moe_jax.parallel.expert.settings import Capacity

DEVICES, EXPERTS = 3, 6


@settings(max_examples=10, deadline=None)
@given(
    tokens=st.sampled_from([1, 12]),
    k=st.sampled_from([1, 3]),
    slots=st.sampled_from([1, 4]),
    order=st.sampled_from(["position", "probability"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_routes(tokens, k, slots, order, seed):
    rng = np.random.default_rng(seed)
    chosen, weights = rng.integers(-2, EXPERTS + 2, (tokens, k)), rng.random((tokens, k))
    pairs = int(rng.integers(1, tokens * k + 1))
    capacity, further = Capacity(slots, pairs), Capacity(2, pairs)

    owner = owners(jnp.asarray(chosen), EXPERTS, DEVICES)
    expected_owner = np.where((chosen >= 0) & (chosen < EXPERTS), chosen // (EXPERTS // DEVICES), -1)
    np.testing.assert_array_equal(owner, expected_owner)

    queues = jax.tree.map(np.asarray, queue(owner, jnp.asarray(weights, jnp.float32), DEVICES, capacity, order))
    first = np.zeros((tokens, k), bool)
    routes = [first_route(queues, capacity)]
    rounds = int(np.max(-(-(queues.length - queues.first) // further.tokens)))
    routes += [further_route(queues, index, further) for index in range(rounds)]
    for device in range(DEVICES):
        line = [t for t in range(tokens) if (expected_owner[t] == device).any()]
        if order == "probability":
            line.sort(key=lambda t: -np.float32(weights[t][expected_owner[t] == device]).sum())
        choices = np.cumsum([(expected_owner[t] == device).sum() for t in line])
        fits = sum(i < slots and choices[i] <= pairs for i in range(len(line)))
        assert queues.length[device] == len(line) and queues.first[device] == fits
        for t in line[:fits]:
            first[t] |= expected_owner[t] == device
        travelled = [t for route in routes for t in np.asarray(route.token_of_slot[device]) if t < tokens]
        assert travelled == line
        assert sum(int(route.sent[device]) for route in routes) == len(line)
    np.testing.assert_array_equal(in_first_round(queues, owner), first)


@pytest.mark.parametrize("dtype, num_experts", [("uint8", 256), ("int8", 128), ("int16", 6), ("uint32", 6)])
def test_owners_of_narrow_ids(dtype, num_experts):
    last = [[0, num_experts // 2, num_experts - 1]]
    np.testing.assert_array_equal(owners(jnp.asarray(last, dtype), num_experts, 2), [[0, 1, 1]])
    np.testing.assert_array_equal(owners(jnp.asarray(last, dtype), num_experts, 1), [[0, 0, 0]])


@settings(max_examples=10, deadline=None)
@given(tokens=st.sampled_from([1, 12]), slots=st.sampled_from([1, 5, 12]), seed=st.integers(0, 2**32 - 1))
def test_unpack_transposes_pack(tokens, slots, seed):
    rng = np.random.default_rng(seed)
    owner = owners(jnp.asarray(rng.integers(-1, EXPERTS, (tokens, 2))), EXPERTS, DEVICES)
    capacity = Capacity(slots, 2 * tokens)
    route = first_route(queue(owner, jnp.zeros(owner.shape), DEVICES, capacity), capacity)
    x = jnp.asarray(rng.normal(size=(tokens, 4)), jnp.float32)
    rows = jnp.asarray(rng.normal(size=(DEVICES, slots, 4)), jnp.float32)
    packed = pack(x, route)
    filled = np.arange(slots) < np.asarray(route.sent)[:, None]
    assert not np.asarray(packed)[~filled].any()
    expected = jax.linear_transpose(lambda x: pack(x, route), x)(rows)[0]
    np.testing.assert_allclose(unpack(rows, route), expected, rtol=1e-6, atol=1e-6)
