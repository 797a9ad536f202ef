"""A layout is a permutation of the sequence with an inverse; it gives each device its tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.parallel import shard_sequence, token_indices, unshard_sequence
from moe_jax.parallel.sequence.layouts import join_in_order, split_in_order, tokens_before

LAYOUTS = ("contiguous", "zigzag", "striped")


@pytest.mark.parametrize(
    "layout, expected",
    [
        ("contiguous", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        ("zigzag", [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]),
        ("striped", [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]),
    ],
)
def test_twelve_tokens_on_three_devices(layout, expected):
    np.testing.assert_array_equal(shard_sequence(jnp.arange(12)[None], 3, layout)[0], expected)


@settings(max_examples=10, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), devices=st.integers(1, 8), halves=st.integers(1, 5), axis=st.integers(-3, 2))
def test_tokens_of_devices(layout, devices, halves, axis):
    length, shape = 2 * halves, [2, 3, 4]
    shape[axis] = length * devices
    x = np.arange(np.prod(shape)).reshape(shape)
    sharded = shard_sequence(x, devices, layout, axis)
    np.testing.assert_array_equal(unshard_sequence(sharded, devices, layout, axis), x)
    for device in range(devices):
        own = np.asarray(token_indices(length, device, devices, layout))
        part = np.take(sharded, np.arange(device * length, (device + 1) * length), axis)
        np.testing.assert_array_equal(part, np.take(x, own, axis))
        assert (np.diff(own) > 0).all(), "in the order of the sequence"
        index = np.arange(-1, 90)
        counted = tokens_before(jnp.asarray(index), length, device, devices, layout)
        np.testing.assert_array_equal(counted, (own[None] < index[:, None]).sum(axis=1))


@settings(max_examples=10, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), halves=st.integers(1, 5), order=st.permutations(range(6)), count=st.integers(1, 6))
def test_join_and_split_in_order(layout, halves, order, count):
    length, devices = 2 * halves, order[:count]
    own = [np.asarray(token_indices(length, device, 6, layout)) for device in devices]
    parts = [jnp.stack([tokens, -tokens], axis=1)[None] for tokens in own]
    numbers = [jnp.int32(device) for device in devices]
    joined = join_in_order(parts, numbers, layout)
    np.testing.assert_array_equal(joined[0, :, 0], np.sort(np.concatenate(own)))
    np.testing.assert_array_equal(joined[0, :, 1], -joined[0, :, 0])
    for part, expected in zip(split_in_order(joined, numbers, layout), parts, strict=True):
        np.testing.assert_array_equal(part, expected)


def test_zigzag_balances_every_step():
    length, devices = 8, 4
    tokens = [np.asarray(token_indices(length, device, devices, "zigzag")) for device in range(devices)]
    for step in range(devices):
        work = [(tokens[d][:, None] > tokens[(d - step) % devices]).sum() for d in range(devices)]
        assert len(set(work)) == 1


@pytest.mark.parametrize(
    "length, layout, message",
    [
        (12, "zigzag", "multiple of 8; got 12: fill it up with 4 tokens of segment id 0"),
        (14, "striped", "multiple of 4; got 14: fill it up with 2"),
        (8, "zag", "unknown layout 'zag'; choose one of 'contiguous', 'zigzag', 'striped'"),
    ],
)
def test_errors(length, layout, message):
    for f in (shard_sequence, unshard_sequence):
        with pytest.raises(ValueError, match=message):
            f(jnp.zeros((1, length)), 4, layout)
