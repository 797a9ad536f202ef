"""An order is a permutation of the experts; its busiest device has the least load that brute force finds, or nearly."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.parallel.expert.placement import balanced_order, device_load
from tests.helpers import seeds

LOADS = st.lists(st.integers(0, 1000), min_size=6, max_size=6)
ORDERS = np.array(list(permutations(range(6))))


def busiest(load, order, devices):
    return device_load(np.asarray(load)[list(order)], devices).max()


@settings(deadline=None)
@given(LOADS, st.sampled_from([1, 2, 3, 6]))
def test_order_is_within_four_thirds_of_best(load, devices):
    order = balanced_order(np.asarray(load), devices)
    assert sorted(order) == list(range(6))
    best = device_load(np.asarray(load)[ORDERS], devices).max(axis=-1).min()
    assert best <= busiest(load, order, devices) <= min(4 / 3 * best, busiest(load, range(6), devices))


def test_skewed_loads():
    popularity = 1 / np.arange(1, 129)
    load = seeds.rng().permutation(popularity)
    # The most popular expert shares its device with the 15 least popular ones: no order does better.
    best = popularity[0] + popularity[-15:].sum()
    assert busiest(load, balanced_order(load, 8), 8) == pytest.approx(best)


@pytest.mark.parametrize("devices, best", [(2, 23), (4, 16), (8, 10)])
def test_groups_stay_together(devices, best):
    load = np.asarray([9, 1, 5, 1, 4, 1, 2, 2, 3, 3, 1, 0, 3, 3, 2, 2])
    order = balanced_order(load, devices, num_groups=4)
    assert sorted(order) == list(range(16))
    assert (order.reshape(4, 4) // 4 == order.reshape(4, 4)[:, :1] // 4).all()
    assert busiest(load, order, devices) == best


def test_errors_of_groups_and_loads():
    with pytest.raises(ValueError, match="9 experts are not 6 groups of one size"):
        balanced_order(np.ones(9), 3, num_groups=6)
    with pytest.raises(ValueError, match=r"expert_load must have shape \[experts\]; got \[2, 4\]"):
        balanced_order(np.ones((2, 4)), 2)
    for wrong in (np.nan, -1.0):
        with pytest.raises(ValueError, match=f"expert_load must hold numbers of at least 0; got {wrong} for one expert"):
            balanced_order(np.array([3.0, wrong, 1.0, 2.0]), 2)


def test_errors_of_devices():
    with pytest.raises(ValueError, match="6 experts cannot be divided among 4 devices; use a divisor"):
        balanced_order(np.ones(6), 4)
    with pytest.raises(ValueError, match="4 groups of experts cannot be divided among 6 devices; use a divisor or a multiple"):
        balanced_order(np.ones(12), 6, num_groups=4)
